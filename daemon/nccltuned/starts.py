"""Follows servers from their start until they are ready or dead, and tells which of it it was."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.inject.marker import MARKER, parse_marker
from nccltune.live.failed_starts import Ending, LogReading, Start
from nccltune.live.procfs import (
    PROC_ROOT,
    EnvironReading,
    Process,
    Unreadable,
    is_running,
    read_environ,
    read_process,
    user_of,
)
from nccltune.live.scanner import is_launch
from nccltune.live.server_facts import find_record, read_boot_id, read_started_at
from nccltuned.descriptors import has_room
from nccltuned.followed import Followed
from nccltuned.fronts import Place, open_first_log, place_of
from nccltuned.judging import is_ready, read_end, read_journal_of, start_of
from nccltuned.listening import PortWatch
from nccltuned.log_file import LogText
from nccltuned.logs import NEW_S, LogEnds
from nccltuned.pending import (
    DEFAULT_PORT,
    Pending,
    age_of_s,
    open_end,
    port_given,
    port_in_file,
    tokens_of,
)
from nccltuned.unit_log import find_journal, is_invocation, read_journal
from nccltuned.units import is_of_unit

if TYPE_CHECKING:
    from nccltune.live.scanner import Server
    from nccltune.store import LaunchRecord

logger = logging.getLogger("nccltuned")

FRONT_WAIT_S = 40.0
"""A program in front that outlives its server has so long for its last words: ``launch`` takes 30 s
to end what is left of a server."""

MAX_MISSED = 10
"""So many starts that ended unseen are looked up in the journal."""

_ROOT_UID = 0
_VERIFY = "verify"

Defer = Callable[[Callable[[], object], Callable[[object], None]], None]
"""Runs the first in a child, and hands what it returns to the second; None where it died."""


@dataclass(slots=True)
class StartTracker:
    """All starts of this boot.

    What is handed over is taken up by the next ``step``, which looks at the ends of starts before
    it opens the log of any new one: both may write into the same file.

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
    _followed: Followed = field(default_factory=Followed)
    _records: Sequence[LaunchRecord] = ()
    _new_records: list[LaunchRecord] = field(default_factory=list)
    _new_servers: Sequence[Server] = ()
    _log_ends: LogEnds = field(default_factory=LogEnds)
    _boot_id: str = ""
    _is_crowded: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether a start is going on, so that looking often is worth it.

        A command that has not become SGLang for a while may be any program.
        """
        now_s = self.clock()
        return any(
            is_launch(each.process.argv) or each.age_s + now_s - each.seen_at_s < NEW_S
            for each in self._followed.pending.values()
        )

    def descriptors(self) -> tuple[int, ...]:
        """Return what to poll for reading: an end is looked at before anything follows it."""
        return tuple(
            each.descriptor for each in self._followed.pending.values() if each.descriptor >= 0
        )

    def take_records(self, records: Sequence[LaunchRecord]) -> None:
        """Learn of launches: all that are kept, the newest last."""
        self._boot_id = self._boot_id or read_boot_id(self.root)
        known = {_record_key(record) for record in self._records}
        self._records = [record for record in records if record.boot_id == self._boot_id]
        new = (record for record in self._records if _record_key(record) not in known)
        self._new_records += new

    def take_servers(self, servers: Iterable[Server]) -> None:
        """Learn which servers there are, whoever started them."""
        self._new_servers = tuple(servers)

    def step(self) -> None:
        """Look at every start that is going on, then begin to follow what is new.

        Raises:
            OSError: there are no descriptors left; nothing is lost, and it can be tried again.
        """
        self._boot_id = self._boot_id or read_boot_id(self.root)
        self._followed.drop_ended(self.root)
        starts = list(self._followed.pending.values())
        for pending, process in [(each, self._look(each)) for each in starts]:
            if process is not None:
                self._follow(process, pending)
        for server in self._new_servers:
            if server.root is not None and server.is_launch:
                self._follow(server.root)
        self._new_servers = ()
        self._follow_records()

    def close(self) -> None:
        """Let go of every log."""
        for pending in list(self._followed.pending.values()):
            self._followed.forget(pending)

    def _look(self, pending: Pending) -> Process | None:
        """See what has become of a start; returns the process where that is SGLang only now."""
        process = read_process(pending.process.pid, self.root)
        if process is None or process.key != pending.process.key:
            self._look_at_dead(pending)
        elif is_launch(process.argv) and not is_launch(pending.process.argv):
            return process
        else:
            self._look_at_living(pending)
        return None

    def _look_at_living(self, pending: Pending) -> None:
        # Of a process that is gone, procfs no longer tells which record is its own.
        pending.record = pending.record or self._record_of(pending.place)
        if _is_of_verify(pending.place, pending.record):
            self._followed.settle(pending.place)
        elif is_ready(pending, self.clock()):
            self._log_ends.note(pending.logs)
            self._followed.settle(pending.place)
            self._end(pending, LogReading(Ending.READY))

    def _look_at_dead(self, pending: Pending) -> None:
        if pending.died_at_s is None:
            pending.has_died(self.clock())
            self._log_ends.note(pending.logs)
        # The program in front may still have to tell how it ended.
        is_late = self.clock() - (pending.died_at_s or 0.0) >= FRONT_WAIT_S
        if pending.front is None or is_late or not is_running(pending.front, self.root):
            self._died(pending)

    def _follow_records(self) -> None:
        missed, later = [], []
        for record in self._new_records:
            process = read_process(record.pid, self.root)
            if process is None or process.started_ticks != record.started_ticks:
                missed.append(record)
            elif not self._follow(process):
                later.append(record)
        self._new_records = later
        for record in missed[-MAX_MISSED:]:
            _tell_missed(record.pid)
            self._look_up(record)

    def _follow(self, process: Process, earlier: Pending | None = None) -> bool:
        """Begin to follow a start, where that is not done yet; False where it cannot be done now.

        Args:
            process: the server, or what will start it or become it.
            earlier: what it is followed as, now that it has become SGLang by exec: port, mark and
                log may be others.
        """
        if earlier is None and self._followed.has(process):
            return True
        place = place_of(process, self.root)
        record = self._record_of(place)
        is_known = self.is_known((self._boot_id, *process.key))
        if is_known or _is_of_verify(place, record) or self._followed.has_below(process):
            self._followed.settle(place)
            self._followed.settle_above(place)
            return True
        if not self._has_room():
            return False
        reading = read_environ(process, self.root)
        if reading.problem == Unreadable.GONE:
            return False  # without its mark it would be taken for a start without a profile
        self._followed.settle_above(place)
        pending = self._begin(place, record, reading)
        if earlier is not None:
            pending.logs.go_on_from(earlier.logs)
            earlier.let_go()
        self._followed.add(pending)
        self._look_at_living(pending)
        return True

    def _begin(self, place: Place, record: LaunchRecord | None, reading: EnvironReading) -> Pending:
        environ = reading.values or {}
        pending = Pending(
            place=place,
            seen_at_s=self.clock(),
            age_s=age_of_s(place.process),
            port_watch=PortWatch(self.root, self.clock),
            log_moved_at_s=self.clock(),
            marker=parse_marker(environ.get(MARKER)),
            is_environ_known=reading.values is not None,
            record=record,
            port=port_given(place.process),
            uid=user_of(place.process.pid, self.root),
            generation=self.generation,
        )
        self._open_log(pending, environ)
        if self.root == PROC_ROOT:
            pending.descriptor = open_end(place.process.pid)
        self._ask_more(pending, environ.get("INVOCATION_ID", ""))
        return pending

    def _has_room(self) -> bool:
        is_crowded = not has_room()
        if is_crowded and not self._is_crowded:
            logger.warning("more servers start at once than there are descriptors to follow them")
        self._is_crowded = is_crowded
        return not is_crowded

    def _open_log(self, pending: Pending, environ: Mapping[str, str]) -> None:
        """Open the log of a new start, which an earlier one or another server may write as well."""
        place = pending.place
        for earlier in self._followed.succeeded_by(place):
            earlier.is_succeeded = True  # no word of it is to come
            self._died(earlier)
        pending.logs, pending.front = open_first_log(
            place, age_s=pending.age_s, root=self.root, ends=self._log_ends
        )
        invocation_id = environ.get("INVOCATION_ID", "")
        for each in place.writers if is_invocation(invocation_id) else ():
            if (stream := find_journal(each.pid, environ, self.root)) is not None:
                pending.invocation_id, pending.journal_stream = invocation_id, stream
                pending.front = pending.front or (None if each is place.process else each)
                break
        self._followed.part_logs(pending)

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

    def _record_of(self, place: Place) -> LaunchRecord | None:
        """Return the record of a start, be it that of a program in front of it."""
        for each in place.writers:
            if (record := find_record(each, self._records, self.root)) is not None:
                return record
        return None

    def _died(self, pending: Pending) -> None:
        pending.record = pending.record or self._record_of(pending.place)
        process = pending.process
        if not tokens_of(process.argv) or _is_of_verify(pending.place, pending.record):
            _tell_missed(process.pid)  # as SGLang, if it ever became that
            self._followed.forget(pending)
            return
        reading = read_end(pending, self.root)
        if reading is not None:
            self._end(pending, reading)
        else:
            del self._followed.pending[process.key]
            until = pending.died_at(self.clock()) if pending.is_succeeded else ""
            self._read_journal(pending, read_started_at(process), until)

    def _look_up(self, record: LaunchRecord) -> None:
        """Ask the journal about a start that nobody saw; without its word nothing is assumed."""
        place = Place(Process(record.pid, 0, record.started_ticks, 0, ()))
        is_known = self.is_known(_record_key(record))
        if is_known or _is_of_verify(place, record) or not is_invocation(record.invocation_id):
            return
        pending = Pending(place, self.clock(), 0.0, PortWatch(), record=record)
        pending.invocation_id, pending.uid = record.invocation_id, record.uid
        pending.is_missed = True
        same = (record.invocation_id, record.uid)
        ends = (
            each.launched_at
            for each in self._records
            if (each.invocation_id, each.uid) == same and each.launched_at > record.launched_at
        )
        self._read_journal(pending, record.launched_at, next(ends, ""))

    def _read_journal(self, pending: Pending, since: str, until: str) -> None:
        def done(answer: object) -> None:
            # As JSON has it, from a child.
            words = LogText(*answer) if isinstance(answer, list) else LogText()
            reading = read_journal_of(pending, words)
            if not pending.is_missed or reading.ending is not Ending.UNKNOWN:
                self._end(pending, reading)

        self.defer(lambda: read_journal(pending.invocation_id, since, until), done)

    def _end(self, pending: Pending, reading: LogReading) -> None:
        """Tell how a start ended."""
        self._followed.forget(pending)
        self.on_end(start_of(pending, reading, self._boot_id, self.trusted_uids))


def _record_key(record: LaunchRecord) -> tuple[str, int, int]:
    return record.boot_id, record.pid, record.started_ticks


def _is_of_verify(place: Place, record: LaunchRecord | None) -> bool:
    """Whether ``nccltune verify`` has started it, which judges its servers itself."""
    return place.is_of_verify or (record is not None and record.route == _VERIFY)


def _tell_missed(pid: int) -> None:
    logger.debug("a start ended before it was looked at: pid=%s", pid)
