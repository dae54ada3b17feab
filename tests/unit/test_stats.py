from __future__ import annotations

import math
import random
import statistics

import pytest

from nccltune.stats import (
    aa_noise,
    geometric_mean,
    interval_from_baseline_spread,
    student_t_quantile,
    t_interval,
)

# Closed forms: df 1 is tan(pi (p - 1/2)), df 2 is (2p - 1) / sqrt(2 p (1 - p)); for df 4 see the
# test below. The others are the entries of the usual printed tables, to their last digit.
TABLE = [
    (0.975, 3, 3.182, 5e-4),
    (0.995, 3, 5.841, 5e-4),
    (0.975, 5, 2.571, 5e-4),
    (0.9995, 5, 6.869, 5e-4),
    (0.90, 10, 1.372, 5e-4),
    (0.975, 11, 2.201, 5e-4),
    (0.95, 30, 1.697, 5e-4),
    (0.975, 120, 1.980, 5e-4),
]


@pytest.mark.parametrize(("probability", "df", "value", "error"), TABLE)
def test_student_t_quantile_matches_printed_tables(
    probability: float, df: int, value: float, error: float
) -> None:
    assert student_t_quantile(probability, df) == pytest.approx(value, abs=error)


@pytest.mark.parametrize("probability", [0.001, 0.2, 0.5, 0.6, 0.9, 0.975, 0.999, 0.99999])
def test_student_t_quantile_equals_closed_forms(probability: float) -> None:
    p = probability
    root = math.sqrt(4.0 * p * (1.0 - p))
    of_df_1 = math.tan(math.pi * (p - 0.5))
    of_df_2 = (2.0 * p - 1.0) / math.sqrt(2.0 * p * (1.0 - p))
    of_df_4 = math.copysign(
        2.0 * math.sqrt(max(0.0, math.cos(math.acos(root) / 3.0) / root - 1.0)), p - 0.5
    )

    assert student_t_quantile(p, 1) == pytest.approx(of_df_1, rel=1e-8, abs=1e-8)
    assert student_t_quantile(p, 2) == pytest.approx(of_df_2, rel=1e-8, abs=1e-8)
    assert student_t_quantile(p, 4) == pytest.approx(of_df_4, rel=1e-8, abs=1e-8)


def test_student_t_quantile_of_many_degrees_approaches_normal() -> None:
    normal = statistics.NormalDist().inv_cdf(0.975)

    assert student_t_quantile(0.975, 1e6) == pytest.approx(normal, abs=1e-5)


def test_student_t_quantile_is_odd_about_one_half() -> None:
    assert student_t_quantile(0.01, 7) == pytest.approx(-student_t_quantile(0.99, 7), rel=1e-12)


@pytest.mark.parametrize(("probability", "df"), [(0.0, 3), (1.0, 3), (0.5, 0), (math.nan, 3)])
def test_student_t_quantile_outside_its_domain_refuses(probability: float, df: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        student_t_quantile(probability, df)


def test_geometric_mean_weights_ratios() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([0.5, 2.0], [3.0, 1.0]) == pytest.approx(0.5**0.5)


def test_geometric_mean_without_matching_weights_refuses() -> None:
    with pytest.raises(ValueError, match="weights"):
        geometric_mean([1.0, 2.0], [1.0])


def test_t_interval_covers_the_mean_as_often_as_stated() -> None:
    source = random.Random(7)
    covered = 0
    for _ in range(2000):
        low, high = t_interval([source.gauss(3.0, 1.0) for _ in range(4)])
        covered += low <= 3.0 <= high

    # 95 % of 2000, within four binomial standard deviations.
    assert abs(covered - 1900) < 4.0 * math.sqrt(2000 * 0.95 * 0.05)


def test_aa_noise_below_three_launches_is_none() -> None:
    assert aa_noise([1.0, 1.1]) is None
    assert aa_noise([1.0, 1.1, 0.9]) is not None


def test_aa_noise_of_normal_launches_is_their_spread() -> None:
    source = random.Random(3)
    found = [
        aa_noise([math.exp(source.gauss(0.0, 0.02)) for _ in range(8)]) or 0.0 for _ in range(2000)
    ]

    assert statistics.fmean(found) == pytest.approx(0.02, rel=0.10)


def test_aa_noise_with_one_disturbed_launch_stays_small() -> None:
    calm = [1.000, 1.010, 0.990, 1.005, 0.995, 1.008, 0.992]
    disturbed = [*calm, 1.5]

    assert (aa_noise(disturbed) or 1.0) < 2.0 * (aa_noise(calm) or 0.0)


def test_aa_noise_of_groups_compares_nothing_between_them() -> None:
    groups = ([1.0, 1.01, 0.99], [5.0, 5.05, 4.95])

    assert aa_noise(*groups) == pytest.approx(aa_noise(groups[0]))
    assert aa_noise([1.0, 1.1], [2.0, 2.1]) is None


def test_aa_noise_of_equal_launches_is_zero() -> None:
    assert aa_noise([2.0, 2.0, 2.0]) == 0.0


def test_interval_from_baseline_spread_covers_one_more_launch_as_often_as_stated() -> None:
    source = random.Random(11)
    covered = 0
    for _ in range(2000):
        defaults = [math.exp(source.gauss(0.0, 0.02)) for _ in range(9)]
        candidate = 0.9 * math.exp(source.gauss(0.0, 0.02))
        mean = geometric_mean(defaults)
        interval = interval_from_baseline_spread(candidate / mean, defaults, reference_count=9)
        assert interval is not None
        covered += interval.low <= 0.9 <= interval.high

    assert abs(covered - 1900) < 4.0 * math.sqrt(2000 * 0.95 * 0.05)


def test_interval_from_baseline_spread_covers_the_best_of_many_too() -> None:
    source = random.Random(12)
    missed = 0
    for _ in range(1000):
        defaults = [math.exp(source.gauss(0.0, 0.02)) for _ in range(18)]
        mean = geometric_mean(defaults)
        best = min(math.exp(source.gauss(0.0, 0.02)) for _ in range(40)) / mean
        interval = interval_from_baseline_spread(
            best, defaults, reference_count=18, candidate_count=40
        )
        assert interval is not None
        assert interval.method.endswith("wide enough for the best of 40 candidates")
        missed += interval.high < 1.0

    # One of both tails: the best of equals is never too slow.
    assert missed < 1000 * 0.025 + 3.0 * math.sqrt(1000 * 0.025)


def test_interval_from_baseline_spread_says_how_it_was_found() -> None:
    interval = interval_from_baseline_spread(0.9, [1.0, 1.01, 0.99, 1.0])

    assert interval is not None
    assert interval.low < 0.9 < interval.high
    assert "4 recorded launches of the defaults" in interval.method
    assert "no fresh launches" in interval.method


def test_interval_from_baseline_spread_below_three_defaults_is_none() -> None:
    assert interval_from_baseline_spread(0.9, [1.0, 1.01]) is None
