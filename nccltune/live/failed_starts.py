"""Which failed starts speak against a profile, and when there are enough to roll it back.

Pure: what was seen of each start goes in. A server that cannot start is worse than a slow one, and
a profile that is rolled back for a taken port is a gain thrown away: only what looks like NCCL's
doing counts, or what the same command does not do without the profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from nccltune.sglang.failures import FailureKind, FailureWatch, is_nccl_stall
from nccltune.sglang.log_stages import BANNER, STAGE_WORDS, LogReader, Mark, Stage


class Ending(StrEnum):
    """How a start ended."""

    READY = "ready"
    """The server answered; whatever came later is no failed start."""
    NCCL = "nccl"
    """It died in NCCL, or hung while its communicators were set up."""
    PORT = "port"
    MEMORY = "memory"
    USAGE = "usage"
    """Its arguments were refused."""
    STOPPED = "stopped"
    """Somebody stopped it."""
    FAILED = "failed"
    """It died of something that NCCL may or may not be behind."""
    ENDED = "ended"
    """It ended, and its log, which is known to be whole, tells of no failure: somebody ended it, or
    the kernel did when memory ended."""
    UNKNOWN = "unknown"
    """It ended before it was ready, and its log could not be read, or not all of it."""


_UNCLEAR = frozenset({Ending.FAILED, Ending.UNKNOWN})
_FAILURES = _UNCLEAR | {Ending.NCCL}
_SURE_FAILURES = frozenset({Ending.FAILED, Ending.NCCL})
UNKNOWN_DIGEST = "?"
"""Stands for whatever a start was under, be it no profile, where its mark cannot be read."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server, and how it ended.

    Attributes:
        boot_id: with process id and start it names the process for ever.
        launched_at: ISO 8601, UTC.
        command_digest: equal for the same command.
        profile_name: of the profile that it was started under; None for none.
        digest: of that profile's settings; None for none, UNKNOWN_DIGEST where that is not known.
        detail: the telling line of its log.
        is_spent: a roll-back has been decided with it.
        uid: of its user; None where that is not known.
        is_trusted: it may speak for or against a profile. Anybody can start something that looks
            like a server and dies.
        generation: of the store's state when it began; 0 if unknown.
        record_pid: of the launch on record that it was part of, which a program in front of the
            server may be; 0 for none.
        record_ticks: the start of that process.
    """

    boot_id: str
    pid: int
    started_ticks: int
    launched_at: str
    command_digest: str
    profile_name: str | None
    digest: str | None
    ending: Ending
    detail: str = ""
    is_spent: bool = False
    uid: int | None = None
    is_trusted: bool = True
    generation: int = 0
    record_pid: int = 0
    record_ticks: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """What names this start."""
        return self.boot_id, self.pid, self.started_ticks

    @property
    def record_key(self) -> tuple[str, int, int]:
        """What names the launch that it was part of."""
        return self.boot_id, self.record_pid, self.record_ticks


def failures_against(
    starts: Sequence[Start], digest: str, *, activated_at: str = "", generation: int = 0
) -> tuple[Start, ...]:
    """Return the starts that speak against a profile, the oldest first.

    Starts that are not to be trusted speak neither for it nor against it. A start that came up
    under the profile clears what the same command did before. A failure in NCCL does not count
    where the command is known to fail without the profile as well; an unclear one only counts where
    the command starts without it.

    Args:
        starts: in the order in which they ended.
        digest: of the profile.
        activated_at: when it was activated last; what was before that does not count.
        generation: of the state since then, which goes before the time of day.
    """
    trusted = [start for start in starts if start.is_trusted]
    counted: dict[str, list[int]] = {}
    for idx, start in enumerate(trusted):
        is_over = start.is_spent or _is_earlier(start, activated_at, generation)
        if start.digest != digest or is_over:
            continue
        if start.ending is Ending.READY:
            counted.pop(start.command_digest, None)
        elif _speaks_against(start.ending, _bare_ending(trusted, start.command_digest)):
            counted.setdefault(start.command_digest, []).append(idx)
    return tuple(trusted[idx] for idx in sorted(i for each in counted.values() for i in each))


def uncounted_failures(
    starts: Iterable[Start], digest: str, *, generation: int = 0
) -> tuple[Start, ...]:
    """Return failures under a profile that do not count because of whose they are."""
    return tuple(
        start
        for start in starts
        if not start.is_trusted
        and start.digest == digest
        and start.ending in _FAILURES
        and start.generation == generation
    )


def _is_earlier(start: Start, activated_at: str, generation: int) -> bool:
    """Whether a start belongs to an earlier activation, by the time of day only where need be."""
    if start.generation and generation:
        return start.generation != generation
    return is_before(start.launched_at, activated_at)


def _speaks_against(ending: Ending, bare: Ending | None) -> bool:
    if ending is Ending.NCCL:
        return bare not in _SURE_FAILURES
    return ending in _UNCLEAR and bare is Ending.READY


def _bare_ending(starts: Iterable[Start], command_digest: str) -> Ending | None:
    """Return how the command did without any profile, the last time that it told anything."""
    endings = [
        start.ending
        for start in starts
        if start.digest is None
        and start.command_digest == command_digest
        and start.ending in (*_SURE_FAILURES, Ending.READY)
    ]
    return endings[-1] if endings else None


def is_before(moment: str, other: str) -> bool:
    """Compare two moments; one that is not known is before nothing."""
    try:
        return datetime.fromisoformat(moment) < datetime.fromisoformat(other)
    except (ValueError, TypeError):
        return False


@dataclass(frozen=True, slots=True)
class LogReading:
    """What a log says about the end of a start; ``detail`` is its telling line.

    A log that says nothing of a failure reads ``ENDED``: whoever has read it knows whether it was
    all that there is to read.
    """

    ending: Ending
    detail: str = ""


_MAX_DETAIL_CHARS = 200
_ENDINGS = {
    FailureKind.USAGE: Ending.USAGE,
    FailureKind.PORT: Ending.PORT,
    FailureKind.MEMORY: Ending.MEMORY,
    FailureKind.KILLED: Ending.MEMORY,
    FailureKind.NCCL: Ending.NCCL,
    FailureKind.UNKNOWN: Ending.ENDED,
}
_STOPPED = re.compile(r"SIGTERM received|KeyboardInterrupt|^nccltune: .*\bstopped by SIG")
_BANNER = re.compile(BANNER, re.MULTILINE)
_NCCL_STAGES = "|".join(re.escape(STAGE_WORDS[each]) for each in Stage if is_nccl_stall(each))
_STALLED = re.compile(rf"^nccltune: .*\bstalled in (?:{_NCCL_STAGES})")
_TOOK_TOO_LONG = re.compile(r"^nccltune: .*\b(?:stalled in|not ready after) ")


def before_next_start(text: str) -> str:
    """Leave out what a later start has written into the same file; empty where that is all."""
    begins = _begins(text)
    return text[: begins[-1]] if begins else text


def _begins(text: str) -> list[int]:
    """Return where each start begins in a log that several have written."""
    return [found.start() for found in _BANNER.finditer(text)]


def _of_one_start(text: str) -> str:
    """Leave out last words of an earlier server, and what the next one writes."""
    begins = _begins(text)
    return text[begins[0] : begins[1] if len(begins) > 1 else None] if begins else text


def read_log(text: str, *, is_sure: bool = True) -> LogReading:
    """Say how a start ended from its log: from its arguments on, up to those of the next.

    Args:
        text: the log.
        is_sure: it is known to be this start's, and to have stood where it ends for long. Else
            nothing is concluded from where that is: anybody may stop a start while ranks connect.
    """
    watch = FailureWatch()
    ranks_in_init: set[str] = set()
    reader = LogReader()
    for line in (*reader.feed(_of_one_start(text).encode()), *reader.finish()):
        if line.event is not None and line.event.stage is Stage.READY:
            return LogReading(Ending.READY, _shown(line.text))
        if _STALLED.search(line.text):
            return LogReading(Ending.NCCL, _shown(line.text))
        if watch.explain().kind is FailureKind.UNKNOWN:
            if _TOOK_TOO_LONG.search(line.text):
                return LogReading(Ending.FAILED, _shown(line.text))
            if _STOPPED.search(line.text):
                return LogReading(Ending.STOPPED, _shown(line.text))
        if line.event is not None and line.event.stage is Stage.INIT_PARALLEL:
            # Begun twice where there is a draft model, and ended as often.
            change = ranks_in_init.add if line.event.mark is Mark.BEGIN else ranks_in_init.discard
            change(line.rank)
        watch.take(line.text)
    failure = watch.explain()
    if failure.kind is FailureKind.UNKNOWN and is_sure and ranks_in_init:
        return LogReading(Ending.NCCL, "ended while its communicators were being set up")
    return LogReading(_ENDINGS.get(failure.kind, Ending.FAILED), _shown(failure.line))


def _shown(line: str) -> str:
    """Make a line of somebody's log safe to keep and to print."""
    return "".join(char for char in line.strip() if char.isprintable())[:_MAX_DETAIL_CHARS]
