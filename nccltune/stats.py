"""Small-sample statistics: how sure a few launches make us.

Launches are the independent samples, never replays. Standard library only. The rule that decides
a comparison is in block_rule.py; docs/statistics.md explains both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

MIN_NOISE_LAUNCH_COUNT = 3
"""Fewer launches say nothing useful about their spread."""
_MIN_NOISE_GAP_COUNT = 3
"""As many pairs as so many launches make."""
_NORMAL_MEDIAN_DIFFERENCE = 0.9538725524
"""Median of |x - y| for two standard normal x and y: 0.67449 times the square root of 2."""


def student_t_quantile(probability: float, df: float) -> float:
    """Return the value that Student's t stays below with ``probability``.

    Found by bisection on the tail, which is half the regularised incomplete beta function
    I_x(df/2, 1/2) at x = df / (df + t^2) (Abramowitz and Stegun, 26.7.1); relative error below
    1e-10.

    >>> round(student_t_quantile(0.975, 2), 6)
    4.302653
    """
    if not 0.0 < probability < 1.0 or not df > 0.0:
        raise ValueError(f"need 0 < probability < 1 and df > 0, not {probability} and {df}")
    if probability < 0.5:
        return -_upper_quantile(probability, df)
    return _upper_quantile(1.0 - probability, df)


@lru_cache(maxsize=1024)
def _upper_quantile(tail: float, df: float) -> float:
    if tail == 0.5:
        return 0.0
    low, high = 0.0, 1.0
    while _upper_tail(high, df) > tail:
        low, high = high, 2.0 * high
    while high - low > 1e-14 * high:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if _upper_tail(middle, df) > tail:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _upper_tail(t: float, df: float) -> float:
    square = t * t
    return 0.5 * _incomplete_beta(0.5 * df, 0.5, df / (df + square), square / (df + square))


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Return I_x(a, b) for x + y = 1; both are passed so that neither loses digits near 0."""
    if x <= 0.0 or y <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - _beta_front(b, a, y, x) / _beta_fraction(b, a, y)
    return _beta_front(a, b, x, y) / _beta_fraction(a, b, x)


def _beta_front(a: float, b: float, x: float, y: float) -> float:
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log(y) - log_beta) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Evaluate 1 + d1/(1 + d2/(1 + ...)) of Abramowitz and Stegun, 26.5.8, from the far end.

    300 terms are far more than the arguments here need (x is below its turning point).
    """
    value = 1.0
    for term in range(300, 0, -1):
        half = term // 2
        if term % 2:
            factor = -(a + half) * (a + b + half) / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            factor = half * (b - half) / ((a + 2 * half - 1) * (a + 2 * half))
        value = 1.0 + factor * x / value
    return value


def geometric_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Average ratios, so that 0.5 and 2 cancel; weights need not sum to one.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    shares = [1.0] * len(values) if weights is None else list(weights)
    total = math.fsum(shares)
    if len(shares) != len(values) or not total > 0.0:
        raise ValueError("need as many weights as values, and a positive sum of weights")
    logs = (share * math.log(value) for share, value in zip(shares, values, strict=True))
    return math.exp(math.fsum(logs) / total)


def t_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the two-sided interval of the mean of independent values; needs at least two."""
    centre = statistics.fmean(values)
    quantile = student_t_quantile(0.5 + 0.5 * confidence, len(values) - 1)
    half = quantile * statistics.stdev(values, centre) / math.sqrt(len(values))
    return centre - half, centre + half


def aa_noise(*groups: Sequence[float]) -> float | None:
    """Estimate the standard deviation of one launch's log score from repeats of the same settings.

    The median absolute difference over all pairs, scaled to a normal spread: one disturbed launch
    among few moves it little. None below three pairs, which three launches make.

    Args:
        groups: scores of the same settings each; between groups nothing is compared.
    """
    gaps = []
    for scores in groups:
        logs = [math.log(score) for score in scores]
        gaps += [abs(x - y) for idx, x in enumerate(logs) for y in logs[:idx]]
    if len(gaps) < _MIN_NOISE_GAP_COUNT:
        return None
    return statistics.median(gaps) / _NORMAL_MEDIAN_DIFFERENCE


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """An interval of a ratio and, in words for the report, how it was found."""

    low: float
    high: float
    method: str


def interval_from_baseline_spread(
    score_ratio: float,
    baseline_scores: Sequence[float],
    *,
    reference_count: int = 1,
    candidate_count: int = 1,
    confidence: float = 0.95,
) -> RatioInterval | None:
    """Say how sure a recorded candidate's ratio is, where no fresh launch can be made.

    The candidate was launched once, so its own spread is unknown and the spread of the recorded
    defaults stands in: ratio x exp(+- t(n-1) s sqrt(1 + 1/reference_count)), s being the standard
    deviation of their log scores. The best of n candidates is the luckiest too, so each has an
    n-th of the error probability: the interval holds for all n at once (Bonferroni).

    Args:
        score_ratio: the candidate's score ratio; the interval is centred on it in log.
        baseline_scores: scores of the recorded defaults, all against one common reference.
        reference_count: how many defaults were averaged in the ratio's denominator.
        candidate_count: of how many it was picked as the best.
        confidence: two-sided.

    Returns:
        None below three recorded defaults.
    """
    count = len(baseline_scores)
    if count < MIN_NOISE_LAUNCH_COUNT:
        return None
    spread = statistics.stdev(math.log(score) for score in baseline_scores)
    tail = 0.5 * (1.0 - confidence) / max(1, candidate_count)
    quantile = student_t_quantile(1.0 - tail, count - 1)
    factor = math.exp(quantile * spread * math.sqrt(1.0 + 1.0 / reference_count))
    method = (
        f"from the spread of {count} recorded launches of the defaults "
        f"(t, {count - 1} degrees of freedom); no fresh launches"
    )
    if candidate_count > 1:
        method += f"; wide enough for the best of {candidate_count} candidates"
    return RatioInterval(score_ratio / factor, score_ratio * factor, method)
