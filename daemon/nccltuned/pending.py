"""One start that is neither ready nor dead yet, and what can be told of its process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError, UsageProblem
from nccltune.live.process_files import ProcessFiles
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import parse_launch
from nccltune.sglang.flags import read_flags

if TYPE_CHECKING:
    from pathlib import Path

    from nccltune.inject.marker import Marker
    from nccltune.live.procfs import Process
    from nccltune.store import LaunchRecord
    from nccltuned.listening import PortWatch
    from nccltuned.logs import LogFiles

DEFAULT_PORT = 30000
_MAX_PORT_DIGITS = 5


@dataclass(slots=True)
class Pending:
    """One start that is neither ready nor dead, as far as is known.

    Attributes:
        process: as it was first seen. A title takes the place of its words, and one that is ending
            shows none.
        fronts: programs in front of it that are given the same words, the nearest first.
        front: the one of them that writes its log, and may outlive it; None for none.
        descriptor: becomes readable when the process ends, or the one in front that has outlived
            it; -1 where the kernel gives none.
        port: None where it is not known yet.
        uid: of its user; None where that is not sure.
        generation: of the store's state when it was first seen.
        is_of_unit: systemd confirms that it is the server of a unit of the host.
        is_missed: it ended before anybody looked, and is known by its record alone.
        listening_since_s: on the monotonic clock; None where it does not listen yet.
        log_moved_at_s: when its log was seen to have grown last.
        died_at_s: None while it lives.
        text: its log at its death; later the file may be cut for the next start.
    """

    process: Process
    seen_at_s: float
    age_s: float
    logs: LogFiles
    port_watch: PortWatch
    fronts: tuple[Process, ...] = ()
    front: Process | None = None
    descriptor: int = -1
    marker: Marker | None = None
    invocation_id: str = ""
    record: LaunchRecord | None = None
    port: int | None = None
    uid: int | None = None
    generation: int = 0
    is_of_unit: bool = False
    is_missed: bool = False
    listening_since_s: float | None = None
    log_moved_at_s: float = 0.0
    died_at_s: float | None = None
    text: str = ""

    @property
    def has_log(self) -> bool:
        """Whether its end will be explained."""
        return bool(self.logs.files or self.invocation_id)

    def has_died(self, now_s: float) -> None:
        """Note its end, and wait for that of the program in front, whose last words count too."""
        self.died_at_s = now_s
        self.text = self.logs.read()
        self._stop_waiting()
        if self.front is not None:
            self.descriptor = open_end(self.front.pid)

    def let_go(self) -> None:
        """Close what was opened to follow it."""
        self.logs.close()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
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


def port_given(process: Process) -> int | None:
    """Return the port that a server takes; None where its configuration file may say."""
    try:
        flags = read_flags(tokens_of(process.argv)).values
    except UsageProblem:
        return DEFAULT_PORT
    if "config" in flags and "port" not in flags:
        return None
    return _number(next(iter(flags.get("port", ())), ""))


def port_in_file(process: Process, root: Path) -> int:
    """Return the port that a server's configuration file says; for a child, as all parsing is."""
    try:
        command = parse_launch(process.argv, ProcessFiles.of(process.pid, root).read)
    except NccltuneError:
        return DEFAULT_PORT
    return _number(command.value("port") or "")


def _number(text: str) -> int:
    is_port = text.isascii() and text.isdecimal() and len(text) <= _MAX_PORT_DIGITS
    return int(text) if is_port else DEFAULT_PORT


def tokens_of(argv: tuple[str, ...]) -> list[str]:
    """Return what is asked of SGLang, be it named at the end of another program's arguments."""
    try:
        return split_launch(argv)[1]
    except UsageProblem:
        return []
