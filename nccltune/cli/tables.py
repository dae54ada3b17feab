"""Shapes that every report is made of: a table, a block of facts, a heading. Prints nothing."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from nccltune.measurement import Settings

GAP_WIDTH = 2
"""Columns between two columns of a table."""


def heading(text: str, note: str = "") -> RenderableType:
    """Open a section: an empty line, then its name in bold and a remark beside it."""
    line = Text.assemble((text, "bold"), (f"  {note}" if note else "", "dim"))
    return Padding(line, (1, 0, 0, 0), expand=False)


class _FittingTable(Table):
    """A table that turns into blocks of facts where it would lose digits."""

    facts: list[list[tuple[str, str | Text]]]
    needed_width = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.needed_width <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        for idx, facts in enumerate(self.facts):
            if idx:
                yield ""
            yield fact_grid((name.replace("\n", " "), value) for name, value in facts)


def _width(name: str, cells: Iterable[str | Text]) -> int:
    lines = [line for text in (name, *cells) for line in str(text).splitlines()]
    return max(map(cell_len, lines), default=0)


def number_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, words: Sequence[str] = ()
) -> Table:
    """Build a table of right-aligned numbers; columns named in ``words`` hold text and may fold.

    Where the numbers do not fit side by side, a row becomes a block of facts: none is cut short.
    """
    rows = [*rows]
    table = _FittingTable(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False
    )
    table.facts = [list(zip(columns, row, strict=True)) for row in rows]
    widths = [_width(name, (row[idx] for row in rows)) for idx, name in enumerate(columns)]
    numbers = [width for name, width in zip(columns, widths, strict=True) if name not in words]
    if numbers:
        table.needed_width = sum(numbers) + GAP_WIDTH * (len(columns) - 1)
    for name in columns:
        is_text = name in words
        table.add_column(
            name,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            header_style="dim",
        )
    for row in rows:
        table.add_row(*row)
    return table


def fact_grid(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """Lay out names and values in two columns; a long value folds below itself."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, value)
    return grid


def settings_block(settings: Settings, remarks: Mapping[str, str] | None = None) -> RenderableType:
    """List settings, one a line, with a remark beside those that have one."""
    if not settings:
        return Text("(none: the defaults)", style="dim")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    if remarks:
        grid.add_column(style="dim", overflow="fold")
    for name, value in sorted(settings.items()):
        remark = [remarks.get(name, "")] if remarks else []
        grid.add_row(f"{name}={shlex.quote(value)}", *remark)
    return grid


def indent(part: RenderableType) -> RenderableType:
    """Set a part in by two columns, below its heading."""
    return Padding(part, (0, 0, 0, 2), expand=False)


def stack(parts: Iterable[RenderableType]) -> RenderableType:
    """Put parts below each other as one."""
    return Group(*parts)
