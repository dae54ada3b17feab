"""How numbers and settings are worded."""

from __future__ import annotations

import doctest

import pytest

import nccltune.cli.words as words
from nccltune.measurement import Outcome


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(words).failed == 0


def test_format_settings_without_any_says_so() -> None:
    assert words.format_settings({}) == "(none: the defaults)"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.5, "50.0 % faster"),
        (0.9996, "no different"),
        (1.999, "99.9 % slower"),
        (2.0, "2.00 times slower"),
    ],
)
def test_format_change_at_the_edges(ratio: float, said: str) -> None:
    assert words.format_change(ratio) == said


def test_format_clock_of_a_moment_below_zero_is_zero() -> None:
    assert words.format_clock(-0.5) == "0:00"


def test_style_ratio_of_a_guard_has_nothing_to_win() -> None:
    assert words.style_ratio(0.9) == "green"
    assert words.style_ratio(0.9, is_guard=True) == ""
    assert words.style_ratio(1.2, is_guard=True) == "red"


def test_every_outcome_has_a_meaning() -> None:
    assert set(words.OUTCOME_MEANING) == set(Outcome)
