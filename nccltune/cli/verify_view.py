"""Follows a verify on stderr: a live picture on a terminal, lines for a log elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from nccltune.cli.envelope import one_line
from nccltune.cli.launch_view import StartLines, stage_parts
from nccltune.cli.live import fitting_view, write_line
from nccltune.cli.words import UNKNOWN, format_clock
from nccltune.verify.spec import VerifyStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from nccltune.verify.model import Boot
    from nccltune.verify.spec import VerifyObserver, VerifyProgress

RECENT_COUNT = 8
FOOTER = "Ctrl-C stops; finished boots are kept, and --resume goes on."


class PlainView:
    """A line for each stage of a start, each run and each finished boot."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._position: int | None = None
        self._start = StartLines()
        self._last = ""

    def update(self, progress: VerifyProgress) -> None:
        """Write what changed."""
        if progress.position != self._position:
            self._position = progress.position
            self._start = StartLines()
        text = self._text(progress)
        if text and text != self._last:
            self._last = text
            place = f"boot {progress.position + 1}/{progress.boot_total}  {progress.arm}"
            write_line(
                self._stream, f"{format_clock(progress.elapsed_s):>7}  {place}: {one_line(text)}"
            )

    def _text(self, progress: VerifyProgress) -> str:
        if progress.boot is not None:
            left_s = progress.remaining_s
            left = "" if left_s is None else f"; {format_clock(left_s)} left"
            return f"done, {boot_words(progress.boot)}{left}"
        if progress.stage is VerifyStage.START:
            moved = "" if progress.moment is None else self._start.next(progress.moment)
            return moved or progress.note
        return doing(progress)


class LiveView:
    """A picture that rich's own thread redraws, so that the clock runs while a request does.

    ``update`` only remembers; drawing happens at most four times a second, not in the load's way.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: tuple[VerifyProgress, float] | None = None
        self._left: tuple[float | None, float] = (None, 0.0)
        self._boots: list[Boot] = []

    def update(self, progress: VerifyProgress) -> None:
        """Remember the moment for the next redraw."""
        now_s = self._clock()
        self._latest = (progress, now_s)
        if progress.remaining_s != self._left[0]:  # said anew with each boot: it runs in between
            self._left = (progress.remaining_s, now_s)
        if progress.boot is not None:
            self._boots.append(progress.boot)

    def draw(self) -> RenderableType:
        """Build the picture of now."""
        from rich.console import Group
        from rich.text import Text

        if self._latest is None:
            return Text("nccltune verify: starting")
        progress, seen_at_s = self._latest
        now_s = self._clock()
        left_s, said_at_s = self._left
        left_s = None if left_s is None else left_s - (now_s - said_at_s)
        parts = [_head(progress, progress.elapsed_s + now_s - seen_at_s, left_s), _bar(progress)]
        if progress.stage is VerifyStage.START and progress.moment is not None:
            parts += stage_parts(progress.moment)
        else:
            parts.append(Text(f"  {one_line(doing(progress))}", no_wrap=True, overflow="ellipsis"))
        if self._boots:
            parts += ["", _finished(self._boots[-RECENT_COUNT:])]
        return Group(*parts, Text(FOOTER, style="dim"))


def doing(progress: VerifyProgress) -> str:
    """Say what happens after the start."""
    if progress.stage is VerifyStage.STOP:
        return "stopping the server"
    return progress.note or "measuring"


def boot_words(boot: Boot) -> str:
    """Say what one boot came to."""
    ms, tok_s = boot.ms_per_verify, 1e3 / boot.ms_per_token
    speed = "" if ms is None else f"{ms:.2f} ms per verify, "
    return f"{speed}{tok_s:.1f} tok/s, started in {boot.start_s:.0f} s"


def _head(progress: VerifyProgress, elapsed_s: float, left_s: float | None) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    place = f"{progress.arm}, boot {progress.position + 1} of {progress.boot_total}"
    left = "" if left_s is None else f", {format_clock(left_s)} left"
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(
        Text.assemble(("nccltune verify", "bold"), f"  {place}"),
        f"{format_clock(elapsed_s)} gone{left}",
    )
    return grid


def _bar(progress: VerifyProgress) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    # half a boot is the start, for want of anything better known
    share = {VerifyStage.START: 0.0, VerifyStage.MEASURE: 0.5, VerifyStage.STOP: 1.0}
    grid = Table.grid(padding=(0, 2))
    total = max(1, progress.boot_total)
    grid.add_row(
        ProgressBar(
            total=total, completed=min(total, progress.position + share[progress.stage]), width=40
        ),
        f"{progress.position}/{progress.boot_total} boots",
    )
    return grid


def _finished(boots: list[Boot]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, justify="right", style="dim")
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
    for _ in range(3):
        grid.add_column(no_wrap=True, justify="right")
    for boot in boots:
        ms = boot.ms_per_verify
        grid.add_row(
            str(boot.position + 1),
            boot.arm,
            UNKNOWN if ms is None else f"{ms:.2f} ms/verify",
            f"{1e3 / boot.ms_per_token:.1f} tok/s",
            f"started in {boot.start_s:.0f} s",
        )
    return grid


@contextmanager
def follow(*, wants_json: bool) -> Iterator[VerifyObserver]:
    """Yield the view that fits."""

    def make_live() -> tuple[VerifyObserver, Callable[[], RenderableType]]:
        view = LiveView()
        return view, view.draw

    with fitting_view(PlainView, make_live, wants_json=wants_json) as view:
        yield view
