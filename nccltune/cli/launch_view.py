"""Shows a starting server on stderr, around its own output, which goes through as it came.

On a terminal the picture is taken away while the server's lines are written, and drawn again below
them. Elsewhere there is one line a stage, one every 10 s while something is counted, and one every
30 s while nothing happens.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from nccltune.cli import render
from nccltune.cli.envelope import one_line
from nccltune.cli.words import format_clock
from nccltune.supervise import PassThrough
from nccltune.supervise.output import STDERR, has_one_stream

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from nccltune.sglang.start_progress import Step, StepTime
    from nccltune.supervise import Moment

COUNT_EVERY_S = 10.0
IDLE_EVERY_S = 30.0
_MAX_HELD_BYTES = 64 * 1024
_ROUNDING_S = 1e-6


class StartLines:
    """Chooses what of a start is worth a line: a new stage, and now and then how far it is.

    Attributes:
        at_s: of which moment the last line speaks, in seconds after the launch.
    """

    def __init__(self) -> None:
        self.at_s = 0.0
        self._shown: Step | None = None
        self._next_s = 0.0

    def next(self, moment: Moment) -> str:
        """Return what to say now; empty for nothing."""
        waited = moment.waited
        step, elapsed_s, idle_s = waited.step, waited.elapsed_s, waited.idle_s
        if moment.served_s is not None:
            return ""
        shown, self._shown = self._shown, step
        self.at_s = elapsed_s
        if shown is None or (shown.stage, shown.subject) != (step.stage, step.subject):
            self.at_s = step.began_s
            self._next_s = elapsed_s + COUNT_EVERY_S
            return f"{step.format()}{_took(moment)}"
        if elapsed_s >= self._next_s and (idle_s >= IDLE_EVERY_S or shown != step):
            self._next_s = elapsed_s + (IDLE_EVERY_S if idle_s >= IDLE_EVERY_S else COUNT_EVERY_S)
            return _progress_line(moment)
        return ""


class PlainView:
    """Lines of our own between the server's, never within one of them."""

    def __init__(self) -> None:
        self._output = PassThrough()
        self._lock = threading.Lock()
        self._is_shared = has_one_stream()
        self._in_line: dict[int, bool] = {}
        self._lines = StartLines()

    def write(self, descriptor: int, data: bytes) -> None:
        """Hand the server's output on."""
        with self._lock:
            self._output.write(descriptor, data)
            self._in_line[STDERR if self._is_shared else descriptor] = not data.endswith(b"\n")

    def say(self, text: str) -> None:
        """Write a line of our own."""
        with self._lock:
            start = "\n" if self._in_line.get(STDERR) else ""
            self._in_line[STDERR] = False
            line = f"{start}nccltune: {one_line(text)}\n"
            with suppress(OSError):
                os.write(STDERR, line.encode(errors="replace"))

    def update(self, moment: Moment) -> None:
        """Write what is worth a line."""
        text = self._lines.next(moment)
        if text:
            self.say(f"{format_clock(self._lines.at_s)}  {text}")

    def finish(self) -> None:
        """Show no more."""


