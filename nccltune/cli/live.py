"""Follows a running search on stderr: a live picture on a terminal, one line a launch elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from nccltune.cli import render
from nccltune.cli.envelope import one_line
from nccltune.cli.words import (
    format_clock,
    format_counts,
    format_ratio,
    format_settings,
    shorten_settings,
)
from nccltune.measurement import Outcome
from nccltune.search.result import Progress, SearchObserver, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import RenderableType
    from rich.text import Text

View = TypeVar("View")
REFRESHES_PER_S = 4
RECENT_COUNT = 5
STAGE_WORDS = {
    Stage.BASELINE: "measuring the baseline",
    Stage.SEARCH: "searching",
    Stage.REMEASURE: "measuring the best again",
    Stage.ABLATION: "leaving settings out one by one",
    Stage.DUEL: "duel on fresh launches",
    Stage.CHECKS: "running the other collectives",
}


@dataclass(frozen=True, slots=True)
class Wording:
    """What a view calls stages and launches, and what it says of Ctrl-C."""

    stages: Mapping[Stage, str]
    unit: str
    footer: str


KEPT = "Ctrl-C stops; everything measured so far is kept."
SEARCH_WORDING = Wording(STAGE_WORDS, "trial", KEPT)


class PlainView:
    """One line for every finished launch and every stage; the baseline comes again in between."""

    def __init__(self, stream: TextIO, wording: Wording = SEARCH_WORDING) -> None:
        self._stream = stream
        self._wording = wording
        self._seen: set[Stage] = set()

    def update(self, progress: Progress) -> None:
        """Write what changed."""
        if progress.stage not in self._seen:
            self._seen.add(progress.stage)
            write_line(
                self._stream,
                f"{format_clock(progress.elapsed_s):>7}  {self._wording.stages[progress.stage]}",
            )
        if progress.launch is not None:
            write_line(self._stream, _launch_line(progress, self._wording.unit))


def write_line(stream: TextIO, line: str) -> None:
    """Write one line for a log; a stream that is gone is nobody's business."""
    try:
        stream.write(line + "\n")
        stream.flush()
    except (OSError, ValueError):
        return


def _launch_line(progress: Progress, unit: str) -> str:
    launch = progress.launch
    assert launch is not None  # noqa: S101 - the caller looked
    is_trial = progress.stage is Stage.SEARCH
    place = f"{unit} {progress.trial_idx}" if is_trial else str(progress.stage)
    ending = "pruned" if launch.is_pruned else str(launch.outcome)
    score = ""
    if progress.score_ratio is not None or progress.best_score_ratio is not None:
        score = (
            f"score {format_ratio(progress.score_ratio):>5}  "
            f"best {format_ratio(progress.best_score_ratio):>5}  "
        )
    line = (
        f"{format_clock(progress.elapsed_s):>7}  {place:>9}  {ending:11} {score}"
        f"{format_settings(launch.settings)}"
    )
    said = launch.message or progress.note
    return f"{line}: {one_line(said)}" if said else line


