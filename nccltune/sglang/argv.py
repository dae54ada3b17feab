"""Finds SGLang in a command line, behind wrappers such as ``env`` and ``numactl``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import PurePath

from nccltune.errors import UsageProblem

_EXPECTED = "expected 'python -m sglang.launch_server ...' or 'sglang serve ...'"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_ENV_OPTIONS_WITH_VALUE = frozenset({"-u", "--unset", "-C", "--chdir"})


def split_launch(argv: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return where SGLang is named in the command, and the tokens meant for it.

    Raises:
        UsageProblem: it is not named, or hidden in a shell's script.
    """
    if argv and _ASSIGNMENT.fullmatch(argv[0]):
        raise _not_a_launch(argv, f"a variable is set by: env {argv[0]} ...")
    for idx, (token, following) in enumerate(zip_longest(argv, argv[1:], fillvalue="")):
        name = PurePath(token).name
        if idx and token == "-m" and following == "sglang.launch_server":
            return idx, list(argv[idx + 2 :])
        if (idx and token == "-msglang.launch_server") or token.endswith("sglang/launch_server.py"):
            return idx, list(argv[idx + 1 :])
        if name == "sglang" and following == "serve":
            return idx, _serve_tokens(argv[idx + 2 :])
        if name in _SHELLS and re.fullmatch(r"-\w*c", following):
            raise _not_a_launch(argv, "a shell hides its flags: give the command itself")
    raise _not_a_launch(argv, _EXPECTED)


def _serve_tokens(tokens: Sequence[str]) -> list[str]:
    """Undo what only ``sglang serve`` has: ``--model-type`` and the model as first argument."""
    kept = list(tokens)
    if "--model-type" in kept:
        idx = kept.index("--model-type")
        del kept[idx : idx + 2]
    kept = [token for token in kept if not token.startswith("--model-type=")]
    if kept and not kept[0].startswith("-"):
        return ["--model-path", *kept]
    return kept


def assignments(wrapper: Sequence[str]) -> dict[str, str]:
    """Collect what every ``env`` among the words in front of the program sets."""
    found: dict[str, str] = {}
    is_in_env = is_value = False
    for token in wrapper:
        if is_value:
            is_value = False
        elif not is_in_env:
            is_in_env = PurePath(token).name == "env"
        elif match := _ASSIGNMENT.fullmatch(token):
            found[match[1]] = match[2]
        elif token.startswith("-"):
            is_value = token in _ENV_OPTIONS_WITH_VALUE
        else:
            is_in_env = PurePath(token).name == "env"
    return found


def _not_a_launch(argv: Sequence[str], hint: str) -> UsageProblem:
    shown = " ".join(argv)[:80] or "an empty command"
    return UsageProblem(f"not an SGLang launch: {shown!r}; {hint}", code="not_sglang")
