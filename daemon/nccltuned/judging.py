"""Whether a server is ready, and how a start that is over has ended: what was seen is weighed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.inject.decision import command_digest
from nccltune.live.failed_starts import Ending, LogReading, Start, before_next_start, read_log
from nccltune.live.scanner import is_launch
from nccltune.live.server_facts import read_started_at
from nccltuned.fronts import has_successor
from nccltuned.log_file import LogText
from nccltuned.logs import NEW_S
from nccltuned.pending import profile_of

if TYPE_CHECKING:
    from nccltuned.pending import Pending

WARM_S = 20.0
"""A server without a log that can be read is ready when it has listened for so long: the warm-up
request that follows the first moment takes a few seconds."""

WARM_WITH_LOG_S = 400.0
"""Where the log will tell how it ended, a hang in the warm-up has so long to show: SGLang's own
watchdog ends it after 300 s."""

BLIND_S = 3600.0
"""A server whose sockets may not be looked at counts as ready after so long."""

HUNG_S = 60.0
"""A log that has stood while ranks connect for so long before the end is that of a hang; sooner,
somebody may have stopped a healthy start."""

READY_WORDS = b"The server is fired up and ready to roll"
"""Printed after the warm-up; whole logs are read only when a start has failed."""

_OPEN_ENDINGS = frozenset({Ending.UNKNOWN, Ending.STOPPED, Ending.ENDED})


def is_ready(pending: Pending, now_s: float) -> bool:
    """Look at the log and the port of a server that lives, and tell whether it is ready."""
    glance = pending.logs.look(READY_WORDS)
    if glance.has_moved:
        pending.log_moved_at_s = now_s
    pending.has_said_ready = pending.has_said_ready or glance.has_words
    if pending.port is None or not is_launch(pending.process.argv):
        return False
    answer = pending.port_watch.is_listening(
        pending.process.pid, pending.port, is_due=glance.has_words
    )
    if answer is None:
        is_old = pending.age_s + now_s - pending.seen_at_s > BLIND_S
        return pending.has_said_ready or is_old
    if not answer:
        pending.listening_since_s = None
        return False
    pending.has_listened = True
    if pending.listening_since_s is None:
        # Whoever was seen for the first time when it was old has listened for long.
        pending.listening_since_s = now_s - (pending.age_s if pending.age_s > NEW_S else 0.0)
    return pending.has_said_ready or _has_warmed_up(pending, now_s)


def read_end(pending: Pending, root: Path) -> LogReading | None:
    """Say how a start has ended; None where the journal has to be asked.

    Raises:
        OSError: there are no descriptors left.
    """
    # What starts a server somewhere else, in a container say, listens nowhere itself.
    may_listen = is_launch(pending.process.argv)
    if pending.has_said_ready and (pending.has_listened or not may_listen):
        return LogReading(Ending.READY)
    words = _last_words(pending, root)
    if not words.text and pending.invocation_id:
        return None
    stood_s = _died_at_s(pending) - pending.log_moved_at_s
    reading = read_log(words.text, is_sure=pending.logs.is_seen and stood_s >= HUNG_S)
    if reading.ending is Ending.ENDED and not words.is_whole:
        reading = LogReading(Ending.UNKNOWN, reading.detail)
    return weigh(pending, reading)


def read_journal_of(pending: Pending, words: LogText) -> LogReading:
    """Say how a start has ended from what systemd has kept of its words; empty where it has none.

    Of a start that nobody saw nothing is assumed.
    """
    reading = read_log(words.text, is_sure=False) if words.text else LogReading(Ending.UNKNOWN)
    if reading.ending is Ending.ENDED and (pending.is_missed or not words.is_whole):
        return LogReading(Ending.UNKNOWN, reading.detail)
    return weigh(pending, reading)


def start_of(
    pending: Pending, reading: LogReading, boot_id: str, trusted_uids: frozenset[int]
) -> Start:
    """Put together what is kept of a start that is over."""
    process, record = pending.process, pending.record
    digest, name = profile_of(pending)
    return Start(
        boot_id=boot_id,
        pid=process.pid,
        started_ticks=process.started_ticks,
        launched_at=record.launched_at if record else read_started_at(process),
        command_digest=record.command_digest if record else command_digest(process.argv),
        profile_name=name,
        digest=digest,
        ending=reading.ending,
        detail=reading.detail,
        uid=pending.uid,
        is_trusted=_is_trusted(pending, trusted_uids),
        generation=(record.generation if record else 0) or pending.generation,
        record_pid=record.pid if record else 0,
        record_ticks=record.started_ticks if record else 0,
    )


def _is_trusted(pending: Pending, trusted_uids: frozenset[int]) -> bool:
    """Whether what became of it says something about the profile, as far as is seen here."""
    record = pending.record
    pids = {each.pid for each in pending.place.writers}
    # In a container anybody can choose a number, so that another's record fits.
    if record is not None and record.uid is None and record.pid in pids:
        return True  # written by who may write the store
    return pending.is_of_unit or pending.uid in trusted_uids


def weigh(pending: Pending, reading: LogReading) -> LogReading:
    """Set what a log says against how long the server has listened.

    A server that has listened for a while may have served, or hung in its warm-up: where its log
    would have told, and does not, it counts neither way.
    """
    if reading.ending not in _OPEN_ENDINGS:
        return reading
    died_at_s = _died_at_s(pending)
    if _has_warmed_up(pending, died_at_s):
        return LogReading(Ending.READY)
    has_listened_long = _listened_s(pending, died_at_s) >= WARM_S
    if reading.ending is Ending.UNKNOWN and has_listened_long:
        return LogReading(Ending.ENDED, reading.detail)
    return reading


def _has_warmed_up(pending: Pending, now_s: float) -> bool:
    limit_s = WARM_WITH_LOG_S if pending.has_log else WARM_S
    return _listened_s(pending, now_s) >= limit_s


def _listened_s(pending: Pending, now_s: float) -> float:
    since_s = pending.listening_since_s
    return 0.0 if since_s is None else now_s - since_s


def _died_at_s(pending: Pending) -> float:
    return pending.seen_at_s if pending.died_at_s is None else pending.died_at_s


def _last_words(pending: Pending, root: Path) -> LogText:
    """Return what a start has written, and nothing that another one has."""
    if pending.is_succeeded:
        return pending.words
    later = pending.logs.read()
    words = later if later.text else pending.words
    # What follows a second one's arguments is not read anyway.
    if pending.logs.has_args or not has_successor(pending.process, pending.logs, root):
        return words
    # The file may have been cut for that one, unseen.
    return LogText(before_next_start(words.text), is_whole=False)
