"""What is kept of a host's noise, and what a broken file does to it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from nccltune.paths import state_dir
from nccltune.store.noise import (
    MAX_ENTRIES,
    MAX_ENTRIES_OF_ONE,
    NOISE_NAME,
    Sample,
    keep_noise,
    kept_noise,
    noise_key,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEY = noise_key(Sample.LAUNCH, {"host": "a", "payloads": [43008]})


def test_nothing_kept_is_nothing_known() -> None:
    assert kept_noise(KEY) is None


@pytest.mark.parametrize(
    ("kept", "usual"),
    [
        ([(0.01, 3), (0.02, 6)], 0.02),
        ([(0.02, 6), (0.01, 6)], 0.01),
        ([(0.012, 6), (0.30, 6), (0.010, 6), (0.011, 6)], 0.011),
        ([(0.30, 6), (0.01, 6)], 0.01),
    ],
    ids=["more freedom", "as much", "one disturbed", "the first disturbed"],
)
def test_noise_is_the_median_by_degrees_of_freedom(
    kept: Sequence[tuple[float, int]], usual: float
) -> None:
    for sd, df in kept:
        keep_noise(KEY, sd, df)
    assert kept_noise(KEY) == usual


@pytest.mark.parametrize(
    "facts",
    [{"host": "b", "payloads": [43008]}, {"host": "a", "payloads": [86016]}, {}],
    ids=["host", "payloads", "nothing"],
)
def test_noise_of_something_else_does_not_count(facts: Mapping[str, object]) -> None:
    keep_noise(KEY, 0.01, 3)
    assert kept_noise(noise_key(Sample.LAUNCH, facts)) is None
    assert kept_noise(noise_key(Sample.BOOT, {"host": "a", "payloads": [43008]})) is None


def test_key_does_not_depend_on_the_order_of_facts() -> None:
    assert noise_key(Sample.LAUNCH, {"payloads": [43008], "host": "a"}) == KEY


def test_old_findings_give_way_to_new_ones() -> None:
    keep_noise(KEY, 0.5, 100)
    for _ in range(MAX_ENTRIES_OF_ONE):
        keep_noise(KEY, 0.01, 1)
    assert kept_noise(KEY) == pytest.approx(0.01)


def test_file_does_not_grow_for_ever() -> None:
    path = state_dir() / NOISE_NAME
    keep_noise(KEY, 0.01, 1)
    document = json.loads(path.read_text())
    document["entries"] *= MAX_ENTRIES
    path.write_text(json.dumps(document))
    keep_noise(KEY, 0.01, 1)
    assert len(json.loads(path.read_text())["entries"]) == MAX_ENTRIES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": "nccltune.noise/9", "entries": []}',
        '{"schema": "nccltune.noise/1"}',
        '{"schema": "nccltune.noise/1", "entries": [{"key": "KEY", "sd": "x", "df": 1}, 7]}',
        '{"schema": "nccltune.noise/1", "entries": [{"key": "KEY", "sd": -1, "df": 1}]}',
        '{"schema": "nccltune.noise/1", "entries": [{"key": "KEY", "sd": 1, "df": 0}]}',
        '{"schema": "nccltune.noise/1", "entries": [{"key": "KEY", "sd": true, "df": 1}]}',
        '{"schema": "nccltune.noise/1", "entries": [{"key": "KEY", "sd": 1e999, "df": 1}]}',
    ],
)
def test_broken_file_says_nothing_and_is_replaced(text: str) -> None:
    (state_dir() / NOISE_NAME).write_text(text.replace("KEY", KEY))
    assert kept_noise(KEY) is None
    keep_noise(KEY, 0.01, 2)
    assert kept_noise(KEY) == pytest.approx(0.01)


@pytest.mark.parametrize(("sd", "df"), [(math.nan, 1), (-0.1, 1), (math.inf, 2), (0.1, 0)])
def test_no_spread_is_refused(sd: float, df: int) -> None:
    with pytest.raises(ValueError, match="no spread"):
        keep_noise(KEY, sd, df)
