"""Which ways of starting a server are compared. Pure but for what ``find`` reads.

Arms differ in one thing: in NCCL settings, or in how they speculate under the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from nccltune.errors import UsageProblem
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import LaunchCommand, parse_launch
from nccltune.verify.model import Arm
from nccltune.verify.rewriting import check_speculation, with_steps, without_speculation

if TYPE_CHECKING:
    from nccltune.profile import Profile

DEFAULT = "default"
"""SGLang's own environment, no profile."""

ACTIVE = "active"
AGAIN = "again"
"""The baseline once more: two arms that are the same show what a difference of nothing looks
like."""

NO_SPECULATION = "no-speculation"
_NO_SPECULATION_NAME = "no speculation"
_OWN_NAME = "nccltune"

Find = Callable[[str], "Profile"]


def make_arms(
    launch: Sequence[str], *, arms: Sequence[str], num_steps: Sequence[int], find: Find
) -> tuple[Arm, ...]:
    """Return the arms, the baseline first.

    Args:
        launch: the command as typed.
        arms: ``default``, ``active``, a profile's name or file, ``no-speculation``, ``again``.
        num_steps: numbers of draft steps. With these or ``no-speculation`` every arm has the same
            settings: those of the one other word in ``arms``, else none.
        find: returns the profile of a word.

    Raises:
        UsageProblem: not an SGLang launch, flags that contradict each other, fewer than two arms,
            the same arm twice, or arms that would differ in more than one thing.
        FileError: a profile or the ``--config`` file cannot be used.
    """
    command = parse_launch(launch)
    if command.nnodes > 1:
        raise UsageProblem(
            f"--nnodes {command.nnodes}: only one node can be started from here; start the server "
            "yourself and give --url",
            code="several_nodes",
        )
    _check_wrappers(command)
    check_speculation(command)
    settings = [word for word in arms if word not in (NO_SPECULATION, AGAIN)]
    if (num_steps or NO_SPECULATION in arms) and len(settings) > 1:
        shown = ", ".join(settings)
        raise UsageProblem(
            f"arms would differ in two things, in settings ({shown}) and in speculation: name one "
            "of these settings for all arms, or leave out --num-steps and no-speculation",
            code="two_differences",
        )
    made = _speculative_arms if num_steps or NO_SPECULATION in arms else _settings_arms
    found = made(command, arms, num_steps, find)
    if AGAIN in arms:
        found = (*found, replace(found[0], name=AGAIN))
    _check_distinct(found, word=settings[0] if settings else DEFAULT)
    return found


def _check_wrappers(command: LaunchCommand) -> None:
    start, _tokens = split_launch(command.argv)
    if any(PurePath(word).name == _OWN_NAME for word in command.argv[:start]):
        raise UsageProblem(
            f"the launch goes through {_OWN_NAME}, which would give every arm the active profile: "
            "give the server's own command",
            code="own_wrapper",
        )


def _settings_arms(
    command: LaunchCommand, arms: Sequence[str], _num_steps: Sequence[int], find: Find
) -> tuple[Arm, ...]:
    words = [word for word in arms if word != AGAIN] or [DEFAULT]
    return tuple(_as_launched(command, word, find) for word in words)


def _speculative_arms(
    command: LaunchCommand, arms: Sequence[str], num_steps: Sequence[int], find: Find
) -> tuple[Arm, ...]:
    """Vary speculation under one environment, in the order of the words."""
    named = [word for word in arms if word not in (NO_SPECULATION, AGAIN)]
    base = _as_launched(command, named[0] if named else DEFAULT, find)
    stepped = tuple(_stepped(command, base, count) for count in num_steps)
    # One number is compared with the launch as it was typed, where nothing else was named.
    if not stepped or (len(stepped) == 1 and NO_SPECULATION not in arms):
        stepped = (_launch_steps(base), *stepped)
    order: list[Arm] = []
    for word in (*arms, *(() if named else (DEFAULT,))):
        if word == NO_SPECULATION:
            argv = without_speculation(command)
            order.append(
                replace(
                    base,
                    name=_NO_SPECULATION_NAME,
                    argv=argv,
                    num_steps=None,
                    is_speculative=False,
                )
            )
        elif word != AGAIN:
            order.extend(stepped)
    return tuple(order)


def _as_launched(command: LaunchCommand, word: str, find: Find) -> Arm:
    profile = None if word == DEFAULT else find(word)
    is_file = profile is not None and word.endswith(".json")
    return Arm(
        name=profile.name if profile is not None and is_file else word,
        argv=command.argv,
        profile=profile,
        num_steps=command.num_steps,
        is_speculative=command.is_speculative,
        word=word,
    )


def _launch_steps(base: Arm) -> Arm:
    """Name an arm that is the launch as typed after what the others differ from it in."""
    if base.num_steps is None:
        return replace(base, name="as launched")
    return replace(base, name=_steps_name(base.num_steps))


def _stepped(command: LaunchCommand, base: Arm, count: int) -> Arm:
    argv, note = with_steps(command, count)
    return replace(base, name=_steps_name(count), argv=argv, num_steps=count, note=note)


def _steps_name(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _check_distinct(arms: Sequence[Arm], *, word: str) -> None:
    """Refuse what cannot be told apart, by name or by what is started.

    Args:
        arms: all of them.
        word: an arm of ``--arms`` that may be given instead.
    """
    if len(arms) < 2:
        raise UsageProblem(
            f"one arm ({arms[0].name}) is nothing to compare: give --arms A,B or --num-steps A,B",
            code="one_arm",
        )
    seen: dict[object, Arm] = {}
    for arm in arms:
        if arm.name == AGAIN and arm is arms[-1]:
            continue  # the same on purpose
        # A profile without settings leaves a launch as it is.
        settings = tuple(sorted(arm.profile.settings.items())) if arm.profile else ()
        key = (_meaning(arm), settings)
        if key in seen:
            raise UsageProblem(
                f"arms {seen[key].name} and {arm.name} are the same; to see what a difference of "
                f"nothing looks like, give --arms {word},{AGAIN}",
                code="same_arms",
            )
        if any(arm.name == other.name for other in seen.values()):
            raise UsageProblem(
                f"two arms are called {arm.name}: give one of the profiles another name",
                code="same_arms",
            )
        seen[key] = arm


def _meaning(arm: Arm) -> object:
    """What a command asks of SGLang, whatever the order of its flags."""
    return tuple(sorted(parse_launch(arm.argv).flags.items()))
