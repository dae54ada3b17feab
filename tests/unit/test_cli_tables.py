from __future__ import annotations

import io

import pytest
from rich.console import Console

from nccltune.cli.tables import indent, number_table

COLUMNS = ("bytes", "baseline\nus", "95 %\ninterval")
ROWS = (("67108864", "2370.3", "0.938..0.966"), ("4096", "7.03", "-"))


def drawn(width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(indent(number_table(COLUMNS, ROWS)))
    return stream.getvalue()


@pytest.mark.parametrize("width", range(32, 90))
def test_number_table_keeps_every_digit_at_any_width(width: int) -> None:
    text = drawn(width)

    for cell in (cell for row in ROWS for cell in row):
        assert cell in text
    assert all(len(line) <= width for line in text.splitlines())


def test_number_table_is_a_table_where_there_is_room_and_facts_where_not() -> None:
    assert "─" in drawn(80)
    assert "baseline us" in drawn(33)
    assert "─" not in drawn(33)
