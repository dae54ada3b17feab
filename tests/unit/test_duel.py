from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from nccltune.block_rule import BlockRule
from nccltune.measurement import Launch, Outcome, Settings
from nccltune.search.duel import run_duel
from nccltune.search.result import Verdict
from tests.support.noisy_bench import GUARD_SIZE, REQUESTS, NoisyBench, PlainObjective, scaled

CANDIDATE = {"NCCL_NTHREADS": "512"}
OBJECTIVE = PlainObjective()


def faster(settings: Settings) -> Mapping[int, float]:
    return scaled(0.8 if settings else 1.0)


def fast_but_slow_guard(settings: Settings) -> Mapping[int, float]:
    return scaled(0.8, 1.2) if settings else {}


def guard_in_between(settings: Settings) -> Mapping[int, float]:
    return scaled(0.5, 1.035) if settings else {}


def test_run_duel_faster_candidate_improves() -> None:
    bench = NoisyBench(faster, noise=0.02)

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.IMPROVED
    assert report.interval.low < 0.8 < report.interval.high < 1.0
    assert report.guards[GUARD_SIZE].high < 1.05
    assert report.launch_count == len(bench.launches) == 4 * report.block_count
    assert "ABBA" in report.interval.method


def test_run_duel_launches_in_abba_order() -> None:
    bench = NoisyBench(faster, noise=0.01)

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert bench.launches == [{}, CANDIDATE, CANDIDATE, {}] * report.block_count


def test_run_duel_starts_from_the_baseline_it_is_given() -> None:
    pinned = {"NCCL_SOCKET_IFNAME": "lo"}
    bench = NoisyBench(noise=0.01)

    run_duel(bench, {**pinned, **CANDIDATE}, REQUESTS, OBJECTIVE, baseline=pinned)

    assert bench.launches[0] == pinned


def test_run_duel_linear_drift_does_not_look_like_an_effect() -> None:
    bench = NoisyBench(noise=0.001, drift=0.01)

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.KEEP_DEFAULT
    assert report.score_ratio == pytest.approx(1.0, abs=0.005)


def test_run_duel_equal_candidate_keeps_default() -> None:
    report = run_duel(NoisyBench(noise=0.002), CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.KEEP_DEFAULT
    assert report.message == "no gain worth having"


def test_run_duel_slower_candidate_keeps_default() -> None:
    bench = NoisyBench(lambda settings: scaled(1.3 if settings else 1.0), noise=0.02)

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.KEEP_DEFAULT
    assert "slower" in report.message


def test_run_duel_slower_guard_keeps_default_and_names_it() -> None:
    report = run_duel(NoisyBench(fast_but_slow_guard, noise=0.02), CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.KEEP_DEFAULT
    assert report.rejected_guards == (GUARD_SIZE,)
    assert str(GUARD_SIZE) in report.message


def test_run_duel_open_guard_is_measured_more_and_then_inconclusive() -> None:
    bench = NoisyBench(guard_in_between, noise=0.1)
    rule = BlockRule(looks=(2, 3, 4), levels=(0.01, 0.02, 0.02))

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE, rule=rule)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.block_count == 4
    assert report.interval.high < 1.0
    assert "undecided" in report.message


def test_run_duel_noise_floor_asks_for_more_blocks() -> None:
    few = run_duel(NoisyBench(faster, noise=0.005), CANDIDATE, REQUESTS, OBJECTIVE)
    many = run_duel(NoisyBench(faster, noise=0.005), CANDIDATE, REQUESTS, OBJECTIVE, noise=0.1)

    assert many.block_count > few.block_count


@pytest.mark.parametrize(
    "outcome",
    [Outcome.CRASHED, Outcome.TIMEOUT, Outcome.WRONG_DATA, Outcome.REJECTED, Outcome.UNSUPPORTED],
)
def test_run_duel_failing_candidate_keeps_default(outcome: Outcome) -> None:
    bench = NoisyBench(faster, noise=0.02, outcomes={1: outcome})

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.KEEP_DEFAULT
    assert report.launch_count == 2
    assert str(outcome) in report.message
    assert "candidate" in report.message


@pytest.mark.parametrize("at", [0, 1, 3], ids=["baseline", "candidate", "last"])
def test_run_duel_host_fault_once_is_retried(at: int) -> None:
    bench = NoisyBench(faster, noise=0.02, outcomes={at: Outcome.HOST_BUSY})

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.IMPROVED
    assert report.launch_count == 4 * report.block_count + 1


def test_run_duel_failing_baseline_twice_is_inconclusive() -> None:
    bench = NoisyBench(faster, noise=0.02, outcomes={4: Outcome.CRASHED, 5: Outcome.CRASHED})

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "baseline" in report.message
    assert report.block_count == 1


def test_run_duel_host_fault_twice_is_inconclusive() -> None:
    faults = {1: Outcome.HOST_FAILED, 2: Outcome.HOST_FAILED}
    bench = NoisyBench(faster, noise=0.02, outcomes=faults)

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE)

    assert report.verdict is Verdict.INCONCLUSIVE


def test_run_duel_without_time_launches_nothing() -> None:
    bench = NoisyBench(faster)

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE, deadline=lambda: True)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert (report.launch_count, bench.launches) == (0, [])
    assert (report.interval.low, report.interval.high) == (0.0, math.inf)


def test_run_duel_at_the_deadline_decides_by_what_it_has() -> None:
    bench = NoisyBench(faster, noise=0.01)
    rule = BlockRule(looks=(12,), levels=(0.05,))

    report = run_duel(
        bench, CANDIDATE, REQUESTS, OBJECTIVE, rule=rule, deadline=lambda: len(bench.launches) >= 12
    )

    assert report.block_count == 3
    assert report.verdict is Verdict.IMPROVED


def test_run_duel_tells_every_launch() -> None:
    told: list[Launch] = []
    bench = NoisyBench(faster, noise=0.02, outcomes={0: Outcome.HOST_BUSY})

    report = run_duel(bench, CANDIDATE, REQUESTS, OBJECTIVE, on_launch=told.append)

    assert len(told) == report.launch_count
    assert told[0].outcome is Outcome.HOST_BUSY


def test_run_duel_baseline_against_itself_claims_at_most_at_the_stated_rate() -> None:
    improved = 0
    for seed in range(100):
        bench = NoisyBench(noise=0.03, seed=seed)
        report = run_duel(bench, {}, REQUESTS, OBJECTIVE)
        improved += report.verdict is Verdict.IMPROVED

    assert improved <= 100 * 0.025 + 4.0 * math.sqrt(100 * 0.025 * 0.975)


def test_run_duel_baseline_against_itself_failing_is_inconclusive() -> None:
    bench = NoisyBench(outcomes={1: Outcome.CRASHED, 2: Outcome.CRASHED})

    assert run_duel(bench, {}, REQUESTS, OBJECTIVE).verdict is Verdict.INCONCLUSIVE
