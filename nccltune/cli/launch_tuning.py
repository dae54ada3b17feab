"""Asks for the profile of a launch, and puts the launch on record, both apart from this process.

A driver that hangs, a store on a dead disk or a fault of ours may not cost the server its start,
nor the supervisor its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nccltune.inject.apart import ApartError, Errand, end, receive, start
from nccltune.inject.running import LOOK_UP_TIMEOUT_S, inherited_environ

RECORD_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is done to the command's environment, and what is said of it.

    Attributes:
        record: to be completed with the server's process id; None where nothing could be decided.
    """

    environ: Mapping[str, str]
    decision: Mapping[str, object]
    lines: tuple[str, ...]
    record: Mapping[str, Any] | None
    is_applied: bool
    warnings: tuple[str, ...] = ()


def tune(argv: Sequence[str], *, policy: str | None, is_any_host: bool, is_required: bool) -> Tuned:
    """Return the environment for a command; never raises, and waits a limited time."""
    environ = inherited_environ()
    try:
        answer = _apart(
            lambda: _look_up(
                argv, environ, policy, is_any_host=is_any_host, is_required=is_required
            ),
            LOOK_UP_TIMEOUT_S,
        )
        return Tuned(**answer)
    except (ApartError, OSError) as error:
        reason = f"looking for the profile failed ({error})"
        ending = "not started" if is_required else "the command starts WITHOUT a profile"
        line = f"warning: {reason}: {ending}"
        decision = {"profile": None, "is_applied": False, "is_degraded": True, "reason": reason}
        return Tuned(environ, decision, (line,), None, is_applied=False)


def record_launch(tuned: Tuned, pid: int) -> tuple[str, ...]:
    """Put a launch on record, now that its process is known; returns what went wrong."""
    if tuned.record is None:
        return ()
    given = tuned.record
    try:
        _apart(lambda: _write_down(given, pid, tuned.environ), RECORD_TIMEOUT_S)
    except (ApartError, OSError) as error:
        return (f"warning: this launch is not on record: {error}",)
    return ()


def _look_up(
    argv: Sequence[str],
    environ: Mapping[str, str],
    policy: str | None,
    *,
    is_any_host: bool,
    is_required: bool,
) -> Mapping[str, object]:
    # Loaded here, in the child: an installation that is broken costs no launch.
    from nccltune.inject.decision import apply, decide
    from nccltune.inject.run_report import decision_data, describe
    from nccltune.store import Launches

    decision, record = decide(
        argv,
        environ,
        route="launch",
        is_any_host=is_any_host,
        launches=None if policy is None else Launches(policy),
    )
    is_refused = is_required and not decision.is_applied
    return {
        "environ": apply(environ, decision),
        "decision": decision_data(decision),
        "lines": tuple(describe(decision, is_refused=is_refused)),
        "record": asdict(record),
        "is_applied": decision.is_applied,
        "warnings": decision.warnings,
    }


def _write_down(
    record: Mapping[str, Any], pid: int, environ: Mapping[str, str]
) -> Mapping[str, object]:
    from nccltune.live.launch_inbox import put_on_record
    from nccltune.live.procfs import read_process
    from nccltune.store import LaunchRecord

    process = read_process(pid)
    ticks = process.started_ticks if process is not None else 0
    put_on_record(replace(LaunchRecord(**record), pid=pid, started_ticks=ticks), environ)
    return {}


def _apart(work: Callable[[], Mapping[str, object]], timeout_s: float) -> dict[str, Any]:
    errands: list[Errand] = []
    try:
        errands.append(start(work))
        return receive(errands[0], timeout_s)
    finally:
        end(errands)
