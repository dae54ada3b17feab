from __future__ import annotations

import math
import random

import pytest

from nccltune.verify.judging.accept_model import (
    AcceptPoint,
    AcceptSource,
    fit_accept_model,
    geometric_length,
)
from nccltune.verify.judging.cost_model import ArmPoint, CostModel, Refusal, fit_cost_model

PLAIN_MS, FIXED_MS, STEP_MS = 7.5, 9.0, 0.4


def line_ms(steps: int) -> float:
    return FIXED_MS + STEP_MS * steps if steps else PLAIN_MS


def positions(chance: float, steps: int, count: int = 10_000) -> tuple[int, ...]:
    """Steps that accepted exactly so many draft tokens, at one chance for each."""
    exact = [chance**idx * (1.0 - chance) for idx in range(steps)] + [chance**steps]
    return tuple(round(count * share) for share in exact)


def point(
    steps: int, *, chance: float = 0.7, ms: float | None = None, is_told: bool = True
) -> ArmPoint:
    mean_ms = line_ms(steps) if ms is None else ms
    return ArmPoint(
        arm=f"{steps}",
        num_steps=steps,
        ms_per_step=(mean_ms - 0.01, mean_ms + 0.01, mean_ms),
        accept_length=geometric_length(chance, steps) if steps else 1.0,
        accept_by_position=positions(chance, steps) if steps and is_told else (),
    )


def fitted(*points: ArmPoint, is_simulated: bool = False) -> CostModel:
    model = fit_cost_model(points, is_simulated=is_simulated)
    assert isinstance(model, CostModel), model
    return model


def true_best(chance: float, most: int) -> int:
    speed = {k: geometric_length(chance, k) / line_ms(k) for k in range(most + 1)}
    return max(speed, key=speed.__getitem__)


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("chance", [0.02, 0.2, 0.4, 0.55, 0.7, 0.9])
def test_fit_arms_find_the_line_and_the_best_number_of_steps(
    chance: float, *, is_told: bool
) -> None:
    points = [point(k, chance=chance, is_told=is_told) for k in (0, 1, 3, 8)]
    model = fitted(*points)

    assert model.fixed_ms == pytest.approx(FIXED_MS)
    assert model.per_step_ms == pytest.approx(STEP_MS)
    assert model.speculation_ms == pytest.approx(FIXED_MS - PLAIN_MS)
    assert model.misfit_pct < 0.01
    assert model.best.num_steps == true_best(chance, 8)
    assert [one.num_steps for one in model.estimates] == list(range(9))
    for one in model.estimates:
        exact = 1e3 * geometric_length(chance, one.num_steps) / line_ms(one.num_steps)
        assert one.tok_s == pytest.approx(exact, rel=1e-3)
        assert one.is_measured == (one.num_steps in (0, 1, 3, 8))
        assert one.tok_s_low is not None
        assert one.tok_s_high is not None
        assert one.tok_s_low <= one.tok_s <= one.tok_s_high


def test_fit_costly_draft_steps_speak_for_plain_decoding() -> None:
    points = [point(k, chance=0.3, ms=10.0 + 5.0 * k) for k in (0, 2, 5)]
    model = fitted(*points)

    assert model.best.num_steps == 0
    assert model.contenders == ()
    assert model.sentence.startswith("plain decoding would serve fastest: 100.0 tok/s")


def test_fit_two_arms_leave_the_line_unchecked_and_give_no_interval_between() -> None:
    model = fitted(point(2), point(5))

    assert model.spare_arm_count == 0
    between = model.at(3)
    assert between is not None
    assert between.tok_s_low is None
    measured = model.at(5)
    assert measured is not None
    assert measured.tok_s_low is not None
    assert any("nothing checks it" in note for note in model.notes)
    # With neither a check nor an interval, whatever comes near the best is not told from it.
    near = {one.num_steps for one in model.estimates if one.tok_s >= 0.95 * model.best.tok_s}
    assert near - {model.best.num_steps} <= set(model.contenders)


