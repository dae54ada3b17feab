"""Whose value a variable has: the operator's, ours from an earlier route, or SGLang's own.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nccltune.envvars import CATALOGUE, Kind, canonical, find_conflict
from nccltune.inject.marker import MARKER, parse_marker

if TYPE_CHECKING:
    from nccltune.sglang.defaults import EnvironmentWrite

_PAIRED = (
    frozenset({"NCCL_ALGO", "NCCL_PROTO"}),
    frozenset({"NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"}),
)
"""Variables that NCCL reads together, so that a value of ours may not fit one of the operator's."""

_SETTABLE = frozenset(
    name for name, variable in CATALOGUE.items() if variable.kind is not Kind.FORBIDDEN
)


class Shares(NamedTuple):
    """A profile's settings, sorted by who decides.

    Attributes:
        applied: to be set.
        kept: variables of the profile, or other names of the same, with the operator's values.
        left_out: what does not fit the operator's values: name and reason.
    """

    applied: Mapping[str, str]
    kept: Mapping[str, str]
    left_out: tuple[tuple[str, str], ...] = ()


def names_of_ours(
    environ: Mapping[str, str], settings: Mapping[str, str], digest: str | None
) -> frozenset[str]:
    """Return the variables that an earlier route has set, by its marker.

    Under the same profile a value that differs was changed by the operator since. Under another
    profile, one that was active before, the marker alone decides.

    Args:
        environ: of the launch.
        settings: of the active profile.
        digest: of these settings; None where none is active.
    """
    marker = parse_marker(environ.get(MARKER))
    if marker is None:
        return frozenset()
    names = {name for name in marker.keys if name in environ and name in _SETTABLE}
    if marker.digest == digest:
        names = {name for name in names if environ[name] == settings.get(name)}
    return frozenset(names)


def share_out(settings: Mapping[str, str], operator: Mapping[str, str]) -> Shares:
    """Sort a profile's settings by who decides: what the operator has set wins.

    Args:
        settings: of the profile.
        operator: the environment without what is ours.
    """
    theirs = {name: value for name, value in operator.items() if name in CATALOGUE}
    by_number = {_number_name(name, value): name for name, value in theirs.items()}
    applied: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, value in settings.items():
        other = name if name in theirs else by_number.get(_number_name(name, value))
        if other is not None:
            kept[other] = theirs[other]
        elif name in _SETTABLE:
            applied[name] = value
    left_out = tuple(_misfits(applied, theirs))
    for name, _reason in left_out:
        del applied[name]
    return Shares(applied, kept, left_out)


def overwritten(
    applied: Mapping[str, str], writes: Sequence[EnvironmentWrite]
) -> tuple[tuple[str, str, str], ...]:
    """Return what SGLang writes over: name, its value, the flag or rule behind it."""
    found = []
    for write in writes:
        name = next((n for n in applied if _is_same_number(n, applied[n], write)), None)
        if name is not None and write.is_forced and write.value != applied[name]:
            found.append((name, write.value, write.reason))
    return tuple(found)


def _misfits(applied: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Find what NCCL would not follow, or would not start with, beside the operator's values."""
    found = []
    for pair in _PAIRED:
        ours = {name: value for name, value in applied.items() if name in pair}
        beside = {name: value for name, value in theirs.items() if name in pair and value}
        if not ours or not beside:
            continue
        try:
            conflict = find_conflict({**ours, **beside})
        except ValueError:
            conflict = "", "not a number"
        if conflict is not None:
            shown = ", ".join(f"{name}={value}" for name, value in sorted(beside.items()))
            found += [(name, f"does not fit {shown}") for name in sorted(ours)]
    return found


def _number_name(name: str, value: str) -> str:
    """Return the newer of two names for one number."""
    return next(iter(canonical({name: value})), name)


def _is_same_number(name: str, value: str, write: EnvironmentWrite) -> bool:
    is_known = write.variable in CATALOGUE
    return name == write.variable or (
        is_known and _number_name(name, value) == _number_name(write.variable, write.value)
    )
