"""Fits text into columns: prose wraps, numbers, names and settings stay whole. Prints nothing.

Where not even their longest words fit side by side, columns turn into facts below each other, and
facts into a name above its value. What is wider still is for the terminal to wrap, which copies it
whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

GAP_WIDTH = 2
"""Columns of the terminal between two columns of text."""

_WORD = re.compile(r"\S*?[A-Z][A-Z0-9_]*='[^']*'\S*|\S+")
"""A setting whose value is quoted counts for one word: a line break would become a part of it."""


def as_text(cell: str | Text) -> Text:
    """Take a cell as it is: no markup."""
    return cell if isinstance(cell, Text) else Text(cell)


def line_width(text: Text) -> int:
    """Return the columns that a text takes with nothing wrapped."""
    return max(map(cell_len, text.plain.splitlines()), default=0)


def word_width(text: Text) -> int:
    """Return the columns of its longest word, which are the fewest that it takes."""
    return max((cell_len(word) for word in _WORD.findall(text.plain)), default=0)


def fold(text: Text, width: int) -> Text:
    """Break lines between words, so that none is wider unless a single word is."""
    lines: list[Text] = []
    for line in _lines(text):
        begin, breaks = 0, []
        for word in _WORD.finditer(line.plain):
            if word.start() > begin and cell_len(line.plain[begin : word.end()]) > width:
                begin = word.start()
                breaks.append(begin)
        lines += line.divide(breaks)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def share_width(least: Sequence[int], wanted: Sequence[int], available: int) -> list[int]:
    """Give every column what it wants, and where that is too much take it from the widest.

    Below ``least`` no column goes, even if that is more than is available.

    >>> share_width([5, 3], [5, 40], 30)
    [5, 25]
    >>> share_width([5, 9], [12, 40], 24)
    [12, 12]
    """
    for limit in range(max(wanted, default=0), 0, -1):
        widths = [max(low, min(high, limit)) for low, high in zip(least, wanted, strict=True)]
        if sum(widths) <= available:
            return widths
    return list(least)


@dataclass(frozen=True, slots=True)
class Columns:
    """A table with a line of headings; columns of ``words`` wrap, all others are numbers."""

    names: Sequence[str]
    rows: Sequence[Sequence[Text]]
    words: frozenset[str] = frozenset()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Take from the longest word of its facts to everything in one line."""
        wanted = sum(map(line_width, self._widest())) + self._gaps
        fewest = max((facts.fewest for facts in self._facts()), default=0)
        return Measurement(min(fewest, wanted), wanted)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw a table, or facts where it does not fit."""
        available = options.max_width - self._gaps
        widest = self._widest()
        wanted = [line_width(text) for text in widest]
        least = [
            word_width(text) if name in self.words else width
            for name, text, width in zip(self.names, widest, wanted, strict=True)
        ]
        if sum(least) <= available or not self.rows:
            yield self._table(share_width(least, wanted, available))
            return
        for idx, facts in enumerate(self._facts()):
            if idx:
                yield ""
            yield facts

    @property
    def _gaps(self) -> int:
        return GAP_WIDTH * (len(self.names) - 1)

    def _widest(self) -> list[Text]:
        """Return everything that stands in each column, one below the other."""
        columns = zip(*self.rows, strict=True) if self.rows else repeat((), len(self.names))
        return [
            Text("\n").join((Text(name), *cells))
            for name, cells in zip(self.names, columns, strict=True)
        ]

    def _facts(self) -> list[Facts]:
        names = [Text(name.replace("\n", " ")) for name in self.names]
        return [Facts(list(zip(names, row, strict=True))) for row in self.rows]

    def _table(self, widths: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False)
        for name, width in zip(self.names, widths, strict=True):
            justify = "left" if name in self.words else "right"
            table.add_column(
                fold(Text(name), width),
                justify=justify,  # type: ignore[arg-type]
                no_wrap=True,
                header_style="dim",
            )
        for row in self.rows:
            table.add_row(*map(fold, row, widths))
        return table


@dataclass(frozen=True, slots=True)
class Facts:
    """Names on the left, values that wrap on the right, or below where there is no room."""

    rows: Sequence[tuple[Text, Text]]
    name_style: str = "dim"
    value_style: str = ""

    @property
    def fewest(self) -> int:
        """Columns below which a word would have to break."""
        values = [word_width(value) + GAP_WIDTH for _, value in self.rows if value.plain]
        return max([*values, *(word_width(name) for name, _ in self.rows)], default=0)

    @property
    def _value_column(self) -> int:
        return max((line_width(name) for name, _ in self.rows), default=0) + GAP_WIDTH

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Take from the longest word to everything in one line."""
        values = max((line_width(value) for _, value in self.rows), default=0)
        wanted = self._value_column + values
        return Measurement(min(self.fewest, wanted), wanted)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw each value beside its name, or below it where its longest word has no room there."""
        room = options.max_width - self._value_column
        for name, value in self.rows:
            label = _styled(name, self.name_style)
            if not value.plain:
                yield fold(label, options.max_width)
            elif word_width(value) <= room:
                beside = _styled(fold(value, room), self.value_style)
                label.pad_right(self._value_column - cell_len(label.plain))
                yield label.append_text(_set_in(beside, self._value_column))
            else:
                below = fold(value, options.max_width - GAP_WIDTH)
                yield fold(label, options.max_width)
                yield Text(" " * GAP_WIDTH) + _set_in(_styled(below, self.value_style), GAP_WIDTH)


def _styled(text: Text, style: str) -> Text:
    styled = text.copy()
    styled.stylize_before(style)
    return styled


def _set_in(text: Text, column: int) -> Text:
    """Begin every line but the first at a column."""
    return Text("\n" + " " * column).join(_lines(text))


def _lines(text: Text) -> list[Text]:
    return [*text.split("\n", allow_blank=True)]
