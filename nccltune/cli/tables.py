"""Shapes that every report is made of: a table, a block of facts, a heading. Prints nothing."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nccltune.cli.fitting import Columns, Facts, as_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nccltune.measurement import Settings


def heading(text: str, note: str = "") -> RenderableType:
    """Open a section: an empty line, then its name in bold and a remark beside it."""
    line = Text.assemble((text, "bold"), (f"  {note}" if note else "", "dim"))
    return Padding(line, (1, 0, 0, 0), expand=False)


def number_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, words: Sequence[str] = ()
) -> RenderableType:
    """Build a table of right-aligned numbers; columns named in ``words`` hold text and may wrap.

    Where numbers and names do not fit side by side, a row becomes a block of facts: none is cut.
    """
    cells = [[as_text(cell) for cell in row] for row in rows]
    return Columns(columns, cells, frozenset(words))


def fact_grid(
    facts: Iterable[tuple[str | Text, str | Text]], *, name_style: str = "dim"
) -> RenderableType:
    """Lay out names and values in two columns; a long value wraps beside its name."""
    return Facts([(as_text(name), as_text(value)) for name, value in facts], name_style)


def settings_block(settings: Settings, remarks: Mapping[str, str] | None = None) -> RenderableType:
    """List settings, one a line, with a remark beside those that have one."""
    if not settings:
        return Text("(none: the defaults)", style="dim")
    rows = [
        (Text(f"{name}={shlex.quote(value)}"), Text((remarks or {}).get(name, "")))
        for name, value in sorted(settings.items())
    ]
    return Facts(rows, name_style="", value_style="dim")


def indent(part: RenderableType) -> RenderableType:
    """Set a part in by two columns, below its heading."""
    return Padding(part, (0, 0, 0, 2), expand=False)


def stack(parts: Iterable[RenderableType]) -> RenderableType:
    """Put parts below each other as one."""
    return Group(*parts)