class LiveView:
    """A picture below the server's lines, for a person at a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._output = PassThrough()
        self._lock = threading.RLock()
        self._held: dict[int, bytes] = {}
        self._moment: Moment | None = None
        self._picture: Live | None = None
        self._is_over = False

    def write(self, descriptor: int, data: bytes) -> None:
        """Hand the server's output on; an unfinished line waits while there is a picture."""
        with self._lock:
            if self._is_over or not os.isatty(descriptor):
                self._output.write(descriptor, data)
                return
            held = self._held.get(descriptor, b"") + data
            end = len(held) if len(held) > _MAX_HELD_BYTES else held.rfind(b"\n") + 1
            self._held[descriptor] = held[end:]
            if end:
                self._hide()
                self._output.write(descriptor, held[:end])
                self._show()

    def say(self, text: str) -> None:
        """Write a line of our own."""
        with self._lock:
            self._hide()
            with suppress(OSError):
                os.write(STDERR, f"nccltune: {one_line(text)}\n".encode(errors="replace"))
            self._show()

    def update(self, moment: Moment) -> None:
        """Draw the newest moment."""
        with self._lock:
            self._moment = moment
            self._show()

    def finish(self) -> None:
        """Take the picture away for good, and let out what was held back."""
        with self._lock:
            self._hide()
            self._is_over = True
            for descriptor, held in self._held.items():
                self._output.write(descriptor, held)
            self._held.clear()

    def _show(self) -> None:
        from rich.live import Live

        if self._is_over or self._moment is None or self._moment.served_s is not None:
            return
        if self._picture is not None:
            self._picture.refresh()
            return
        # A new one each time: one that was stopped still believes that it stands on the screen.
        self._picture = Live(
            get_renderable=self._draw,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._picture.start(refresh=True)

    def _hide(self) -> None:
        if self._picture is not None:
            self._picture.stop()
            self._picture = None

    def _draw(self) -> RenderableType:
        return picture_of(self._moment) if self._moment is not None else ""


def picture_of(moment: Moment) -> RenderableType:
    """Build the picture of a start: what is over, what runs, and how long nothing has happened."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    waited = moment.waited
    head = Table.grid(expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    limit = f"of {format_clock(waited.limits.ready_timeout_s)}"
    head.add_row(
        Text.assemble(("nccltune launch", "bold"), "  ", waited.step.format()),
        f"{format_clock(waited.elapsed_s)} {limit}",
    )
    return Group(head, *stage_parts(moment))


def stage_parts(moment: Moment) -> list[RenderableType]:
    """List the stages of a start with the time in each, and when it last got anywhere."""
    from rich.table import Table
    from rich.text import Text

    waited = moment.waited
    stages = Table.grid(padding=(0, 2), expand=True)
    stages.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    stages.add_column(justify="right", no_wrap=True)
    for idx, each in enumerate(moment.times):
        is_last = idx == len(moment.times) - 1
        style = "" if is_last else "dim"
        cells = (f"  {each.step.format()}", f"{each.duration_s:.1f} s")
        stages.add_row(*(Text(cell, style=style) for cell in cells))
    idle_limit = format_clock(waited.limits.stall_timeout_s)
    idle = f"last progress {waited.idle_s:.0f} s ago (limit {idle_limit})"
    is_slow = waited.idle_s >= IDLE_EVERY_S
    below = [Text(idle, style="yellow" if is_slow else "dim", no_wrap=True, overflow="ellipsis")]
    below += [
        Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        for text in (moment.aside, one_line(waited.last_text))
        if text
    ]
    return [stages, *below]


def make_view() -> PlainView | LiveView:
    """Return the view that fits: a picture for a person at a terminal, else lines for a log."""
    if sys.stderr is None or not sys.stderr.isatty():
        return PlainView()
    console = render.make_console(sys.stderr)
    return PlainView() if console.is_dumb_terminal else LiveView(console)


def ready_line(moment: Moment) -> str:
    """Say how long a start took, and which stages took most of it."""
    spent = [(each.step.name, _shown_s(each)) for each in moment.times]
    parts = ", ".join(f"{name} {seconds} s" for name, seconds in spent if seconds)
    where = f" on {moment.endpoint.url}" if moment.endpoint is not None else ""
    return f"ready{where} after {int(moment.waited.elapsed_s)} s{f': {parts}' if parts else ''}"


def _shown_s(time: StepTime) -> int:
    """Return how long a stage took by the clock that is shown, which has whole seconds.

    So what stands beside the clock adds up to what the clock says.
    """
    return int(time.step.began_s + time.duration_s + _ROUNDING_S) - int(time.step.began_s)


def _took(moment: Moment) -> str:
    """Say how long the stage before took, where that is worth a word."""
    if len(moment.times) < 2 or not _shown_s(moment.times[-2]):
        return ""
    return f"; {moment.times[-2].step.name} took {_shown_s(moment.times[-2])} s"


def _progress_line(moment: Moment) -> str:
    waited, running = moment.waited, moment.times[-1]
    line = f"{waited.step.format()}, {_shown_s(running)} s in it"
    if moment.aside:
        line += f", {moment.aside}"
    if waited.idle_s >= IDLE_EVERY_S:
        limit = f"{waited.limits.stall_timeout_s:g}"
        line += f", no progress for {int(waited.idle_s)} s (limit {limit} s)"
    return line
