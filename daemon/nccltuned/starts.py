"""Follows servers from their start until they are ready or dead, and says which of it it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError, UsageProblem
from nccltune.failed_starts import Ending, LogReading, Start, read_log
from nccltune.inject import command_digest
from nccltune.marker import MARKER, Marker, parse_marker
from nccltune.procfs import PROC_ROOT, Process, is_running, read_environ, read_process
from nccltune.server_facts import find_record, read_boot_id, read_started_at
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import parse_launch
from nccltuned.listening import PortWatch
from nccltuned.logs import LogFiles, is_invocation, is_journal, open_logs, read_journal

if TYPE_CHECKING:
    from nccltune.procfs import Server
    from nccltune.store import LaunchRecord

DEFAULT_PORT = 30000
WARM_S = 20.0
"""A server without a log that can be read is ready when it has listened for so long: the warm-up
request that follows the first moment takes a few seconds."""

WARM_WITH_LOG_S = 400.0
"""Where the log will tell how it ended, a hang in the warm-up has so long to show: SGLang's own
watchdog ends it after 300 s."""

BLIND_S = 3600.0
"""A server whose sockets may not be looked at counts as ready after so long."""

NEW_S = 60.0
"""Up to this age a log that was cut for a start is read from its beginning."""

READY_WORDS = b"The server is fired up and ready to roll"
"""Printed after the warm-up; whole logs are read only when a start has failed."""

MAX_MISSED = 10
"""So many starts that ended unseen are looked up in the journal."""

Defer = Callable[[Callable[[], object], Callable[[object], None]], None]
"""Runs the first in a child, and hands what it returns to the second; None where it died."""


@dataclass(slots=True)
class _Pending:
    """One start that is neither ready nor dead, as far as is known.

    Attributes:
        listening_since_s: on the monotonic clock; None where it does not listen yet.
    """

    process: Process
    seen_at_s: float
    age_s: float
    logs: LogFiles
    port_watch: PortWatch
    marker: Marker | None = None
    invocation_id: str = ""
    record: LaunchRecord | None = None
    listening_since_s: float | None = None

    @property
    def has_log(self) -> bool:
        """Whether its end will be explained."""
        return bool(self.logs.descriptors or self.invocation_id)


@dataclass(slots=True)
class StartTracker:
    """All starts of this boot.

    Attributes:
        is_known: whether the end of a start is on record already.
        on_end: told of every start that has come to its end.
        defer: see ``Defer``.
    """

    is_known: Callable[[tuple[str, int, int]], bool]
    on_end: Callable[[Start], None]
    defer: Defer
    root: Path = PROC_ROOT
    clock: Callable[[], float] = time.monotonic
    _pending: dict[tuple[int, int], _Pending] = field(default_factory=dict)
    _settled: dict[tuple[int, int], Process] = field(default_factory=dict)
    _records: Sequence[LaunchRecord] = ()
    _boot_id: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether a start is going on, so that looking often is worth it."""
        return bool(self._pending)

    def take_records(self, records: Sequence[LaunchRecord], *, is_first: bool) -> None:
        """Learn of launches, and begin to follow those whose process is there.

        Args:
            records: all that are kept, the newest last.
            is_first: nothing was followed before, so that starts may have been missed.
        """
        self._boot_id = self._boot_id or read_boot_id(self.root)
        known = {self._record_key(record) for record in self._records}
        self._records = [record for record in records if record.boot_id == self._boot_id]
        missed = []
        for record in self._records:
            process = read_process(record.pid, self.root)
            if process is not None and process.started_ticks == record.started_ticks:
                self._follow(process)
            elif is_first or self._record_key(record) not in known:
                missed.append(record)
        for record in missed[-MAX_MISSED:]:
            self._look_up(record)

    def take_servers(self, servers: Iterable[Server]) -> None:
        """Begin to follow servers that were not seen before, whoever started them."""
        for server in servers:
            if server.root is not None and server.is_launch:
                self._follow(server.root)

    def step(self) -> None:
        """Look at every start that is going on."""
        for key, pending in list(self._pending.items()):
            process = read_process(pending.process.pid, self.root)
            if process is None or process.started_ticks != pending.process.started_ticks:
                del self._pending[key]
                self._died(pending)
                continue
            pending.process = process
            if self._is_ready(pending):
                del self._pending[key]
                self._settled[key] = process
                self._end(pending, LogReading(Ending.READY))
        for key, process in list(self._settled.items()):
            if not is_running(process, self.root):
                del self._settled[key]

    def close(self) -> None:
        """Let go of every log."""
        for pending in self._pending.values():
            pending.logs.close()
        self._pending.clear()

    @staticmethod
    def _record_key(record: LaunchRecord) -> tuple[str, int, int]:
        return record.boot_id, record.pid, record.started_ticks

    def _follow(self, process: Process) -> None:
        key = (process.pid, process.started_ticks)
        if key in self._pending or key in self._settled:
            return
        if self.is_known((self._boot_id, *key)):
            self._settled[key] = process
            return
        environ = read_environ(process, self.root).values or {}
        age_s = _age_s(process)
        pending = _Pending(
            process=process,
            seen_at_s=self.clock(),
            age_s=age_s,
            logs=self._open_logs(process, is_new=age_s < NEW_S),
            port_watch=PortWatch(self.root, self.clock),
            marker=parse_marker(environ.get(MARKER)),
        )
        invocation_id = environ.get("INVOCATION_ID", "")
        writers = (process.pid, *self._front_of(process))
        if is_invocation(invocation_id) and any(
            is_journal(pid, environ, self.root) for pid in writers
        ):
            pending.invocation_id = invocation_id
        self._pending[key] = pending

    def _front_of(self, process: Process) -> tuple[int, ...]:
        """Return the program in front of a server that passes its output on, where there is one."""
        front = read_process(process.parent_pid, self.root)
        is_front = front is not None and _tokens(front.argv) == _tokens(process.argv) != []
        return (front.pid,) if front is not None and is_front else ()

    def _open_logs(self, process: Process, *, is_new: bool) -> LogFiles:
        """Open a server's log, or that of the program in front of it."""
        for pid in (process.pid, *self._front_of(process)):
            logs = open_logs(pid, is_new=is_new, root=self.root)
            if logs.descriptors:
                return logs
        return LogFiles()

    def _is_ready(self, pending: _Pending) -> bool:
        now_s = self.clock()
        process = pending.process
        answer = pending.port_watch.is_listening(process.pid, _port(process))
        if answer is None:
            return pending.age_s + now_s - pending.seen_at_s > BLIND_S
        if not answer:
            pending.listening_since_s = None
            return False
        if pending.listening_since_s is None:
            # Whoever was seen for the first time when it was old has listened for long.
            pending.listening_since_s = now_s - (pending.age_s if pending.age_s > NEW_S else 0.0)
        if pending.logs.has_new(READY_WORDS):
            return True
        listened_s = now_s - pending.listening_since_s
        return listened_s >= (WARM_WITH_LOG_S if pending.has_log else WARM_S)

    def _died(self, pending: _Pending) -> None:
        text = pending.logs.read()
        if text:
            self._end(pending, read_log(text))
        elif pending.invocation_id:
            self._read_journal(pending, pending.invocation_id, read_started_at(pending.process))
        else:
            self._end(pending, LogReading(Ending.UNKNOWN))

    def _look_up(self, record: LaunchRecord) -> None:
        """Ask the journal about a start that nobody saw; without its word nothing is assumed."""
        if self.is_known(self._record_key(record)) or not is_invocation(record.invocation_id):
            return
        process = Process(record.pid, 0, record.started_ticks, 0, ())
        pending = _Pending(process, self.clock(), 0.0, LogFiles(), PortWatch(), record=record)
        self._read_journal(pending, record.invocation_id, record.launched_at)

    def _read_journal(self, pending: _Pending, invocation_id: str, since: str) -> None:
        def done(text: object) -> None:
            reading = LogReading(Ending.UNKNOWN)
            if isinstance(text, str) and text:
                reading = read_log(text)
            if pending.record is None or reading.ending is not Ending.UNKNOWN:
                self._end(pending, reading)

        self.defer(lambda: read_journal(invocation_id, since), done)

    def _end(self, pending: _Pending, reading: LogReading) -> None:
        """Tell how a start ended."""
        is_unclear = reading.ending in (Ending.UNKNOWN, Ending.STOPPED)
        since_s = pending.listening_since_s
        if is_unclear and since_s is not None and self.clock() - since_s >= WARM_S:
            reading = LogReading(Ending.READY)
        pending.logs.close()
        process = pending.process
        record = pending.record or find_record(process, self._records, self.root)
        digest, name = _profile_of(record, pending.marker)
        self.on_end(
            Start(
                boot_id=self._boot_id,
                pid=process.pid,
                started_ticks=process.started_ticks,
                launched_at=record.launched_at if record else read_started_at(process),
                command_digest=record.command_digest if record else command_digest(process.argv),
                profile_name=name,
                digest=digest,
                ending=reading.ending,
                detail=reading.detail,
            )
        )


def _profile_of(
    record: LaunchRecord | None, marker: Marker | None
) -> tuple[str | None, str | None]:
    """Return digest and name of the profile that a start was under; None where it set nothing."""
    if record is not None:
        return (record.digest, record.profile_name) if record.settings else (None, None)
    if marker is not None and marker.keys:
        return marker.digest, None
    return None, None


def _age_s(process: Process) -> float:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now_s - process.started_ticks / os.sysconf("SC_CLK_TCK")


def _port(process: Process) -> int:
    """Return the port that a server takes; a relative configuration file is not looked into."""
    try:
        text = parse_launch(process.argv).value("port") or ""
    except NccltuneError:
        text = ""
    return int(text) if text.isascii() and text.isdecimal() else DEFAULT_PORT


def _tokens(argv: tuple[str, ...]) -> list[str]:
    """Return what is asked of SGLang, be it named at the end of another program's arguments."""
    try:
        return split_launch(argv)[1]
    except UsageProblem:
        return []
