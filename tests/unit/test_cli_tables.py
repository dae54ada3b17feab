"""Tables, facts and settings at every width: words stay whole, prose wraps."""

from __future__ import annotations

import doctest
import io
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

import nccltune.cli.fitting as fitting
from nccltune.cli.render import print_report
from nccltune.cli.tables import fact_grid, indent, number_table, settings_block

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = ("bytes", "baseline\nus", "95 %\ninterval")
ROWS = (("67108864", "2370.3", "0.938..0.966"), ("4096", "7.03", "-"))

NAME = "kimi-k2.5-2x-h200-sxm-with-a-name-as-long-as-they-get"
THRESHOLDS = "NCCL_THREAD_THRESHOLDS='-2 -2 -2 4 -2 -2'"
SETTING = "CUDA_DEVICE_MAX_CONNECTIONS=8"
PROSE = "SGLang's own kernels carry it, and the server's interpreter says so"
WHOLE = (NAME, SETTING, THRESHOLDS)

SHAPES: dict[str, Callable[[], RenderableType]] = {
    "table": lambda: number_table(
        ("name", "bytes", "always set", "found"),
        [[NAME, "67108864", f"{SETTING} {THRESHOLDS}", Text(PROSE, style="cyan")]],
        words=("name", "always set", "found"),
    ),
    "facts": lambda: fact_grid([("name", NAME), ("always set", f"{SETTING} {THRESHOLDS} {PROSE}")]),
    "settings": lambda: settings_block(
        {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"},
        {"NCCL_THREAD_THRESHOLDS": f"without it {NAME} {PROSE}"},
    ),
}


def drawn(width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(indent(number_table(COLUMNS, ROWS)))
    return stream.getvalue()


def reported(capsys: pytest.CaptureFixture[str], part: RenderableType) -> list[str]:
    print_report([part])
    return capsys.readouterr().out.splitlines()


def words_of(lines: list[str]) -> list[str]:
    return sorted(word for line in lines for word in line.split() if set(word) != {"─"})


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_set_in", [False, True], ids=["flush", "indented"])
def test_no_width_breaks_a_word_or_a_quoted_setting(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    is_set_in: bool,
) -> None:
    def at(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        part = SHAPES[shape]()
        return reported(capsys, indent(part) if is_set_in else part)

    wide = words_of(at(500))
    for width in range(10, 180):
        lines = at(width)
        assert words_of(lines) == wide, width
        for whole in WHOLE:
            assert any(whole in line for line in lines), (width, whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_lines_fit_as_soon_as_the_longest_word_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    for width in range(len(NAME) + fitting.GAP_WIDTH, 180):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(map(len, reported(capsys, SHAPES[shape]()))) <= width


def test_prose_wraps_between_words_beside_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")

    lines = reported(capsys, fact_grid([("found", PROSE)]))

    assert lines == [
        "found  SGLang's own kernels carry it,",
        "       and the server's interpreter says",
        "       so",
    ]


def test_one_value_that_is_too_long_goes_below_its_name_and_moves_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "45")

    lines = reported(capsys, fact_grid([("state", "active"), ("settings", THRESHOLDS)]))

    assert lines == ["state     active", "settings", f"  {THRESHOLDS}"]


def test_settings_are_one_a_line_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    settings = {"NCCL_ALGO": "Ring", "NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"}

    assert reported(capsys, settings_block(settings)) == ["NCCL_ALGO=Ring", THRESHOLDS]


def test_a_terminal_that_is_too_narrow_gets_whole_words_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "dumb")

    print_report([SHAPES["table"]()])

    assert all(whole in terminal.getvalue() for whole in WHOLE)


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_that_is_too_wide_makes_no_other_wide(
    monkeypatch: pytest.MonkeyPatch, shape: str, is_terminal: bool
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns to rich
    monkeypatch.setenv("NO_COLOR", "1")

    def printed(*parts: RenderableType) -> str:
        monkeypatch.setattr(sys, "stdout", stream := Stream())
        print_report(parts)
        return stream.getvalue()

    wide, prose = SHAPES[shape](), Text(f"{PROSE} {PROSE}")

    assert max(map(len, printed(wide).splitlines())) > 30
    assert max(map(len, printed(prose).splitlines())) <= 30
    assert printed(wide, prose, wide) == printed(wide) + printed(prose) + printed(wide)


def test_wider_is_never_taller(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heights = []
    for width in range(20, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        heights.append(len(reported(capsys, fact_grid([("found", PROSE), ("name", "x")]))))

    assert all(later <= earlier for earlier, later in pairwise(heights))


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(fitting).failed == 0
