"""What ``launch`` leaves in its report file: the envelope that other commands print.

The exit status of ``launch`` is the command's own, so that it says nothing of ours: the report
names the ending.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.atomic import write_output
from nccltune.cli.envelope import SCHEMA, Complaint, plain

if TYPE_CHECKING:
    from nccltune.supervise import Ending, Moment


@dataclass(slots=True)
class Report:
    """The report of one launch, written when the server is ready and again when it has ended.

    Attributes:
        path: where to; None for nowhere.
        decision: what was decided about the profile, laid out for scripts.
    """

    path: Path | None
    decision: Mapping[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def write_moment(self, moment: Moment) -> None:
        """Write that the server is ready, and goes on."""
        self._write("ok", 0, {"ending": None, **moment_data(moment)})

    def write_ending(self, ending: Ending, moment: Moment) -> None:
        """Write how it ended."""
        failure = ending.failure
        data = {
            **moment_data(moment),
            "ending": str(ending.kind),
            "is_nccl_like": ending.is_nccl_like,
            "failure": None
            if failure is None
            else {"kind": str(failure.kind), "line": failure.line},
        }
        errors = [Complaint(str(ending.kind), ending.message)] if ending.is_fault else []
        self._write("error" if ending.is_fault else "ok", ending.exit_code, data, errors)

    def write_failure(self, complaint: Complaint, exit_code: int, status: str = "error") -> None:
        """Write why nothing was started."""
        self._write(status, exit_code, {}, [complaint])

    def _write(
        self,
        status: str,
        exit_code: int,
        data: Mapping[str, object],
        errors: Sequence[Complaint] = (),
    ) -> None:
        if self.path is None:
            return
        envelope = {
            "schema": SCHEMA,
            "command": "launch",
            "status": status,
            "exit_code": int(exit_code),
            "data": plain({**self.decision, **data}),
            "warnings": self.warnings,
            "errors": [{"code": each.code, "message": each.message} for each in errors],
        }
        write_output(self.path, json.dumps(envelope, allow_nan=False) + "\n")


def moment_data(moment: Moment) -> dict[str, object]:
    """Lay out where a server is for scripts."""
    served_s = moment.served_s
    return {
        "pid": moment.pid,
        "url": moment.endpoint.url if moment.endpoint is not None else None,
        "is_ready": served_s is not None,
        "ready_s": None if served_s is None else moment.waited.elapsed_s - served_s,
        "elapsed_s": moment.waited.elapsed_s,
        "stage": str(moment.waited.step.stage),
        "stages": [
            {
                "stage": str(each.step.stage),
                "subject": each.step.subject,
                "done": each.step.done,
                "total": each.step.total,
                "duration_s": each.duration_s,
            }
            for each in moment.times
        ],
    }
