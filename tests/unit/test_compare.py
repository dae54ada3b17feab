from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import pytest

from nccltune.bench.compare import MIN_INTERVAL_PAIRS, compare
from nccltune.bench.nccl_log import NcclReport
from nccltune.measurement import Launch, Outcome, PayloadMeasurement, PayloadRequest, Settings
from nccltune.units import busbw_gb_s
from tests.support.model_bench import ModelBench, base_us

if TYPE_CHECKING:
    from nccltune.bench.launcher import GpuBench
    from nccltune.bench.report import BenchReport

THREADS = {"NCCL_NTHREADS": "128"}
REQUESTS = (PayloadRequest(67108864, 4), PayloadRequest(43008, 123))
BASELINE_REPORT = NcclReport(used={43008: "tree LL, 1 channel"})


def effect(settings: Settings, size_bytes: int) -> float:
    """Faster at 43008 B, slower above."""
    if not settings:
        return 1.0
    return 0.9 if size_bytes == 43008 else 1.2


def compared(bench: ModelBench, launches_per_arm: int = 4, **options: object) -> BenchReport:
    return compare(
        cast("GpuBench", bench),
        "mine",
        THREADS,
        REQUESTS,
        launches_per_arm=launches_per_arm,
        world_size=8,
        baseline_report=BASELINE_REPORT,
        **options,  # type: ignore[arg-type]
    )


def test_compare_launches_both_arms_in_turns() -> None:
    bench = ModelBench(effect)
    seen: list[tuple[int, int, Settings]] = []
    report = compared(
        bench, on_launch=lambda idx, total, launch: seen.append((idx, total, launch.settings))
    )

    order = [{}, THREADS, THREADS, {}] * 2
    assert bench.launches == order
    assert seen == [(idx, 8, settings) for idx, settings in enumerate(order)]
    assert report.launch_count == 8
    assert (report.outcome, report.message) == (Outcome.OK, "")
    assert (report.name, report.settings) == ("mine", THREADS)


def test_compare_puts_every_payload_side_by_side_smallest_first() -> None:
    report = compared(ModelBench(effect))

    assert [row.size_bytes for row in report.rows] == [43008, 67108864]
    for row, ratio in zip(report.rows, (0.9, 1.2), strict=True):
        us = base_us(row.size_bytes)
        assert row.baseline.median_us == pytest.approx(us)
        assert row.baseline.p10_us == pytest.approx(0.99 * us)
        assert row.candidate is not None
        assert row.candidate.median_us == pytest.approx(ratio * us)
        assert row.ratio == pytest.approx(ratio)
        assert row.baseline_busbw_gb_s == pytest.approx(busbw_gb_s(row.size_bytes, us, 8))
        assert row.busbw_gb_s == pytest.approx(row.baseline_busbw_gb_s / ratio)
        assert row.is_data_ok
        assert row.used == "ring LL, 4 channels"
    assert [row.baseline_used for row in report.rows] == ["tree LL, 1 channel", ""]


@pytest.mark.parametrize("launches_per_arm", [1, 2, 3, 6])
def test_compare_gives_an_interval_only_for_enough_pairs(launches_per_arm: int) -> None:
    report = compared(ModelBench(effect, noise=0.01), launches_per_arm)

    assert bool(report.interval_method) is (launches_per_arm >= MIN_INTERVAL_PAIRS)
    for row in report.rows:
        assert row.ratio is not None
        if launches_per_arm < MIN_INTERVAL_PAIRS:
            assert (row.ratio_low, row.ratio_high) == (None, None)
        else:
            assert row.ratio_low is not None
            assert row.ratio_high is not None
            assert row.ratio_low < row.ratio < row.ratio_high


def test_compare_interval_comes_from_neighbours_so_that_drift_cancels() -> None:
    launches: list[None] = []

    def drifting(settings: Settings, size_bytes: int) -> float:
        launches.append(None)
        return effect(settings, size_bytes) * 1.5 ** ((len(launches) - 1) // 4)

    (row, _) = compared(ModelBench(drifting), 4).rows

    assert row.ratio == pytest.approx(0.9)
    assert row.ratio_high is not None
    assert row.ratio_high == pytest.approx(0.9)


def test_compare_covers_every_truth_at_once_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        rows = compared(ModelBench(effect, noise=0.02, seed=seed)).rows
        covered += all(
            (row.ratio_low or 1.0) < ratio < (row.ratio_high or 0.0)
            for row, ratio in zip(rows, (0.9, 1.2), strict=True)
        )

    assert 0.90 <= covered / 200 <= 0.99


@pytest.mark.parametrize("outcome", [one for one in Outcome if one is not Outcome.OK])
def test_compare_candidate_that_fails_ends_it_and_keeps_what_was_measured(
    outcome: Outcome,
) -> None:
    bench = ModelBench(effect, endings={5: outcome})
    report = compared(bench)

    assert len(bench.launches) == 6
    assert report.outcome is outcome
    assert report.message == f"it ended {outcome}"
    assert report.launch_count == 5
    assert report.rows[0].ratio == pytest.approx(0.9)
    assert report.rows[0].used == ""


def test_compare_candidate_that_never_runs_leaves_the_baseline_alone() -> None:
    report = compared(ModelBench(endings={1: Outcome.REJECTED}))

    assert report.outcome is Outcome.REJECTED
    for row in report.rows:
        assert (row.candidate, row.ratio, row.busbw_gb_s) == (None, None, None)
        assert row.baseline.median_us == pytest.approx(base_us(row.size_bytes))


def test_compare_baseline_that_fails_is_not_blamed_on_the_candidate() -> None:
    first = compared(ModelBench(endings={0: Outcome.HOST_FAILED}))
    later = compared(ModelBench(effect, endings={3: Outcome.TIMEOUT}))

    assert first.outcome is Outcome.HOST_FAILED
    assert first.message == "the baseline itself: it ended host_failed"
    assert first.rows == ()
    assert later.message == "the baseline itself: it ended timeout"
    assert len(later.rows) == 2


def test_compare_wrong_data_is_shown_at_its_payload() -> None:
    class Wrong(ModelBench):
        def launch(self, settings: Settings, requests: object, **_: object) -> Launch:
            launch = super().launch(settings, REQUESTS)
            if not settings:
                return launch
            bad = PayloadMeasurement.from_samples(67108864, (9.0,), is_data_ok=False)
            return Launch(settings, Outcome.WRONG_DATA, (bad,), "wrong data")

    report = compared(Wrong())

    assert report.outcome is Outcome.WRONG_DATA
    assert [row.is_data_ok for row in report.rows] == [True, False]


def test_compare_phases_are_means_over_the_candidates_launches() -> None:
    class Phased(ModelBench):
        def launch(self, settings: Settings, requests: object, **_: object) -> Launch:
            launch = super().launch(settings, REQUESTS)
            phases_s = {"start": float(len(self.launches)) if settings else 100.0}
            return Launch(settings, Outcome.OK, launch.payloads, phases_s=phases_s)

    report = compared(Phased(), 2)

    assert report.phases_s == {"start": 2.5}
    assert math.isfinite(report.duration_s)
