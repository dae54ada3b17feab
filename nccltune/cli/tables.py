"""Shapes that every report is made of: a table, a block of facts, a heading. Prints nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nccltune.measurement import Settings


def heading(text: str, note: str = "") -> RenderableType:
    """Open a section: an empty line, then its name in bold and a remark beside it."""
    line = Text.assemble((text, "bold"), (f"  {note}" if note else "", "dim"))
    return Padding(line, (1, 0, 0, 0), expand=False)


def number_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, words: Sequence[str] = ()
) -> Table:
    """Build a table of right-aligned numbers; columns named in ``words`` hold text and may fold."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False)
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
        grid.add_row(f"{name}={value}", *remark)
    return grid


def indent(part: RenderableType) -> RenderableType:
    """Set a part in by two columns, below its heading."""
    return Padding(part, (0, 0, 0, 2), expand=False)


def stack(parts: Iterable[RenderableType]) -> RenderableType:
    """Put parts below each other as one."""
    return Group(*parts)
