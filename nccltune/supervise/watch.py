"""What is known of a start at this moment, and whether it has been waited for long enough.

Fed by the thread that reads the server's output, asked by the one that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nccltune.sglang.failures import Failure, FailureWatch
from nccltune.sglang.log_stages import LogLine, Stage
from nccltune.sglang.start_progress import StartProgress, StepTime
from nccltune.supervise import endings
from nccltune.supervise.endings import Ending, Limits, Waited

if TYPE_CHECKING:
    from nccltune.sglang.endpoints import Endpoint

FATAL_GRACE_S = 30.0
"""After SGLang has said that it failed it takes dumps of its ranks, 5 s and some more."""

_SUSPENDED_S = 10.0
_BLOCKED_S = 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a server is now.

    Attributes:
        times: every stage with its duration, the running one last.
        served_s: since it was ready; None before.
        aside: what is counted beside the stages: kernels that are compiled, say.
        is_sglang: there is a sign that this is an SGLang server at all.
    """

    waited: Waited
    times: tuple[StepTime, ...]
    endpoint: Endpoint | None
    pid: int
    served_s: float | None = None
    aside: str = ""
    is_sglang: bool = True


class StartWatch:
    """Progress, failures and time of one start.

    Attributes:
        ready_s: when it was ready, in seconds after the launch; None before.
        said_ready_s: when it called itself so.
        url: where it says that it listens; empty as long as it has not.
        is_sglang: there is a sign that the command is an SGLang server; one of another kind is
            never ready, and the limits of a start say nothing about it.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.ready_s: float | None = None
        self.said_ready_s: float | None = None
        self.url = ""
        self.is_sglang = False
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._progress = StartProgress()
        self._failures = FailureWatch()
        self._began_s = self._looked_s = clock()
        self._failed_s: float | None = None

    def begin(self) -> None:
        """Count time from now on."""
        self._began_s = self._looked_s = self._clock()

    @property
    def now_s(self) -> float:
        """Seconds since the launch."""
        return self._clock() - self._began_s

    def take(self, line: LogLine) -> bool:
        """Take in a line; tells whether it is news: another stage, or a word of being up."""
        with self._lock:
            self._failures.take(line.text)
            if self.ready_s is not None:
                return False
            now_s, before = self.now_s, self._progress.step
            self._progress.take(line, now_s)
            if line.event is not None:
                self.is_sglang = self.is_sglang or line.event.stage is not None
                self.url = line.event.url or self.url
            if self._progress.says_ready and self.said_ready_s is None:
                self.said_ready_s = now_s
            is_up = line.event is not None and line.event.stage in (Stage.WARM_UP, Stage.READY)
            return is_up or self._progress.step.name != before.name

    def enter(self, stage: Stage) -> None:
        """Note a stage that was learnt of over HTTP."""
        with self._lock:
            self._progress.enter(stage, self.now_s)
            if stage is Stage.READY and self.ready_s is None:
                self.ready_s = self.now_s

    def forgive(self, blocked_s: float) -> None:
        """Leave out time in which this process stood still, or nobody took the server's output."""
        now_s = self._clock()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > _SUSPENDED_S:
            self._began_s += gap_s
        elif blocked_s > _BLOCKED_S:
            with self._lock:
                self._progress.progressed_s = self.now_s

    def waited(self) -> Waited:
        """Return where the start stands."""
        with self._lock:
            now_s, progress = self.now_s, self._progress
            idle_s = max(0.0, now_s - progress.progressed_s)
            return Waited(progress.step, now_s, idle_s, self._limits, progress.last_text)

    def moment(self, endpoint: Endpoint | None, pid: int) -> Moment:
        """Return all that can be shown."""
        waited = self.waited()
        with self._lock:
            times = tuple(self._progress.times(waited.elapsed_s))
            aside = self._progress.aside
        served_s = None if self.ready_s is None else waited.elapsed_s - self.ready_s
        return Moment(waited, times, endpoint, pid, served_s, aside, self.is_sglang)

    def failure(self) -> Failure:
        """Return what the server said of its end."""
        with self._lock:
            return self._failures.explain()

    def overdue(self) -> Ending | None:
        """Return how to end a start that has been waited for long enough."""
        if not self.is_sglang:
            return None
        waited = self.waited()
        if self._failures.is_final:
            self._failed_s = waited.elapsed_s if self._failed_s is None else self._failed_s
            if waited.elapsed_s - self._failed_s > FATAL_GRACE_S:
                return endings.gave_up(waited, self.failure(), FATAL_GRACE_S)
        if waited.elapsed_s > self._limits.ready_timeout_s:
            return endings.not_ready(waited)
        return endings.stalled(waited) if waited.idle_s > self._limits.stall_timeout_s else None

    def ending(self, how: str, exit_code: int, elapsed_s: float) -> Ending:
        """Word the end of a server that has ended after that time."""
        waited = replace(self.waited(), elapsed_s=elapsed_s)
        if self.ready_s is None:
            return endings.died(waited, self.failure(), how, exit_code)
        return endings.exited(self.failure(), how, exit_code, elapsed_s - self.ready_s)
