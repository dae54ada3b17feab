"""What ``run`` says about a decision: lines for people, an envelope for scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import ExitCode

if TYPE_CHECKING:
    from nccltune.inject.resolver import Decision

SCHEMA = "nccltune.cli/1"


def describe(decision: Decision, *, is_refused: bool) -> Iterator[str]:
    """Say what a launch is given, or in one line why it is given nothing."""
    if is_refused:
        yield f"not started, for --require-profile was given: {decision.reason}"
    elif decision.is_applied:
        settings = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in sorted(decision.applied.items())
        )
        yield f"{decision.reason}: {settings or 'it sets nothing here'}"
    elif decision.is_degraded:
        yield f"warning: the command starts WITHOUT its profile: {decision.reason}"
    else:
        yield f"no profile for this command: {decision.reason}"
    for warning in decision.warnings:
        yield f"warning: {warning}"


def write_report(path: Path, decision: Decision, *, is_refused: bool) -> None:
    """Write the envelope that the other commands print.

    Raises:
        FileError: it cannot be written.
    """
    # Loaded here, for a launch that reports to nobody should not wait for it.
    from nccltune.atomic import write_output

    code = ExitCode.NO if is_refused else ExitCode.DONE
    errors = [{"code": "no_profile", "message": decision.reason}] if is_refused else []
    envelope = {
        "schema": SCHEMA,
        "command": "run",
        "status": "no" if is_refused else "ok",
        "exit_code": int(code),
        "data": decision_data(decision),
        "warnings": list(decision.warnings),
        "errors": errors,
    }
    write_output(path, json.dumps(envelope) + "\n")


def decision_data(decision: Decision) -> Mapping[str, object]:
    """Lay out a decision for scripts."""
    path = decision.path
    return {
        "profile": decision.profile_name,
        "digest": decision.digest,
        "is_applied": decision.is_applied,
        "is_degraded": decision.is_degraded,
        "match": None if decision.match is None else str(decision.match),
        "reason": decision.reason,
        "applied": dict(decision.applied),
        "kept_from_operator": dict(decision.kept_from_operator),
        "overwritten_by_sglang": [
            {"name": name, "value": value, "reason": reason}
            for name, value, reason in decision.overwritten_by_sglang
        ],
        "removed": list(decision.removed),
        "all_reduce_path": None if path is None else path.to_json(),
    }
