from __future__ import annotations

import math
import random
import statistics

import pytest

from nccltune.measurement import Launch, Outcome, PayloadMeasurement
from nccltune.payloads.derive import default_workload, workload_from_payloads
from nccltune.payloads.workload import Batch, Guard, Payload, Workload
from nccltune.search.objective import (
    BEST_CASE_RATIO,
    GUARD_POINT_RATIO,
    HOPELESS_RATIO,
    SHARED_GPU_GUARD_BYTES,
    GuardState,
    Objective,
    log_noise,
    pooled_medians,
)

GUARDS = (14336, 1376256, 67108864)
SCORED = (43008, 86016, 172032, 344064)
SIZES = (*GUARDS, *SCORED)
DEFAULT = Objective(default_workload())
FLAT = dict.fromkeys(SIZES, 10.0)


def drawn_workload(rng: random.Random) -> Workload:
    """Batches of one to three payloads, and guards, at sizes that may coincide."""
    sizes = [1 << power for power in range(12, 24)]
    batches = tuple(
        Batch(
            size=idx + 1,
            padded_size=idx + 1,
            use=rng.uniform(0.1, 10.0),
            payloads=tuple(
                Payload(size, rng.randint(1, 200), rng.randint(1, 200), "given")
                for size in rng.sample(sizes, rng.randint(1, 3))
            ),
        )
        for idx in range(rng.randint(1, 4))
    )
    guards = tuple(Guard(size, 4, "given") for size in rng.sample(sizes, rng.randint(0, 2)))
    return Workload("drawn", batches, guards)


def drawn_times(rng: random.Random, objective: Objective) -> dict[int, float]:
    """A time for every payload of the workload."""
    return {request.size_bytes: rng.uniform(5.0, 500.0) for request in objective.requests}


@pytest.fixture(params=range(25))
def drawn(request: pytest.FixtureRequest) -> tuple[random.Random, Objective]:
    rng = random.Random(request.param)
    return rng, Objective(drawn_workload(rng))


def scaled(times: dict[int, float], factor: float) -> dict[int, float]:
    return {size: factor * us for size, us in times.items()}


def score(objective: Objective, candidate: dict[int, float], baseline: dict[int, float]) -> float:
    return math.exp(objective.log_score(candidate, baseline))


def test_score_of_equal_launches_is_one(drawn: tuple[random.Random, Objective]) -> None:
    rng, objective = drawn
    times = drawn_times(rng, objective)

    assert score(objective, times, times) == pytest.approx(1.0, abs=1e-12)
    assessment = objective.assess(times, times, {})
    assert assessment.score_ratio == pytest.approx(1.0, abs=1e-12)
    assert assessment.guard is GuardState.HELD
    assert assessment.violation <= 0.0


def test_score_scales_with_all_times(drawn: tuple[random.Random, Objective]) -> None:
    rng, objective = drawn
    ours, theirs = drawn_times(rng, objective), drawn_times(rng, objective)
    factor = rng.uniform(0.2, 5.0)
    before = score(objective, ours, theirs)

    assert score(objective, scaled(ours, factor), theirs) == pytest.approx(factor * before)
    assert score(objective, ours, scaled(theirs, factor)) == pytest.approx(before / factor)
    assert score(objective, scaled(ours, factor), scaled(theirs, factor)) == pytest.approx(before)


def test_score_of_swapped_launches_is_the_reciprocal(
    drawn: tuple[random.Random, Objective],
) -> None:
    rng, objective = drawn
    ours, theirs = drawn_times(rng, objective), drawn_times(rng, objective)

    assert score(objective, ours, theirs) * score(objective, theirs, ours) == pytest.approx(1.0)


def test_score_falls_with_any_scored_time_and_ignores_guards(
    drawn: tuple[random.Random, Objective],
) -> None:
    rng, objective = drawn
    times = drawn_times(rng, objective)
    for size in times:
        faster = score(objective, {**times, size: 0.9 * times[size]}, times)
        if size in objective.weights:
            assert faster < 1.0 - 1e-9
        else:
            assert faster == pytest.approx(1.0, abs=1e-12)


def test_weights_sum_to_one(drawn: tuple[random.Random, Objective]) -> None:
    _, objective = drawn

    assert sum(objective.weights.values()) == pytest.approx(1.0)
    assert all(weight > 0.0 for weight in objective.weights.values())


def test_weights_are_the_slope_of_the_score_where_all_times_are_equal(
    drawn: tuple[random.Random, Objective],
) -> None:
    _, objective = drawn
    flat = {request.size_bytes: 10.0 for request in objective.requests}
    for size, weight in objective.weights.items():
        nudged = {**flat, size: 10.0 * math.exp(1e-6)}
        assert objective.log_score(nudged, flat) / 1e-6 == pytest.approx(weight, rel=1e-4)


def test_requests_cover_scored_payloads_by_weight_then_guards_by_size() -> None:
    requests = DEFAULT.requests

    assert [request.size_bytes for request in requests] == [
        43008,
        86016,
        344064,
        172032,
        67108864,
        1376256,
        14336,
    ]
    assert {request.size_bytes: request.graph_count for request in requests} == {
        **dict.fromkeys((*SCORED, 14336, 1376256), 123),
        67108864: 4,
    }


def test_weights_of_the_default_workload_follow_the_uses() -> None:
    assert DEFAULT.weights == pytest.approx({43008: 0.5, 86016: 0.25, 172032: 0.125, 344064: 0.125})
    assert DEFAULT.guard_sizes == GUARDS


