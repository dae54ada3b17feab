"""One start that is neither ready nor dead yet, and what can be told of its process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError, UsageProblem
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import parse_launch

if TYPE_CHECKING:
    from nccltune.inject.marker import Marker
    from nccltune.live.procfs import Process
    from nccltune.store import LaunchRecord
    from nccltuned.listening import PortWatch
    from nccltuned.logs import LogFiles

DEFAULT_PORT = 30000


@dataclass(slots=True)
class Pending:
    """One start that is neither ready nor dead, as far as is known.

    Attributes:
        descriptor: becomes readable when the process ends; -1 where the kernel gives none.
        listening_since_s: on the monotonic clock; None where it does not listen yet.
    """

    process: Process
    seen_at_s: float
    age_s: float
    logs: LogFiles
    port_watch: PortWatch
    descriptor: int = -1
    marker: Marker | None = None
    invocation_id: str = ""
    record: LaunchRecord | None = None
    listening_since_s: float | None = None

    @property
    def has_log(self) -> bool:
        """Whether its end will be explained."""
        return bool(self.logs.files or self.invocation_id)

    def let_go(self) -> None:
        """Close what was opened to follow it."""
        self.logs.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def profile_of(record: LaunchRecord | None, marker: Marker | None) -> tuple[str | None, str | None]:
    """Return digest and name of the profile that a start was under; None where it set nothing."""
    if record is not None:
        return (record.digest, record.profile_name) if record.settings else (None, None)
    if marker is not None and marker.keys:
        return marker.digest, None
    return None, None


def open_end(pid: int) -> int:
    """Return a descriptor that tells of a process's end; -1 where there is none to be had."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1  # an end is then noticed a little later


def age_of_s(process: Process) -> float:
    """Return how long a process has been there."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now_s - process.started_ticks / os.sysconf("SC_CLK_TCK")


def port_of(process: Process) -> int:
    """Return the port that a server takes; a relative configuration file is not looked into."""
    try:
        text = parse_launch(process.argv).value("port") or ""
    except NccltuneError:
        text = ""
    return int(text) if text.isascii() and text.isdecimal() else DEFAULT_PORT


def tokens_of(argv: tuple[str, ...]) -> list[str]:
    """Return what is asked of SGLang, be it named at the end of another program's arguments."""
    try:
        return split_launch(argv)[1]
    except UsageProblem:
        return []
