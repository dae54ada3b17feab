"""What SGLang does to the variables of a profile: leaves them, gives way, or writes over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nccltune.envvars import CATALOGUE
from nccltune.inject.overrides import overwritten
from nccltune.sglang.argv import environ_at_server
from nccltune.sglang.command import parse_launch
from nccltune.sglang.defaults import EnvironmentWrite, writes_for


class EffectKind(StrEnum):
    """What becomes of a value of ours."""

    UNTOUCHED = "untouched"
    GIVES_WAY = "gives_way"
    """SGLang sets the variable only where nothing is set."""
    OVERWRITTEN = "overwritten"
    DEPENDS = "depends"
    """Some flag of a launch makes SGLang write over it."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What SGLang does to one variable.

    Attributes:
        message: for people.
    """

    variable: str
    kind: EffectKind
    message: str


def effects_on(
    settings: Mapping[str, str], argv: Sequence[str] = (), version: str | None = None
) -> tuple[Effect, ...]:
    """Say what SGLang does to each setting.

    Args:
        settings: of a profile.
        argv: a launch command, whose flags then decide; empty for launches in general.
        version: of SGLang; None counts as the newest.

    Raises:
        UsageProblem: not an SGLang launch.
        FileError: the launch's ``--config`` file cannot be used.
    """
    if not argv:
        return tuple(_in_general(name) for name in sorted(settings))
    writes = writes_for(parse_launch(argv), version, environ_at_server(argv, settings))
    lost = {name: (written, reason) for name, written, reason in overwritten(settings, writes)}
    by_name = {write.variable: write for write in writes}
    return tuple(
        _lost(name, *lost[name])
        if name in lost
        else _under_flags(name, settings[name], by_name.get(name))
        for name in sorted(settings)
    )


def _in_general(name: str) -> Effect:
    written = CATALOGUE[name].sglang if name in CATALOGUE else ""
    if not written:
        return Effect(name, EffectKind.UNTOUCHED, "leaves it alone")
    if "over any other value" in written:
        return Effect(name, EffectKind.DEPENDS, f"by itself: {written}")
    return Effect(name, EffectKind.GIVES_WAY, f"by itself: {written}; yours stays")


def _lost(name: str, value: str, reason: str) -> Effect:
    return Effect(name, EffectKind.OVERWRITTEN, f"writes {value} over it ({reason})")


def _under_flags(name: str, value: str, write: EnvironmentWrite | None) -> Effect:
    if write is None:
        return Effect(name, EffectKind.UNTOUCHED, "leaves it alone")
    if write.value == value:
        return Effect(name, EffectKind.UNTOUCHED, f"sets the same ({write.reason})")
    message = f"would set {write.value} ({write.reason}), and gives way to yours"
    return Effect(name, EffectKind.GIVES_WAY, message)
