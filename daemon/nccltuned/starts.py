"""Follows servers from their start until they are ready or dead, and says which of it it was."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.inject.decision import command_digest
from nccltune.inject.marker import MARKER, parse_marker
from nccltune.live.failed_starts import Ending, LogReading, Start, before_next_start, read_log
from nccltune.live.procfs import (
    PROC_ROOT,
    Process,
    Unreadable,
    is_running,
    read_environ,
    read_process,
    user_of,
)
from nccltune.live.scanner import is_launch
from nccltune.live.server_facts import find_record, read_boot_id, read_started_at
from nccltuned.fronts import fronts_of, has_successor, open_first_log
from nccltuned.listening import PortWatch
from nccltuned.logs import LogEnds, LogFiles, is_invocation, is_journal, read_journal
from nccltuned.pending import (
    DEFAULT_PORT,
    Pending,
    age_of_s,
    open_end,
    port_given,
    port_in_file,
    profile_of,
    tokens_of,
)
from nccltuned.units import is_of_unit

if TYPE_CHECKING:
    from nccltune.live.scanner import Server
    from nccltune.store import LaunchRecord

logger = logging.getLogger("nccltuned")

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

HUNG_S = 60.0
"""A log that has stood while ranks connect for so long before the end is that of a hang; sooner,
somebody may have stopped a healthy start."""

FRONT_WAIT_S = 40.0
"""A program in front that outlives its server has so long for its last words: ``launch`` takes 30 s
to end what is left of a server."""

READY_WORDS = b"The server is fired up and ready to roll"
"""Printed after the warm-up; whole logs are read only when a start has failed."""

_ROOT_UID = 0
MAX_MISSED = 10
"""So many starts that ended unseen are looked up in the journal."""

Defer = Callable[[Callable[[], object], Callable[[object], None]], None]
"""Runs the first in a child, and hands what it returns to the second; None where it died."""


@dataclass(slots=True)
class StartTracker:
    """All starts of this boot.

    Attributes:
        is_known: whether the end of a start is on record already.
        on_end: told of every start that has come to its end.
        defer: see ``Defer``.
        generation: of the store's state now.
        trusted_uids: users whose starts count.
    """

    is_known: Callable[[tuple[str, int, int]], bool]
    on_end: Callable[[Start], None]
    defer: Defer
    root: Path = PROC_ROOT
    clock: Callable[[], float] = time.monotonic
    generation: int = 0
    trusted_uids: frozenset[int] = frozenset({_ROOT_UID})
    _pending: dict[tuple[int, int], Pending] = field(default_factory=dict)
    _settled: dict[tuple[int, int], Process] = field(default_factory=dict)
    _records: Sequence[LaunchRecord] = ()
    _log_ends: LogEnds = field(default_factory=LogEnds)
    _boot_id: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether a start is going on, so that looking often is worth it."""
        return bool(self._pending)

    def descriptors(self) -> tuple[int, ...]:
        """Return what to poll for reading: an end is looked at before anything follows it."""
        return tuple(each.descriptor for each in self._pending.values() if each.descriptor >= 0)

    def take_records(self, records: Sequence[LaunchRecord], *, is_first: bool) -> None:
        """Learn of launches, and begin to follow those whose process is there.

        Args:
            records: all that are kept, the newest last.
            is_first: nothing was followed before, so that starts may have been missed.
        """
        self.step()  # where one has ended is known before the next one's log is opened
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
            _tell_missed(record.pid)
            self._look_up(record)

    def take_servers(self, servers: Iterable[Server]) -> None:
        """Begin to follow servers that were not seen before, whoever started them."""
        self.step()  # as above
        for server in servers:
            if server.root is not None and server.is_launch:
                self._follow(server.root)

    def step(self) -> None:
        """Look at every start that is going on."""
        for key, pending in list(self._pending.items()):
            process = read_process(pending.process.pid, self.root)
            if process is None or process.started_ticks != pending.process.started_ticks:
                if pending.died_at_s is None:
                    pending.has_died(self.clock())
                if not self._has_more_to_say(pending):
                    del self._pending[key]
                    self._died(pending)
            elif is_launch(process.argv) and not is_launch(pending.process.argv):
                # It has become SGLang by exec: port, mark and log may be others.
                del self._pending[key]
                self._follow(process)
                if (anew := self._pending.get(key)) is not None:
                    anew.logs.go_on_from(pending.logs)
                pending.let_go()
            else:
                self._look_at(key, pending)
        for key, process in list(self._settled.items()):
            if not is_running(process, self.root):
                del self._settled[key]

    def _look_at(self, key: tuple[int, int], pending: Pending) -> None:
        """See whether a server that lives is ready."""
        glance = pending.logs.look(READY_WORDS)
        if glance.has_moved:
            pending.log_moved_at_s = self.clock()
        # Of a process that is gone, procfs no longer tells which record is its own.
        pending.record = pending.record or self._record_of(pending)
        if self._is_ready(pending, has_said_ready=glance.has_words):
            del self._pending[key]
            self._settled[key] = pending.process
            self._end(pending, LogReading(Ending.READY))

    def _has_more_to_say(self, pending: Pending) -> bool:
        """Whether the program in front of a dead server still has to tell how that ended."""
        if pending.front is None or pending.died_at_s is None:
            return False
        is_late = self.clock() - pending.died_at_s >= FRONT_WAIT_S
        return not is_late and is_running(pending.front, self.root)

    def close(self) -> None:
        """Let go of every log."""
        for pending in self._pending.values():
            pending.let_go()
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
        others = (front for pending in self._pending.values() for front in pending.fronts)
        if any(key == (front.pid, front.started_ticks) for front in others):
            self._settled[key] = process  # what it is in front of is followed already
            return
        reading = read_environ(process, self.root)
        if reading.problem == Unreadable.GONE:
            return  # without its mark it would be taken for a start without a profile
        environ = reading.values or {}
        age_s = age_of_s(process)
        fronts = fronts_of(process, self.root)
        logs, writer = open_first_log(
            (process, *fronts), is_new=age_s < NEW_S, root=self.root, ends=self._log_ends
        )
        pending = Pending(
            process=process,
            seen_at_s=self.clock(),
            age_s=age_s,
            logs=logs,
            port_watch=PortWatch(self.root, self.clock),
            fronts=fronts,
            front=writer,
            log_moved_at_s=self.clock(),
            marker=parse_marker(environ.get(MARKER)),
            descriptor=open_end(process.pid) if self.root == PROC_ROOT else -1,
            port=port_given(process),
            uid=user_of(process.pid, self.root),
            generation=self.generation,
        )
        invocation_id = environ.get("INVOCATION_ID", "")
        for each in (process, *fronts) if is_invocation(invocation_id) else ():
            if is_journal(each.pid, environ, self.root):
                pending.invocation_id = invocation_id
                pending.front = pending.front or (None if each is process else each)
                break
        for each in fronts:
            self._take_place_of(each)
        self._pending[key] = pending
        self._ask_more(pending, invocation_id)

    def _ask_more(self, pending: Pending, invocation_id: str) -> None:
        """Find out in a child what takes reading other people's files, or asking systemd."""

        def take_port(port: object) -> None:
            pending.port = port if isinstance(port, int) else DEFAULT_PORT

        def take_word(is_of_unit: object) -> None:
            pending.is_of_unit = is_of_unit is True

        process = pending.process
        if pending.port is None:
            self.defer(lambda: port_in_file(process, self.root), take_port)
        if pending.uid != _ROOT_UID and is_invocation(invocation_id):
            self.defer(lambda: is_of_unit(process.pid, invocation_id, self.root), take_word)

    def _take_place_of(self, front: Process) -> None:
        """Follow no program in front of a server beside it: ``timeout 60 sglang`` is one start."""
        key = (front.pid, front.started_ticks)
        if (other := self._pending.pop(key, None)) is not None:
            other.let_go()
            self._settled[key] = front

    def _record_of(self, pending: Pending) -> LaunchRecord | None:
        """Return the record of a start, be it that of a program in front of it."""
        for each in (pending.process, *pending.fronts):
            if (record := find_record(each, self._records, self.root)) is not None:
                return record
        return None

    def _is_ready(self, pending: Pending, *, has_said_ready: bool) -> bool:
        now_s = self.clock()
        process = pending.process
        if pending.port is None:
            return False
        answer = pending.port_watch.is_listening(process.pid, pending.port)
        if answer is None:
            return pending.age_s + now_s - pending.seen_at_s > BLIND_S
        if not answer:
            pending.listening_since_s = None
            return False
        if pending.listening_since_s is None:
            # Whoever was seen for the first time when it was old has listened for long.
            pending.listening_since_s = now_s - (pending.age_s if pending.age_s > NEW_S else 0.0)
        if has_said_ready:
            return True
        listened_s = now_s - pending.listening_since_s
        return listened_s >= (WARM_WITH_LOG_S if pending.has_log else WARM_S)

    def _died(self, pending: Pending) -> None:
        if not tokens_of(pending.process.argv):
            _tell_missed(pending.process.pid)  # as SGLang, if it ever became that
            pending.let_go()
            return
        now_s = pending.died_at_s or self.clock()
        is_sure = pending.logs.is_seen and now_s - pending.log_moved_at_s >= HUNG_S
        text = pending.logs.read() or pending.text
        # What follows a second one's arguments is not read anyway.
        if text and not pending.logs.has_args and has_successor(pending, self.root):
            text = before_next_start(text)
        if text:
            self._end(pending, read_log(text, is_sure=is_sure))
        elif pending.invocation_id:
            self._read_journal(pending, pending.invocation_id, read_started_at(pending.process))
        else:
            self._end(pending, LogReading(Ending.UNKNOWN))

    def _look_up(self, record: LaunchRecord) -> None:
        """Ask the journal about a start that nobody saw; without its word nothing is assumed."""
        if self.is_known(self._record_key(record)) or not is_invocation(record.invocation_id):
            return
        process = Process(record.pid, 0, record.started_ticks, 0, ())
        pending = Pending(process, self.clock(), 0.0, LogFiles(), PortWatch(), record=record)
        pending.uid, pending.is_missed = record.uid, True
        self._read_journal(pending, record.invocation_id, record.launched_at)

    def _read_journal(self, pending: Pending, invocation_id: str, since: str) -> None:
        def done(text: object) -> None:
            reading = LogReading(Ending.UNKNOWN)
            if isinstance(text, str) and text:
                reading = read_log(text, is_sure=False)
            if not pending.is_missed or reading.ending is not Ending.UNKNOWN:
                self._end(pending, reading)

        self.defer(lambda: read_journal(invocation_id, since), done)

    def _is_trusted(self, pending: Pending) -> bool:
        """Whether what became of it says something about the profile, as far as is seen here."""
        process = pending.process
        record = pending.record or self._record_of(pending)
        pids = {process.pid, *(front.pid for front in pending.fronts)}
        # In a container anybody can choose a number, so that another's record fits.
        if record is not None and record.uid is None and record.pid in pids:
            return True  # written by who may write the store
        return pending.is_of_unit or pending.uid in self.trusted_uids

    def _end(self, pending: Pending, reading: LogReading) -> None:
        """Tell how a start ended."""
        is_unclear = reading.ending in (Ending.UNKNOWN, Ending.STOPPED)
        since_s = pending.listening_since_s
        ended_s = pending.died_at_s or self.clock()
        if is_unclear and since_s is not None and ended_s - since_s >= WARM_S:
            reading = LogReading(Ending.READY)
        self._log_ends.note(pending.logs)
        pending.let_go()
        process = pending.process
        record = pending.record or self._record_of(pending)
        digest, name = profile_of(record, pending.marker)
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
                uid=pending.uid,
                is_trusted=self._is_trusted(pending),
                generation=(record.generation if record else 0) or pending.generation,
            )
        )


def _tell_missed(pid: int) -> None:
    logger.debug("a start ended before it was looked at: pid=%s", pid)
