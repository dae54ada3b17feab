"""Follows one start: the stage that it is in, the time in each, and when it last got anywhere.

Pure: the caller says what time it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nccltune.sglang.log_stages import STAGE_WORDS, LogLine, Mark, Stage, StageEvent

_CHANGING = re.compile(r"0x[0-9a-f]+|\d+")
_OWN_QUESTION = re.compile(r'"GET /(?:health\w*|ready|model_info) HTTP')
"""Access lines of whoever waits, ourselves among them."""

_SHAPE_CHARS = 160
_MAX_SHAPES = 4096
_LAST_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of a start.

    Attributes:
        subject: which graphs are captured; empty elsewhere.
        began_s: seconds after the launch.
        done: how far, of ``total``; None where nothing is counted.
    """

    stage: Stage
    subject: str
    began_s: float
    done: int | None = None
    total: int | None = None

    @property
    def name(self) -> str:
        """What it is, without how far it is."""
        words = STAGE_WORDS[self.stage]
        return f"{words} ({self.subject})" if self.subject else words

    def format(self) -> str:
        """Say it in words.

        >>> Step(Stage.WEIGHTS, "", 0.0, 5, 64).format()
        'loading weights (5 of 64)'
        >>> Step(Stage.CAPTURE_TARGET, "target verify", 0.0, 5, 23).format()
        'graph capture (target verify, 5 of 23)'
        """
        counted = "" if self.total is None else f"{self.done} of {self.total}"
        detail = ", ".join(filter(None, (self.subject, counted)))
        words = STAGE_WORDS[self.stage]
        return f"{words} ({detail})" if detail else words


@dataclass(frozen=True, slots=True)
class StepTime:
    """A stage that is over, and how long it took."""

    step: Step
    duration_s: float


class StartProgress:
    """Where a start is.

    Progress is a stage that begins or ends, a count that grows, or a line of a kind that was not
    there before. A line that only comes again with other numbers ("still waiting, 30 s") is none.
    Ranks do not go in step: the one that is furthest is shown.

    Attributes:
        step: where it is now.
        finished: what is over, oldest first.
        progressed_s: when it last got anywhere, in seconds after the launch.
        last_text: the last line that was written.
        aside: a count that is no stage: kernels compiled, files fetched.
        says_ready: the server has called itself ready.
    """

    def __init__(self) -> None:
        self.step = Step(Stage.START, "", 0.0)
        self.finished: tuple[StepTime, ...] = ()
        self.progressed_s = 0.0
        self.last_text = ""
        self.aside = ""
        self.says_ready = False
        self._seen_steps: set[tuple[Stage, str]] = {(Stage.START, "")}
        self._shapes: set[str] = set()
        self._counts: dict[tuple[Stage | None, str], int] = {}

    def take(self, line: LogLine, now_s: float) -> bool:
        """Take in one line; tells whether it was progress.

        Args:
            line: what the server said.
            now_s: seconds since the launch.
        """
        if _OWN_QUESTION.search(line.text):
            return False
        self.last_text = f"{line.rank + ': ' if line.rank else ''}{line.text}"[:_LAST_TEXT_CHARS]
        event = line.event
        is_progress = event is not None and self._follow(event, now_s)
        if event is None or event.mark is not Mark.STEP:
            is_progress = self._is_first_of_kind(line) or is_progress
        if is_progress:
            self.progressed_s = now_s
        return is_progress

    def enter(self, stage: Stage, now_s: float) -> bool:
        """Note a stage that was learnt of in another way, say over HTTP."""
        is_new = self._move(stage, "", now_s)
        if is_new:
            self.progressed_s = now_s
        return is_new

    def times(self, now_s: float) -> Iterator[StepTime]:
        """Yield every stage with its duration, the running one last."""
        yield from self.finished
        yield StepTime(self.step, now_s - self.step.began_s)

    def _is_first_of_kind(self, line: LogLine) -> bool:
        shape = line.rank + _CHANGING.sub("#", line.text[:_SHAPE_CHARS])
        if shape in self._shapes or len(self._shapes) >= _MAX_SHAPES:
            return False
        self._shapes.add(shape)
        return True

    def _follow(self, event: StageEvent, now_s: float) -> bool:
        stage = event.stage
        if stage is Stage.READY:
            # What it says of itself: requests are answered when one has been.
            self.says_ready = True
            stage = Stage.WARM_UP
        subject = event.subject if stage is not None and stage.is_capture else ""
        has_moved = stage is not None and self._move(stage, subject, now_s)
        return has_moved if event.mark is not Mark.STEP else self._count(event, subject)

    def _move(self, stage: Stage, subject: str, now_s: float) -> bool:
        """Go on to another stage; never back, for slower ranks are still in earlier ones."""
        place = (stage, subject)
        is_behind = stage.order < self.step.stage.order
        if place in self._seen_steps or is_behind:
            return False
        self._seen_steps.add(place)
        self.finished += (StepTime(self.step, now_s - self.step.began_s),)
        self.step = Step(stage, subject, now_s)
        self.aside = ""
        return True

    def _count(self, event: StageEvent, subject: str) -> bool:
        done, total = event.done or 0, event.total or 0
        is_here = (event.stage, subject) == (self.step.stage, self.step.subject)
        if is_here:
            self.step = replace(self.step, done=done, total=total)
        elif event.stage is None and event.subject:
            self.aside = f"{event.subject} {done} of {total}"
        place = (event.stage, event.subject)
        has_grown = done > self._counts.get(place, -1)
        self._counts[place] = max(done, self._counts.get(place, -1))
        return has_grown
