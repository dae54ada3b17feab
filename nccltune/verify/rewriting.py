"""Rewrites a launch command to speculate otherwise, or not at all. Pure.

Wrappers, the program and every flag that is not about speculation stay as typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nccltune.errors import UsageProblem
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import EAGLE_FAMILY, LaunchCommand
from nccltune.sglang.flags import canonical_name

_PREFIX = "speculative"
_STEPS = "speculative_num_steps"
_TOPK = "speculative_eagle_topk"
_TOKENS = "speculative_num_draft_tokens"
_COUNTED = (_STEPS, _TOPK, _TOKENS)
_STEPPED = EAGLE_FAMILY | {"STANDALONE"}
"""Algorithms whose draft model makes one pass a step."""

_NUMBER = re.compile(r"-\d+(\.\d*)?")


class _Group(NamedTuple):
    """A flag with its values as typed; words that follow no flag have no name."""

    name: str
    words: tuple[str, ...]


def check_speculation(command: LaunchCommand) -> None:
    """Refuse flags that contradict each other, which SGLang would settle without a word.

    Raises:
        UsageProblem: ``conflicting_flags``.
    """
    given = [group for group in _groups(command) if group.name.startswith(_PREFIX)]
    seen: dict[str, tuple[str, ...]] = {}
    for name, words in given:
        before = seen.setdefault(name, words)
        if _value(before) != _value(words):
            shown = f"{' '.join(before)} and {' '.join(words)}"
            raise _conflict(f"{shown} contradict each other: keep one")
    if not command.is_speculative:
        idle = sorted(name for name in command.flags if name in _COUNTED)
        if idle:
            raise _conflict(
                f"--{idle[0].replace('_', '-')} without --speculative-algorithm: SGLang would not "
                "speculate; name the algorithm or leave the flag out"
            )
        return
    steps, topk, tokens = command.num_steps, command.eagle_topk, command.num_draft_tokens
    if not command.is_eagle_launch or steps is None or topk is None or tokens is None:
        return
    if topk == 1 and tokens != steps + 1:
        raise _conflict(
            f"--speculative-num-steps {steps} --speculative-eagle-topk 1 makes {steps + 1} draft "
            f"tokens, not {tokens}: give --speculative-num-draft-tokens {steps + 1}"
        )
    if tokens > _tree_tokens(steps, topk):
        raise _conflict(
            f"--speculative-num-draft-tokens {tokens}: {steps} steps with top-k {topk} make at "
            f"most {_tree_tokens(steps, topk)}"
        )


def with_steps(command: LaunchCommand, count: int) -> tuple[tuple[str, ...], str]:
    """Return the command with another number of draft steps, and what was adjusted with it.

    A chain (top-k 1) has one draft token more than steps. A tree keeps its number of draft tokens
    as far as so many steps can make them.

    Raises:
        UsageProblem: the launch does not speculate in steps.
    """
    if count < 1:
        raise UsageProblem(
            f"--num-steps {count}: a draft has one step or more; for none, give --arms "
            "no-speculation",
            code="bad_num_steps",
        )
    algorithm = command.speculative_algorithm
    if algorithm is None:
        raise UsageProblem(
            f"--num-steps {count}: this launch does not speculate; give --speculative-algorithm",
            code="no_speculation",
        )
    if algorithm not in _STEPPED:
        raise UsageProblem(
            f"--num-steps {count}: --speculative-algorithm {algorithm} has no draft steps",
            code="no_draft_steps",
        )
    if command.has("speculative_adaptive"):
        raise UsageProblem(
            f"--num-steps {count}: --speculative-adaptive changes the number of steps while it "
            "runs; leave it out",
            code="conflicting_flags",
        )
    topk = command.eagle_topk or 1
    tokens, note = count + 1, ""
    if topk > 1:
        asked = command.num_draft_tokens or count + 1
        tokens = min(asked, _tree_tokens(count, topk))
        if tokens != asked:
            note = (
                f"{count} steps with top-k {topk} make at most {tokens} draft tokens, not {asked}"
            )
    added = (
        *("--speculative-num-steps", str(count)),
        *("--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(tokens)),
    )
    return (*_without(command, _COUNTED), *added), note


def without_speculation(command: LaunchCommand) -> tuple[str, ...]:
    """Return the command without any flag about speculation.

    Raises:
        UsageProblem: there is none, or it stands in the ``--config`` file, where no flag undoes it.
    """
    if not command.is_speculative:
        raise UsageProblem(
            "no-speculation: this launch does not speculate, so that there is nothing to leave out",
            code="no_speculation",
        )
    groups = _groups(command)
    typed = {group.name for group in groups}
    filed = sorted(name for name in command.flags if name.startswith(_PREFIX) and name not in typed)
    if filed:
        shown = ", ".join(filed)
        raise UsageProblem(
            f"no-speculation: {command.value('config')} sets {shown}, which no flag takes back; "
            "move these to the command line",
            code="config_speculates",
        )
    return _without(command, tuple(name for name in typed if name.startswith(_PREFIX)))


def _without(command: LaunchCommand, names: Sequence[str]) -> tuple[str, ...]:
    head = command.argv[: _flags_start(command)]
    kept = [word for name, words in _groups(command) if name not in names for word in words]
    return (*head, *kept)


def _flags_start(command: LaunchCommand) -> int:
    """Return where SGLang's own arguments begin."""
    start, _tokens = split_launch(command.argv)
    # "-m sglang.launch_server" and "sglang serve" are two words.
    is_one_word = command.argv[start].endswith(("launch_server.py", "-msglang.launch_server"))
    return start + (1 if is_one_word else 2)


def _groups(command: LaunchCommand) -> tuple[_Group, ...]:
    return tuple(_group(command.argv[_flags_start(command) :]))


def _group(words: Sequence[str]) -> Iterator[_Group]:
    name, group = "", list[str]()
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            if group:
                yield _Group(name, tuple(group))
            spelled = word.removeprefix("--").partition("=")[0]
            name, group = canonical_name(spelled) if word.startswith("--") else "", []
        group.append(word)
    if group:
        yield _Group(name, tuple(group))


def _value(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of a flag, in either way of writing them."""
    _flag, equals, value = words[0].partition("=")
    return (value, *words[1:]) if equals else words[1:]


def _tree_tokens(steps: int, topk: int) -> int:
    """Return the most draft tokens that a tree can have, the root included."""
    return 1 + topk + (steps - 1) * topk * topk


def _conflict(reason: str) -> UsageProblem:
    return UsageProblem(reason, code="conflicting_flags")
