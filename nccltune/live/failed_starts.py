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

from nccltune.sglang.failures import Failure, FailureKind, FailureWatch, is_nccl_stall
from nccltune.sglang.log_stages import STAGE_WORDS, LogReader, Mark, Stage


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
    UNKNOWN = "unknown"
    """It ended before it was ready, and nothing of its log could be read."""


_UNCLEAR = frozenset({Ending.FAILED, Ending.UNKNOWN})
_FAILURES = _UNCLEAR | {Ending.NCCL}


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server, and how it ended.

    Attributes:
        boot_id: with process id and start it names the process for ever.
        launched_at: ISO 8601, UTC.
        command_digest: equal for the same command.
        profile_name: of the profile that it was started under; None for none.
        digest: of that profile's settings; None for none.
        detail: the telling line of its log.
        is_spent: a roll-back has been decided with it.
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

    @property
    def key(self) -> tuple[str, int, int]:
        """What names this start."""
        return self.boot_id, self.pid, self.started_ticks


def failures_against(
    starts: Sequence[Start], digest: str, *, activated_at: str = ""
) -> tuple[Start, ...]:
    """Return the starts that speak against a profile, the oldest first.

    A start that came up under the profile clears what the same command did before. A failure in
    NCCL does not count where the command fails without the profile as well; an unclear one only
    counts where the command starts without it.

    Args:
        starts: in the order in which they ended.
        digest: of the profile.
        activated_at: when it was activated last; what was before that does not count.
    """
    counted: dict[str, list[int]] = {}
    for idx, start in enumerate(starts):
        if start.digest != digest or start.is_spent or is_before(start.launched_at, activated_at):
            continue
        if start.ending is Ending.READY:
            counted.pop(start.command_digest, None)
        elif _speaks_against(start.ending, _bare_ending(starts, start.command_digest)):
            counted.setdefault(start.command_digest, []).append(idx)
    return tuple(starts[idx] for idx in sorted(i for each in counted.values() for i in each))


def _speaks_against(ending: Ending, bare: Ending | None) -> bool:
    if ending is Ending.NCCL:
        return bare not in _FAILURES
    return ending in _UNCLEAR and bare is Ending.READY


def _bare_ending(starts: Iterable[Start], command_digest: str) -> Ending | None:
    """Return how the command did without any profile, the last time that it told anything."""
    endings = [
        start.ending
        for start in starts
        if start.digest is None
        and start.command_digest == command_digest
        and start.ending in (*_FAILURES, Ending.READY)
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
    """What a log says about the end of a start; ``detail`` is its telling line."""

    ending: Ending
    detail: str = ""


_MAX_DETAIL_CHARS = 200
_ENDINGS = {
    FailureKind.USAGE: Ending.USAGE,
    FailureKind.PORT: Ending.PORT,
    FailureKind.MEMORY: Ending.MEMORY,
    FailureKind.NCCL: Ending.NCCL,
    FailureKind.UNKNOWN: Ending.UNKNOWN,
}
# A rank killed by somebody else: by the kernel when memory ends, as SGLang itself remarks.
_KILLED = re.compile(r"exit code:? -9\b")
# An integer divided by zero, which is what a buffer of a few bytes makes of NCCL's chunks.
_DIVIDED_BY_ZERO = re.compile(r"exit code:? -8\b|Floating point exception")
_CRASH = "Fatal Python error:"
_NCCL_FRAME = re.compile(r"pynccl|distributed_c10d|libnccl")
_STOPPED = re.compile(r"SIGTERM received|KeyboardInterrupt|^nccltune: .*\bstopped by SIG")
_SERVER_ARGS = "server_args="
_NCCL_STAGES = "|".join(re.escape(STAGE_WORDS[each]) for each in Stage if is_nccl_stall(each))
_STALLED = re.compile(rf"^nccltune: .*\bstalled in (?:{_NCCL_STAGES})")


def before_next_start(text: str) -> str:
    """Leave out what a later start has written into the same file; empty where that is all."""
    before, mark, _after = text.rpartition(_SERVER_ARGS)
    return before if mark else text


def read_log(text: str, *, is_sure: bool = True) -> LogReading:
    """Say how a start ended from the log of that start alone.

    Args:
        text: the log.
        is_sure: it is known to be this start's. Else nothing is concluded from where it ends.
    """
    watch = FailureWatch()
    ranks_in_init: set[str] = set()
    crash = ""
    is_begun = False
    reader = LogReader()
    for line in (*reader.feed(text.encode()), *reader.finish()):
        if line.event is not None and line.event.stage is Stage.READY:
            return LogReading(Ending.READY, _shown(line.text))
        if line.event is not None and line.event.stage is Stage.SERVER_ARGS:
            if is_begun:
                break  # the next start writes into the same file
            is_begun = True
        if _STALLED.search(line.text):
            return LogReading(Ending.NCCL, _shown(line.text))
        if _STOPPED.search(line.text) and watch.explain().kind is FailureKind.UNKNOWN:
            return LogReading(Ending.STOPPED, _shown(line.text))
        if line.event is not None and line.event.stage is Stage.INIT_PARALLEL:
            # Begun twice where there is a draft model, and ended as often.
            change = ranks_in_init.add if line.event.mark is Mark.BEGIN else ranks_in_init.discard
            change(line.rank)
        if crash and _NCCL_FRAME.search(line.text):
            return LogReading(Ending.NCCL, crash)
        crash = crash or (_shown(line.text) if _CRASH in line.text else "")
        watch.take(line.text)
    return _explained(watch.explain(), crash, is_in_init=is_sure and bool(ranks_in_init))


def _explained(failure: Failure, crash: str, *, is_in_init: bool) -> LogReading:
    """Turn the cause that was found into an ending."""
    ending = _ENDINGS.get(failure.kind, Ending.FAILED)
    detail = _shown(failure.line)
    if ending is Ending.FAILED and _DIVIDED_BY_ZERO.search(failure.line):
        ending = Ending.NCCL
    elif ending is Ending.FAILED and _KILLED.search(failure.line):
        ending = Ending.MEMORY
    elif ending is Ending.UNKNOWN and crash:
        ending, detail = Ending.FAILED, crash
    elif ending is Ending.UNKNOWN and is_in_init:
        ending, detail = Ending.NCCL, "ended while its communicators were being set up"
    return LogReading(ending, detail)


def _shown(line: str) -> str:
    """Make a line of somebody's log safe to keep and to print."""
    return "".join(char for char in line.strip() if char.isprintable())[:_MAX_DETAIL_CHARS]
