"""Whether a rank's real environment is what the profile says, key by key.

Pure: environments in, states out. A difference is named after whoever made it, because the cure
differs: a value that got lost is brought back by a restart through a route of ours, one that SGLang
or the operator chose is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.inject.marker import Marker


class KeyState(StrEnum):
    """What became of one variable in one rank."""

    IN_EFFECT = "in_effect"
    LOST = "lost"
    OVERRIDDEN_BY_SGLANG = "overridden_by_sglang"
    SET_BY_OPERATOR = "set_by_operator"
    UNREADABLE = "unreadable"


class Verdict(StrEnum):
    """What became of a profile in one server."""

    IN_EFFECT = "in_effect"
    PARTLY = "partly"
    """Nothing got lost, and some variables are the operator's or SGLang's."""
    NOT_IN_EFFECT = "not_in_effect"
    UNREADABLE = "unreadable"
    BYPASSED = "bypassed"
    """NCCL does not carry the verify pass of this launch, so that nothing can be claimed."""
    STARTING = "starting"
    """There are no ranks yet, or none any more while the server ends."""
    NOTHING_EXPECTED = "nothing_expected"


@dataclass(frozen=True, slots=True)
class SglangWrite:
    """What SGLang writes under the flags of a launch, over any other value.

    Attributes:
        variable: where it differs from the profile's, another name of the same number.
    """

    variable: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConfEntry:
    """What a configuration file in force sets one variable to; it never shows in an environment."""

    value: str
    path: str


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the ranks of one server should have, and what helps to tell why they have not.

    Attributes:
        settings: of the profile.
        profile_name: for people.
        digest: of the profile, as a marker names it.
        route: which of ours set it, in words; empty where that is not on record.
        launch_environ: what the server's own process was started with; None where unreadable.
        withheld: variables that were left to the operator, each with the reason.
        forced: what SGLang writes over any value, by the profile's variable.
        defaults: what SGLang writes where nothing was set.
        conf: what configuration files set, by variable.
    """

    settings: Mapping[str, str]
    profile_name: str
    digest: str
    route: str = ""
    launch_environ: Mapping[str, str] | None = None
    withheld: Mapping[str, str] = field(default_factory=dict)
    forced: Mapping[str, SglangWrite] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    conf: Mapping[str, ConfEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One variable in one rank.

    Attributes:
        actual: None where it is not set, or cannot be read.
        source: where the actual value comes from; empty where it is not set or not known.
        note: why it is not as expected; empty where it is.
    """

    key: str
    expected: str
    actual: str | None
    state: KeyState
    source: str = ""
    note: str = ""


def compare_rank(
    expectation: Expectation,
    environ: Mapping[str, str] | None,
    marker: Marker | None,
    problem: str = "",
) -> tuple[KeyReport, ...]:
    """Compare one rank with the profile.

    Args:
        expectation: what it should have.
        environ: its real environment; None where unreadable.
        marker: what a route of ours left in it, or in the server's own environment.
        problem: why it is unreadable.
    """
    names = sorted(expectation.settings)
    if environ is None:
        return tuple(_unreadable(expectation, key, problem) for key in names)
    return tuple(_compare(expectation, environ, key, marker) for key in names)


def _unreadable(expectation: Expectation, key: str, problem: str) -> KeyReport:
    expected = expectation.settings[key]
    note = problem
    launched = (expectation.launch_environ or {}).get(key)
    if launched == expected:
        note += "; the server's own process was started with it"
    return KeyReport(key, expected, None, KeyState.UNREADABLE, note=note)


def _compare(
    expectation: Expectation, environ: Mapping[str, str], key: str, marker: Marker | None
) -> KeyReport:
    expected, actual = expectation.settings[key], environ.get(key)
    write = expectation.forced.get(key)
    if write is not None and environ.get(write.variable) == write.value != expected:
        note = f"{write.reason} sets {write.variable}={write.value}, whatever was set before"
        state = KeyState.OVERRIDDEN_BY_SGLANG
        return KeyReport(key, expected, actual, state, "SGLang", note)
    if actual is None:
        return _absent(expectation, key)
    is_marked = marker is not None and key in marker.keys
    if actual == expected:
        source = _our_source(expectation) if is_marked else "set by other means"
        return KeyReport(key, expected, actual, KeyState.IN_EFFECT, source)
    state, source, note = _difference(expectation, key, actual, marker if is_marked else None)
    return KeyReport(key, expected, actual, state, source, note)


def _our_source(expectation: Expectation) -> str:
    how = f", set by {expectation.route}" if expectation.route else ""
    return f"profile {expectation.profile_name}{how}"


def _difference(
    expectation: Expectation, key: str, actual: str, marker: Marker | None
) -> tuple[KeyState, str, str]:
    """Say who set a variable to another value than the profile's.

    Args:
        expectation: what was expected.
        key: the variable.
        actual: its value.
        marker: None where no route of ours says that it set this variable.
    """
    if marker is not None and marker.digest != expectation.digest:
        note = "from a profile that was active when the server was started; restart the server"
        return KeyState.LOST, f"another profile (digest {marker.digest})", note
    launched = (expectation.launch_environ or {}).get(key)
    if launched is not None and launched != actual:
        note = f"the server was started with {launched}, and this rank has another value"
        return KeyState.OVERRIDDEN_BY_SGLANG, "SGLang", note
    if marker is not None and launched is None:
        note = "it was set inside the server, and this rank has another value"
        return KeyState.OVERRIDDEN_BY_SGLANG, "SGLang", note
    if marker is None and launched is None and expectation.defaults.get(key) == actual:
        note = "no profile was injected, and SGLang took its own default"
        return KeyState.LOST, "SGLang's own default", note
    note = "changed after nccltune had set it" if marker is not None else "the operator's wins"
    return KeyState.SET_BY_OPERATOR, "operator", expectation.withheld.get(key, note)


def _absent(expectation: Expectation, key: str) -> KeyReport:
    """Judge a variable that is not in the environment at all."""
    expected = expectation.settings[key]
    entry = expectation.conf.get(key)
    if key in expectation.withheld:
        note = expectation.withheld[key]
        return KeyReport(key, expected, None, KeyState.SET_BY_OPERATOR, "operator", note)
    if entry is None:
        note = "not in the environment"
        if key in (expectation.launch_environ or {}):
            note = "the server was started with it, and this rank does not have it"
        return KeyReport(key, expected, None, KeyState.LOST, note=note)
    source = f"{entry.path} says {entry.value}"
    if entry.value == expected:
        note = "NCCL reads it from that file, which no environment shows"
        return KeyReport(key, expected, None, KeyState.UNREADABLE, source, note)
    note = "not in the environment, so that NCCL takes the file's value"
    return KeyReport(key, expected, None, KeyState.LOST, source, note)


def judge(ranks: Sequence[Iterable[KeyReport]], *, is_bypassed: bool = False) -> Verdict:
    """Sum up the ranks of one server.

    Args:
        ranks: what was found, rank by rank; none while the server starts, or ends.
        is_bypassed: NCCL does not carry the verify pass, so that its settings mean nothing there.
    """
    states = {report.state for reports in ranks for report in reports}
    if not ranks:
        return Verdict.STARTING
    if not states:
        return Verdict.NOTHING_EXPECTED
    if is_bypassed:
        return Verdict.BYPASSED
    if KeyState.LOST in states:
        return Verdict.NOT_IN_EFFECT
    if KeyState.UNREADABLE in states:
        return Verdict.UNREADABLE
    return Verdict.IN_EFFECT if states == {KeyState.IN_EFFECT} else Verdict.PARTLY
