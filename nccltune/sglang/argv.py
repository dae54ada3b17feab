"""Finds SGLang in a command line, behind wrappers such as ``env`` and ``numactl``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePath
from typing import NamedTuple

from nccltune.errors import UsageProblem

_EXPECTED = "expected 'python -m sglang.launch_server ...' or 'sglang serve ...'"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_ENV_LETTERS_WITH_VALUE = frozenset("aCSu")
_ENV_LONG = {
    "argv0": "a",
    "block-signal": "",
    "chdir": "C",
    "debug": "v",
    "default-signal": "",
    "help": "",
    "ignore-environment": "i",
    "ignore-signal": "",
    "list-signal-handling": "",
    "null": "0",
    "split-string": "S",
    "unset": "u",
    "version": "",
}


def split_launch(argv: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return where SGLang is named in the command, and the tokens meant for it.

    Raises:
        UsageProblem: it is not named, or hidden in a shell's script or in ``env -S``.
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
        if name == "env" and read_env(argv[idx + 1 :]).is_split:
            raise _not_a_launch(argv, "env -S hides its words: give them one by one")
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


class EnvCall(NamedTuple):
    """What one ``env`` does, as GNU's reads its words.

    Attributes:
        emptied_by: the word that begins with an empty environment; empty where none does.
        unset: variables that it takes out.
        assigned: variables that it sets.
        is_split: some of its words are hidden in one (``-S``).
        word_count: how many words are its own.
    """

    emptied_by: str
    unset: frozenset[str]
    assigned: dict[str, str]
    is_split: bool
    word_count: int


def read_env(words: Sequence[str]) -> EnvCall:
    """Read the words after ``env``, up to the program that it starts."""
    emptied_by, unset, is_split = "", set(), False
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        for option, value in _env_options(word, rest):
            emptied_by = word if option == "i" else emptied_by
            is_split = is_split or option == "S"
            if option == "u":
                unset.add(value)
    if rest[:1] == ["-"]:
        emptied_by = rest.pop(0)
    assigned: dict[str, str] = {}
    while rest and "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        assigned[name] = value
    return EnvCall(emptied_by, frozenset(unset), assigned, is_split, len(words) - len(rest))


def _env_options(word: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the options in one word, by their letters; takes their values out of ``rest``."""
    if word.startswith("--"):
        spelled, equals, value = word[2:].partition("=")
        # getopt takes a beginning that one option alone has.
        begun = (
            [spelled] if spelled in _ENV_LONG else [n for n in _ENV_LONG if n.startswith(spelled)]
        )
        letter = _ENV_LONG[begun[0]] if len(begun) == 1 else ""
        if letter in _ENV_LETTERS_WITH_VALUE and not equals:
            value = rest.pop(0) if rest else ""
        yield letter, value
        return
    letters = word[1:]
    for idx, letter in enumerate(letters, 1):
        if letter in _ENV_LETTERS_WITH_VALUE:
            yield letter, letters[idx:] or (rest.pop(0) if rest else "")
            return
        yield letter, ""


class EnvEffects(NamedTuple):
    """What every ``env`` in front of a program does to its environment, taken together.

    Attributes:
        emptied_by: the word that keeps everything inherited out; empty where none does.
        unset: variables that are taken out, and not set again.
        assigned: variables that are set.
    """

    emptied_by: str
    unset: frozenset[str]
    assigned: dict[str, str]


def env_effects(wrapper: Sequence[str]) -> EnvEffects:
    """Read every ``env`` among the words in front of a program."""
    emptied_by, unset = "", frozenset[str]()
    assigned: dict[str, str] = {}
    idx = 0
    while idx < len(wrapper):
        idx += 1
        if PurePath(wrapper[idx - 1]).name != "env":
            continue
        call = read_env(wrapper[idx:])
        idx += call.word_count
        emptied_by = call.emptied_by or emptied_by
        kept = {} if call.emptied_by else assigned
        assigned = {name: kept[name] for name in kept if name not in call.unset} | call.assigned
        unset = (unset | call.unset) - call.assigned.keys()
    return EnvEffects(emptied_by, unset, assigned)


def environ_at_server(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what SGLang finds in its environment, whatever ``env`` in front of it does.

    Args:
        argv: the launch command.
        environ: what the command is started in.

    Raises:
        UsageProblem: not an SGLang launch.
    """
    start, _tokens = split_launch(tuple(argv))
    effects = env_effects(argv[:start])
    inherited = {} if effects.emptied_by else environ
    kept = {name: value for name, value in inherited.items() if name not in effects.unset}
    return {**kept, **effects.assigned}


def _not_a_launch(argv: Sequence[str], hint: str) -> UsageProblem:
    shown = " ".join(argv)[:80] or "an empty command"
    return UsageProblem(f"not an SGLang launch: {shown!r}; {hint}", code="not_sglang")