def test_fit_never_reaches_beyond_the_arms_measured() -> None:
    model = fitted(point(2), point(5))

    assert [one.num_steps for one in model.estimates] == [2, 3, 4, 5]
    assert model.at(0) is None
    assert model.at(6) is None
    assert "fewer than 2 and more than 5 steps were not measured: no guess" in model.notes


@pytest.mark.parametrize("points", [(), (point(2),), (point(2), point(2)), (point(0), point(5))])
def test_fit_one_number_of_steps_is_refused(points: tuple[ArmPoint, ...]) -> None:
    refusal = fit_cost_model(points)

    assert isinstance(refusal, Refusal)
    assert "two arms that speculate" in refusal.reason


def test_fit_plain_decoding_is_no_point_of_the_line() -> None:
    model = fitted(point(0), point(2), point(5))

    plain = model.at(0)
    assert plain is not None
    assert plain.ms_per_step == pytest.approx(PLAIN_MS)
    assert model.misfit_pct < 0.01
    one = model.at(1)
    assert one is not None
    assert one.ms_per_step == pytest.approx(line_ms(1))
    assert one.tok_s_low is None  # below the arms that make the line


def test_fit_steps_that_cost_nothing_are_refused() -> None:
    refusal = fit_cost_model([point(2, ms=10.0), point(5, ms=9.9)])

    assert isinstance(refusal, Refusal)
    assert "-0.03 ms a draft step" in refusal.reason


def test_fit_arm_off_the_line_is_told_and_widens_what_was_not_measured() -> None:
    straight = fitted(point(0), point(1), point(2), point(5))
    bent = fitted(point(0), point(1, ms=7.9), point(2), point(5))

    assert bent.misfit_pct > 2.0
    assert any(f"{bent.misfit_pct:.1f} % off" in note for note in bent.notes)

    def width(model: CostModel, steps: int) -> float:
        one = model.at(steps)
        assert one is not None
        assert one.tok_s_low is not None
        assert one.tok_s_high is not None
        return one.tok_s_high - one.tok_s_low

    assert width(bent, 3) > 3.0 * width(straight, 3)
    first = bent.at(1)
    assert first is not None
    assert first.ms_per_step == pytest.approx(7.9)  # what was measured stays as it is


def test_fit_one_boot_an_arm_has_no_interval() -> None:
    points = [ArmPoint(str(k), k, (line_ms(k),), geometric_length(0.7, k)) for k in (0, 2, 5)]
    model = fitted(*points)

    assert model.df == 0
    assert all(one.tok_s_low is None for one in model.estimates)
    assert "one boot an arm says nothing of its own noise" in model.notes


def test_fit_noisy_arms_cannot_be_told_apart() -> None:
    noise = (-2.0, 2.0, 0.0)
    points = [
        ArmPoint(str(k), k, tuple(line_ms(k) + n for n in noise), geometric_length(0.5, k))
        for k in (1, 2, 3)
    ]
    model = fitted(*points)

    assert {model.best.num_steps, *model.contenders} == {1, 2, 3}


def test_fit_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    source = random.Random(3)
    hits = 0
    for _ in range(300):
        points = [
            ArmPoint(
                str(k),
                k,
                tuple(line_ms(k) + 0.1 * source.gauss(0.0, 1.0) for _ in range(4)),
                geometric_length(0.7, k) if k else 1.0,
                positions(0.7, k) if k else (),
            )
            for k in (0, 2, 5)
        ]
        one = fitted(*points).at(2)
        assert one is not None
        assert one.tok_s_low is not None
        assert one.tok_s_high is not None
        hits += one.tok_s_low <= 1e3 * geometric_length(0.7, 2) / line_ms(2) <= one.tok_s_high
    # 95 % and what counting the accepted tokens adds; four standard errors below.
    assert hits >= 300 * 0.95 - 4.0 * math.sqrt(300 * 0.95 * 0.05)


