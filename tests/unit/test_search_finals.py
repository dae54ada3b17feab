"""Which candidate is proven in the end, on a bench whose times follow from a rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.cli.search_data import SavedProfile, search_data
from nccltune.measurement import Outcome
from nccltune.payloads.derive import default_workload
from nccltune.search.engine import SearchPlan, run_search
from nccltune.search.objective import Objective
from nccltune.search.result import Progress, SearchResult, Verdict
from tests.support.model_bench import Effect, ModelBench, base_us
from tests.support.studies import FACTS, OBJECTIVE

if TYPE_CHECKING:
    from nccltune.measurement import Settings

FASTEST, SAFE = {"NCCL_NTHREADS": "128"}, {"NCCL_MAX_CTAS": "32"}
PLAN = SearchPlan(workload=default_workload(), facts=FACTS)
GUARD = OBJECTIVE.guard_sizes[-1]


class Quiet:
    """Follows a search and says nothing."""

    def update(self, progress: Progress) -> None:
        """Take no note."""


def search(bench: ModelBench, path: Path, *candidates: Settings) -> SearchResult:
    plan = dataclasses.replace(PLAN, extra_candidates=candidates, trial_count=1 + len(candidates))
    return run_search(plan, bench, path / "one.journal", is_resume=False, observer=Quiet())


def guard_of_the_fastest(ratio: float) -> Effect:
    """Two candidates that pay; the faster one changes a guard."""

    def effect(settings: Settings, size_bytes: int) -> float:
        if settings.items() >= FASTEST.items():
            return ratio if size_bytes == GUARD else 0.90
        return 0.92 if settings.items() >= SAFE.items() and size_bytes != GUARD else 1.0

    return effect


def test_fastest_candidate_is_proven(tmp_path: Path) -> None:
    result = search(ModelBench(guard_of_the_fastest(1.0)), tmp_path, SAFE, FASTEST)

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == FASTEST


def test_candidate_whose_guard_may_be_rejected_comes_behind_the_others(tmp_path: Path) -> None:
    result = search(ModelBench(guard_of_the_fastest(1.015)), tmp_path, SAFE, FASTEST)

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == SAFE


def test_second_candidate_is_proven_when_the_first_fails_its_duel(tmp_path: Path) -> None:
    """Launched four times more: twice measured again in turn, then in the duel."""
    bench = ModelBench(guard_of_the_fastest(1.0))
    whole = bench.effect

    def effect(settings: Settings, size_bytes: int) -> float:
        count = sum(one == FASTEST for one in bench.launches)
        return 1.1 if settings == FASTEST and count > 3 else whole(settings, size_bytes)

    bench.effect = effect
    result = search(bench, tmp_path, SAFE, FASTEST)

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == SAFE


def test_winner_and_baseline_have_their_all_gathers_timed(tmp_path: Path) -> None:
    result = search(ModelBench(guard_of_the_fastest(1.0)), tmp_path, FASTEST)

    sizes = [request.size_bytes for request in OBJECTIVE.gather_requests]
    assert [row.size_bytes for row in result.gathers] == sizes
    assert {40960, 122880, 983040} <= set(sizes)
    for row in result.gathers:
        assert row.baseline_us == base_us(row.size_bytes)
        assert row.tuned_us == 0.90 * base_us(row.size_bytes)
    rows = search_data(result, SavedProfile(), workload="w", next_command="")["gathers"]
    assert isinstance(rows, list)
    assert [row["bytes"] for row in rows] == sizes


@pytest.mark.parametrize("endings", [(Outcome.WRONG_DATA,), (Outcome.OK, Outcome.HOST_BUSY)])
def test_no_all_gather_is_told_where_one_arm_has_none(
    tmp_path: Path, endings: tuple[Outcome, ...]
) -> None:
    bench = ModelBench(guard_of_the_fastest(1.0), collectives=endings)

    assert search(bench, tmp_path, FASTEST).gathers == ()


def test_ranks_that_share_a_gpu_time_no_all_gather() -> None:
    assert Objective(default_workload(), is_shared_gpu=True).gather_requests == ()


def test_idle_settings_are_gone_before_ablation(tmp_path: Path) -> None:
    bench = ModelBench(guard_of_the_fastest(1.0))
    idle = {"NCCL_BUFFSIZE": "1048576"}
    both = {**FASTEST, **idle}
    result = search(bench, tmp_path, both, idle, FASTEST)

    assert result.settings == FASTEST
    assert bench.launches.count(both) == 1