def test_score_weighs_payloads_of_one_batch_by_their_time() -> None:
    objective = Objective(workload_from_payloads([(43008, 100), (86016, 100)], guards=()))
    baseline = {43008: 10.0, 86016: 30.0}

    halved = score(objective, {43008: 5.0, 86016: 30.0}, baseline)

    assert halved == pytest.approx((5.0 + 30.0) / 40.0)


def test_score_is_the_geometric_mean_over_batches_by_use() -> None:
    faster = {**FLAT, 43008: 8.0, 86016: 5.0}

    expected = math.exp(0.5 * math.log(0.8) + 0.25 * math.log(0.5))
    assert score(DEFAULT, faster, FLAT) == pytest.approx(expected)


def test_objective_on_a_shared_gpu_asks_for_little() -> None:
    objective = Objective(default_workload(), is_shared_gpu=True)

    assert objective.guard_sizes == (14336,)
    assert all(size <= SHARED_GPU_GUARD_BYTES for size in objective.guard_sizes)
    assert all(
        request.graph_count <= 3 and request.replay_count <= 3 for request in objective.requests
    )


def test_assess_incomplete_launch_takes_the_rest_as_unchanged() -> None:
    assessment = DEFAULT.assess({43008: 8.0}, FLAT, {})

    assert assessment.ratios == {43008: 0.8}
    assert assessment.score_ratio == pytest.approx(0.8**0.5)
    assert assessment.guard is GuardState.HELD
    assert assessment.violation == 0.0


@pytest.mark.parametrize(
    ("ratio", "noise", "state"),
    [
        (1.00, None, GuardState.HELD),
        (1.03, None, GuardState.HELD),
        (1.031, None, GuardState.BROKEN),
        (3.3, None, GuardState.BROKEN),
        (1.00, 0.01, GuardState.HELD),
        (1.03, 0.01, GuardState.HELD),
        (1.04, 0.01, GuardState.UNDECIDED),
        (1.06, 0.01, GuardState.BROKEN),
        (1.10, 0.04, GuardState.UNDECIDED),
        (1.20, 0.04, GuardState.BROKEN),
        (1.022, 0.0001, GuardState.BROKEN),
        (1.019, 0.0001, GuardState.HELD),
    ],
)
def test_assess_guard_allows_for_the_noise_that_is_known(
    ratio: float, noise: float | None, state: GuardState
) -> None:
    times = {**FLAT, 67108864: 10.0 * ratio}
    known = {} if noise is None else dict.fromkeys(SIZES, noise)

    assessment = DEFAULT.assess(times, FLAT, known)

    assert assessment.guard is state
    if state is GuardState.BROKEN:
        assert assessment.violation > 0.0
    if state is GuardState.HELD:
        assert assessment.violation <= 1e-12


def test_assess_guard_that_got_faster_leaves_room() -> None:
    assessment = DEFAULT.assess({**FLAT, **dict.fromkeys(GUARDS, 8.0)}, FLAT, {})

    assert assessment.violation == pytest.approx(0.8 - GUARD_POINT_RATIO)


def test_assess_worst_guard_counts() -> None:
    times = {**FLAT, 14336: 10.4, 1376256: 20.0}

    assessment = DEFAULT.assess(times, FLAT, dict.fromkeys(SIZES, 0.01))

    assert assessment.guard is GuardState.BROKEN
    assert assessment.violation > 0.9


def test_is_decided_when_a_guard_is_broken() -> None:
    assert DEFAULT.is_decided({67108864: 11.0}, FLAT, {})
    assert not DEFAULT.is_decided({67108864: 10.2}, FLAT, {})
    assert not DEFAULT.is_decided({67108864: 11.0}, FLAT, dict.fromkeys(SIZES, 0.04))


def test_is_decided_when_even_the_best_case_of_the_rest_is_hopeless() -> None:
    weight = DEFAULT.weights[43008]
    just_hopeless = (HOPELESS_RATIO / BEST_CASE_RATIO ** (1.0 - weight)) ** (1.0 / weight)

    assert DEFAULT.is_decided({43008: 10.0 * just_hopeless * 1.01}, FLAT, {})
    assert not DEFAULT.is_decided({43008: 10.0 * just_hopeless * 0.99}, FLAT, {})


def test_is_decided_never_for_what_is_no_slower(drawn: tuple[random.Random, Objective]) -> None:
    rng, objective = drawn
    baseline = drawn_times(rng, objective)
    measured: dict[int, float] = {}
    for request in objective.requests:
        measured[request.size_bytes] = rng.uniform(0.6, 1.0) * baseline[request.size_bytes]
        assert not objective.is_decided(measured, baseline, {})


def launches(*medians: float, size: int = 43008) -> list[Launch]:
    return [
        Launch({}, Outcome.OK, (PayloadMeasurement(size, median, None, None),))
        for median in medians
    ]


def test_pooled_medians_take_the_median_over_launches() -> None:
    assert pooled_medians(launches(9.0, 50.0, 10.0)) == {43008: 10.0}


def test_log_noise_is_the_spread_of_logs_and_needs_three_launches() -> None:
    some = launches(9.0, 10.0, 11.0)

    assert log_noise(some[:2]) == {}
    expected = statistics.stdev(map(math.log, (9.0, 10.0, 11.0)))
    assert log_noise(some) == {43008: pytest.approx(expected)}
