"""A host's noise goes from one search to the next, for the same host and payloads alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nccltune.cli.search_noise import keep_search_noise, known_noise
from nccltune.cli.sources import Source
from nccltune.cli.workload import Demand
from nccltune.payloads.derive import default_workload
from nccltune.search.result import Interval, SearchResult, Verdict
from tests.support.hosts import REPOSITORY
from tests.support.model_bench import ModelBench
from tests.support.studies import FACTS

if TYPE_CHECKING:
    from pathlib import Path

DEMAND = Demand(default_workload(), tp=2)
SOURCE = Source(ModelBench(lambda _settings, _size: 1.0), "2x-h200", FACTS, {"host": "a"})


def found(noise: float | None, count: int) -> SearchResult:
    return SearchResult(
        verdict=Verdict.KEEP_DEFAULT,
        sentence="",
        settings={},
        score_ratio=1.0,
        score_interval=Interval(1.0, 1.0, ""),
        payloads=(),
        trial_count=count,
        duration_s=1.0,
        source="gpus",
        outcome_counts={},
        baseline_noise=noise,
        baseline_count=count,
    )


def test_noise_of_a_search_is_known_to_the_next() -> None:
    assert known_noise(SOURCE, DEMAND) is None
    assert keep_search_noise(found(0.013, 8), SOURCE, DEMAND) == ()
    assert known_noise(SOURCE, DEMAND) == pytest.approx(0.013)
    assert known_noise(replace(SOURCE, identity={"host": "b"}), DEMAND) is None


@pytest.mark.parametrize(("noise", "count"), [(None, 2), (0.01, 1)])
def test_too_few_baselines_say_nothing(noise: float | None, count: int) -> None:
    assert keep_search_noise(found(noise, count), SOURCE, DEMAND) == ()
    assert known_noise(SOURCE, DEMAND) is None


def test_whole_search_keeps_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.support.standin_cli", "search", "--trials", "30"],
        cwd=REPOSITORY,
        env={**os.environ, "STANDIN_GPUS": "2", "NCCLTUNE_HOME": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert '"key": "launch:' in (tmp_path / "noise.json").read_text()
