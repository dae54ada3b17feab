"""``nccltune history``: verifies and searches of this host, and how the same figure moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from rich.measure import Measurement
from rich.text import Text

from nccltune.cli.envelope import Answer
from nccltune.cli.history_data import Entry, Kind, read_history, series_of
from nccltune.cli.options import json_option
from nccltune.cli.tables import heading, indent, number_table
from nccltune.cli.trend import BLOCKS, PLAIN_BLOCKS, draw_sparkline
from nccltune.cli.words import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from nccltune.cli.trend import Series

VERDICT_STYLE = {
    "gain": "green",
    "improved": "green",
    "regression": "red",
    "unusable": "red",
    "drift": "yellow",
    "inconclusive": "yellow",
}


@click.command(name="history")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Entries to list, the newest of them.",
)
@json_option
def command(last: int) -> Answer:
    """List the verifies and searches of this host, and show how it moved over time."""
    shown, total, problems = read_history(last)
    series = series_of(shown)
    return Answer(
        data={
            "entries": [entry.to_json() for entry in shown],
            "entry_count": total,
            "series": [_series_data(each) for each in series],
        },
        show=lambda: _parts(shown, total, series),
        warnings=problems,
    )


def _series_data(series: Series) -> dict[str, object]:
    return {
        "name": series.name,
        "unit": series.unit,
        "change_pct": series.change_pct,
        "points": [
            {"at": point.at, "value": point.value, "origin": point.origin}
            for point in series.points
        ],
    }


def _parts(
    shown: Sequence[Entry], total: int, series: Sequence[Series]
) -> Iterator[RenderableType]:
    if not shown:
        yield "Nothing was verified on this host yet, and nothing searched on its GPUs."
        yield "  nccltune search"
        yield "  nccltune verify -- CMD"
        return
    verifies = sum(entry.kind is Kind.VERIFY for entry in shown)
    left_out = f", the last of {total}" if total > len(shown) else ""
    counts = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in (
            (verifies, "verify", "verifies"),
            (len(shown) - verifies, "search", "searches"),
        )
        if count
    ]
    yield Text(f"{' and '.join(counts)}{left_out}, oldest first")
    yield ""
    yield number_table(
        ["id, by time (UTC)", "what", "verdict", "result"],
        (_row(entry) for entry in shown),
        words=("what", "result"),
    )
    moved = [each for each in series if len(each.points) > 1]
    if moved:
        yield heading("How it moved", "smaller is faster; one mark each, oldest first")
        yield indent(_SeriesTable(moved))
    baselines = [entry for entry in shown if entry.is_baseline]
    if baselines:
        yield heading("Next", "is a server that runs still what was verified?")
        yield "  nccltune verify --url URL"


def _row(entry: Entry) -> list[str | Text]:
    return [
        entry.id,
        entry.subject if entry.kind is Kind.VERIFY else f"search: {entry.subject}",
        Text(entry.verdict, style=VERDICT_STYLE.get(entry.verdict, "")),
        entry.result,
    ]


@dataclass(frozen=True, slots=True)
class _SeriesTable:
    """Draws a mark for each value, in plain characters where the terminal has no others."""

    series: Sequence[Series]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(PLAIN_BLOCKS if options.ascii_only else BLOCKS)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(BLOCKS))

    def _table(self, blocks: str) -> RenderableType:
        columns = ("figure", "moved", "first to last", "change")
        rows = (_series_row(each, blocks) for each in self.series)
        return number_table(columns, rows, words=("figure", "moved"))


def _series_row(series: Series, blocks: str) -> list[str | Text]:
    values = [point.value for point in series.points]
    change = series.change_pct
    return [
        series.name,
        draw_sparkline(values, blocks),
        f"{values[0]:.2f} to {values[-1]:.2f} {series.unit}",
        UNKNOWN if change is None else f"{change:+z.1f} %",
    ]
