"""One start that is neither ready nor dead yet, and what can be told of its process."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError, UsageProblem
from nccltune.inject.wrappers import Way
from nccltune.live.failed_starts import UNKNOWN_DIGEST
from nccltune.live.process_files import ProcessFiles
from nccltune.live.scanner import is_launch
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import parse_launch
from nccltune.sglang.flags import read_flags
from nccltuned.log_file import Inode, LogText
from nccltuned.logs import LogFiles

if TYPE_CHECKING:
    from pathlib import Path

    from nccltune.inject.marker import Marker
    from nccltune.live.procfs import Process
    from nccltune.store import LaunchRecord
    from nccltuned.fronts import Place
    from nccltuned.listening import PortWatch

DEFAULT_PORT = 30000
_MAX_PORT_DIGITS = 5


@dataclass(slots=True)
class Pending:
    """One start that is neither ready nor dead, as far as is known.

    Attributes:
        place: of the process as it was first seen. A title takes the place of its words, and one
            that is ending shows none.
        front: the program in front of it that writes its log, and may outlive it; None for none.
        descriptor: becomes readable when the process ends, or the one in front that has outlived
            it; -1 where the kernel gives none.
        invocation_id: of the unit's run whose journal is its log; empty for none.
        journal_stream: what leads there.
        is_environ_known: so that a start without a mark is known to be one without a profile.
        port: None where it is not known yet.
        uid: of its user; None where that is not sure.
        generation: of the store's state when it was first seen.
        is_of_unit: systemd confirms that it is the server of a unit of the host.
        is_missed: it ended before anybody looked, and is known by its record alone.
        has_said_ready: its log has said so, at whatever time.
        has_listened: it has been seen to listen, at whatever time.
        listening_since_s: on the monotonic clock; None where it does not listen yet, or no longer.
        log_moved_at_s: when its log was seen to have grown last.
        died_at_s: None while it lives.
        words: its log at its death; later the file may be cut for the next start.
        is_succeeded: another server was started by the same program in front since it died, and
            writes the same log.
    """

    place: Place
    seen_at_s: float
    age_s: float
    port_watch: PortWatch
    logs: LogFiles = field(default_factory=LogFiles)
    front: Process | None = None
    descriptor: int = -1
    marker: Marker | None = None
    is_environ_known: bool = True
    invocation_id: str = ""
    journal_stream: Inode | None = None
    record: LaunchRecord | None = None
    port: int | None = None
    uid: int | None = None
    generation: int = 0
    is_of_unit: bool = False
    is_missed: bool = False
    has_said_ready: bool = False
    has_listened: bool = False
    listening_since_s: float | None = None
    log_moved_at_s: float = 0.0
    died_at_s: float | None = None
    words: LogText = field(default_factory=LogText)
    is_succeeded: bool = False

    @property
    def process(self) -> Process:
        """The server's own, or that of a program that will start it or become it."""
        return self.place.process

    @property
    def has_log(self) -> bool:
        """Whether its end will be explained."""
        return bool(self.logs.files or self.invocation_id)

    def has_died(self, now_s: float) -> None:
        """Note its end, and wait for that of the program in front, whose last words count too."""
        self.died_at_s = now_s
        self.words = self.logs.read()
        self._stop_waiting()
        if self.front is not None:
            self.descriptor = open_end(self.front.pid)

    def died_at(self, now_s: float) -> str:
        """Return when it was seen to have died: ISO 8601, UTC; a second later, for its words."""
        passed_s = now_s - (now_s if self.died_at_s is None else self.died_at_s)
        return datetime.fromtimestamp(time.time() - passed_s + 1.0, UTC).isoformat()

    def lose_logs(self, outputs: Collection[Inode]) -> None:
        """Read no more of what another server writes as well."""
        is_any_lost = self.logs.drop(outputs)
        if self.journal_stream in outputs:
            self.invocation_id, self.journal_stream, is_any_lost = "", None, True
        if is_any_lost:
            self.has_said_ready = False
        if not self.has_log:
            self.front = None

    def let_go(self) -> None:
        """Close what was opened to follow it."""
        self.logs.close()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def profile_of(pending: Pending) -> tuple[str | None, str | None]:
    """Return digest and name of the profile that a start was under; None where it set nothing."""
    record, marker = pending.record, pending.marker
    has_own_environ = record is not None and _is_behind_stranger(pending, record)
    if record is not None and not has_own_environ:
        return (record.digest, record.profile_name) if record.settings else (None, None)
    # What a container's server was given can be read there alone.
    is_elsewhere = has_own_environ and not is_launch(pending.process.argv)
    if is_elsewhere or not pending.is_environ_known:
        return UNKNOWN_DIGEST, None
    if marker is not None and marker.keys:
        return marker.digest, None
    return None, None


def _is_behind_stranger(pending: Pending, record: LaunchRecord) -> bool:
    """Whether a program with an environment of its own is what a record is of, or comes after."""
    for each in pending.place.writers:
        with suppress(UsageProblem):
            if Way.of(each.argv).strangers:
                return True
        if each.started_ticks == record.started_ticks:
            break
    return False


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
