"""What the words in front of SGLang do to the environment that a launch is given. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from nccltune.sglang.argv import split_launch

_OWN_ENVIRONMENT = frozenset({"sudo", "su", "doas", "runuser", "ssh", "srun", "docker", "podman"})
_EMPTY_ENVIRONMENT = frozenset({"-", "-i", "--ignore-environment"})


def lost_on_the_way(argv: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    """Warn of words that keep variables from SGLang, one line each.

    Args:
        argv: an SGLang launch as typed.
        names: variables that it is given.
    """
    if not names:
        return
    start, _tokens = split_launch(tuple(argv))
    is_in_env = False
    words = iter(argv[:start])
    for word in words:
        name = PurePath(word).name
        if is_in_env and word in _EMPTY_ENVIRONMENT:
            yield f"env {word} in the command keeps the whole profile from the server"
        elif is_in_env and word.startswith(("-u", "--unset")):
            unset = word.removeprefix("--unset").removeprefix("-u").removeprefix("=")
            unset = unset or next(words, "")
            if unset in names:
                yield f"env -u {unset} in the command takes it out again"
        elif name in _OWN_ENVIRONMENT:
            yield f"{name} may start the server in an environment of its own; see nccltune status"
        if not is_in_env or not (word.startswith("-") or "=" in word):
            is_in_env = name == "env"