class LiveView:
    """A picture that rich's own thread redraws, so that the clock runs while a trial hangs.

    ``update`` only remembers; drawing happens at most four times a second, not in the search's way.
    """

    def __init__(
        self,
        *,
        name: str,
        wording: Wording = SEARCH_WORDING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._wording = wording
        self._clock = clock
        self._latest: tuple[Progress, float] | None = None
        self._recent: deque[Progress] = deque(maxlen=RECENT_COUNT)

    def update(self, progress: Progress) -> None:
        """Remember the moment for the next redraw."""
        self._latest = (progress, self._clock())
        if progress.launch is not None:
            self._recent.append(progress)

    def draw(self) -> RenderableType:
        """Build the picture of now."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        if self._latest is None:
            return Text(f"nccltune {self._name}: starting")
        progress, seen_at_s = self._latest
        since_s = self._clock() - seen_at_s
        return Group(
            self._head(progress, since_s),
            self._facts(progress, since_s),
            Padding(self._history(), (1, 0, 0, 0)),
            Text(self._wording.footer, style="dim"),
        )

    def _head(self, progress: Progress, since_s: float) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        left_s = None if progress.remaining_s is None else progress.remaining_s - since_s
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(
            Text.assemble(
                (f"nccltune {self._name}", "bold"), "  ", self._wording.stages[progress.stage]
            ),
            f"{format_clock(progress.elapsed_s + since_s)} gone, {format_clock(left_s)} left",
        )
        return grid

    def _facts(self, progress: Progress, since_s: float) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = max(1, progress.trial_total)
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=total, completed=min(progress.trial_idx, total), width=40),
            f"{progress.trial_idx}/{progress.trial_total}",
        )
        now = progress.note or shorten_settings(progress.settings)
        waiting = f"  ({since_s:.0f} s)" if progress.launch is None and since_s >= 1.0 else ""
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        grid.add_row("done", bar)
        if progress.best_score_ratio is not None:
            ratio = (format_ratio(progress.best_score_ratio), "bold green")
            best = Text.assemble(ratio, "  ", shorten_settings(progress.best_settings))
            grid.add_row("best score", best)
        grid.add_row("now", f"{one_line(now)}{waiting}")
        grid.add_row("endings", format_counts(progress.outcome_counts))
        return grid

    def _history(self) -> RenderableType:
        from rich.table import Table

        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(justify="right", style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for past in self._recent:
            grid.add_row(
                str(past.trial_idx) if past.stage is Stage.SEARCH else str(past.stage),
                format_ratio(past.score_ratio),
                _ending(past),
                _story(past),
            )
        return grid


def _ending(past: Progress) -> Text:
    from rich.text import Text

    assert past.launch is not None  # noqa: S101 - only finished launches are remembered
    if past.launch.is_pruned:
        return Text("pruned", style="dim")
    return Text(str(past.launch.outcome), style="" if past.launch.outcome is Outcome.OK else "red")


def _story(past: Progress) -> str:
    assert past.launch is not None  # noqa: S101 - only finished launches are remembered
    said = one_line(past.launch.message)
    return shorten_settings(past.launch.settings) + (f": {said}" if said else "")


@contextmanager
def follow(
    name: str, *, wants_json: bool, wording: Wording = SEARCH_WORDING
) -> Iterator[SearchObserver]:
    """Yield the view of a search that fits: live for a person at a terminal, else plain lines."""

    def make_live() -> tuple[SearchObserver, Callable[[], RenderableType]]:
        view = LiveView(name=name, wording=wording)
        return view, view.draw

    with fitting_view(
        lambda stream: PlainView(stream, wording), make_live, wants_json=wants_json
    ) as view:
        yield view


@contextmanager
def fitting_view(
    make_plain: Callable[[TextIO], View],
    make_live: Callable[[], tuple[View, Callable[[], RenderableType]]],
    *,
    wants_json: bool,
) -> Iterator[View]:
    """Yield a live view for a person at a terminal, else one that writes plain lines for a log.

    Args:
        make_plain: builds the view that writes to a stream.
        make_live: builds the view that is drawn, and what draws it.
        wants_json: a script reads the answer.
    """
    if sys.stderr is None:  # closed: nobody follows
        with Path(os.devnull).open("w", encoding="utf-8") as nothing:
            yield make_plain(nothing)
        return
    is_watched = sys.stdout is not None and sys.stdout.isatty() and sys.stderr.isatty()
    if wants_json or not is_watched:
        yield make_plain(sys.stderr)
        return
    from rich.live import Live

    console = render.make_console(sys.stderr)
    if console.is_dumb_terminal:
        yield make_plain(sys.stderr)
        return
    view, draw = make_live()
    with Live(
        get_renderable=draw,
        console=console,
        refresh_per_second=REFRESHES_PER_S,
        redirect_stdout=False,
        transient=True,
    ):
        yield view