def test_fit_simulated_acceptance_is_said_with_the_best() -> None:
    arms = [
        ArmPoint("2", 2, (10.0, 10.1), 2.0, (0, 250)),
        ArmPoint("5", 5, (11.0, 11.1), 2.0, (0, 250)),
    ]
    model = fitted(*arms, is_simulated=True)

    assert model.best.num_steps == 2
    assert [one.accept_length for one in model.estimates] == [2.0] * 4
    assert model.sentence.endswith("for the acceptance that was set, and no other")


def test_accept_counts_of_the_deepest_arm_answer_for_shallower_ones() -> None:
    deep = AcceptPoint(3, 2.0, (400, 300, 200, 100))
    model = fit_accept_model([AcceptPoint(1, 1.6, (400, 600)), deep], is_simulated=False)

    length, half = model.at(2)
    # 300 steps took one draft token, 300 would have taken two.
    assert length == pytest.approx(1.0 + 0.3 + 2 * 0.3)
    assert 0.0 < half < 0.1
    assert model.at(3)[0] == 2.0
    assert model.at(1)[0] == 1.6


def test_accept_unequal_chances_are_read_by_position_and_missed_by_one_chance() -> None:
    by_position = (100, 700, 100, 50, 30, 20)
    length = 1.0 + sum(idx * n for idx, n in enumerate(by_position)) / 1000
    told = fit_accept_model(
        [AcceptPoint(0, 1.0), AcceptPoint(5, length, by_position)], is_simulated=False
    )
    silent = fit_accept_model([AcceptPoint(0, 1.0), AcceptPoint(5, length)], is_simulated=False)

    assert told.at(1)[0] == pytest.approx(1.9)
    assert silent.at(1)[0] < 1.7
    assert math.isinf(silent.at(1)[1])


@pytest.mark.parametrize(
    "measured",
    [
        {2: 2.0, 5: 2.0},
        {1: 1.9, 5: 1.95, 8: 3.5},
        {0: 1.0, 1: 1.2, 4: 3.9, 9: 4.0},
        {2: 2.04, 5: 2.0},  # by noise
    ],
)
def test_accept_fitted_length_stays_between_those_measured_on_both_sides(
    measured: dict[int, float],
) -> None:
    points = [AcceptPoint(steps, length) for steps, length in measured.items()]
    model = fit_accept_model(points, is_simulated=False)

    assert model.source is AcceptSource.GEOMETRIC
    for steps in range(min(measured), max(measured) + 1):
        shorter = measured[max(k for k in measured if k <= steps)]
        longer = measured[min(k for k in measured if k >= steps)]
        assert min(shorter, longer) <= model.at(steps)[0] <= max(shorter, longer), steps
    assert all(model.at(steps)[0] == length for steps, length in measured.items())


def test_fit_more_steps_that_are_accepted_no_further_are_not_recommended() -> None:
    arms = [ArmPoint(str(k), k, (9.0 + 0.05 * k, 9.0 + 0.05 * k + 0.01), 2.0) for k in (2, 5)]
    model = fitted(*arms)

    assert [one.accept_length for one in model.estimates] == [2.0] * 4
    assert model.best.num_steps == 2


@pytest.mark.parametrize(
    ("set_lengths", "expected"),
    [
        ({2: 3.0, 6: 3.0}, [1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]),
        ({2: 2.0, 5: 3.5}, [1.0, 2.0, 2.0, 2.5, 3.0, 3.5]),
    ],
)
def test_accept_lengths_that_were_set_are_joined_and_never_above_what_is_proposed(
    set_lengths: dict[int, float], expected: list[float]
) -> None:
    points = [AcceptPoint(0, 1.0), *(AcceptPoint(k, length) for k, length in set_lengths.items())]
    model = fit_accept_model(points, is_simulated=True)

    assert [model.at(k)[0] for k in range(len(expected))] == expected
