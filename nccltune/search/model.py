"""What the trials so far say of settings that were not tried: effects that mostly add up.

A Gaussian process on the log score and one on the log ratio of every guard. Its kernel says what is
known of NCCL beforehand: every choice of a dimension has an effect of its own, neighbouring values
have similar ones, two choices together may do more or less than the sum, and leaving a dimension to
NCCL does nothing. A choice that was part of many trials is known well, so that the noise of a
launch is averaged instead of followed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nccltune.block_rule import GUARD_REJECT_RATIO

if TYPE_CHECKING:
    import random

    from nccltune.search.space import Params

EFFECT_SD = 0.1
"""Expected size of the effect of one choice, as the log of a ratio."""
PAIR_SD = 0.03
"""The same for what two choices do beyond the sum of their effects."""
REACH = 2.0
"""Places in the order of a dimension's values after which an effect has changed (by 1/e)."""
WORST_LOG = 0.2
"""More harm than this counts as this: how bad a bad choice is does not matter."""
MIN_NOISE = 0.004
"""Least standard deviation of a trial's log ratio, however calm the baselines were."""
COMMON_SD = 0.003
"""Offset that all trials share: that of the baselines' own noise."""

SETTING_COST = 0.005
"""What every setting must be worth, as a log score; the same as in ablation."""

EVEN_CHANCE = 0.5
"""Chance of the worst guard from which it is expected to hold."""

_NORMAL = statistics.NormalDist()

Array = NDArray[np.float64]
Places = NDArray[np.int64]
"""Parameters as numbers, a row a candidate: the place of its choice in every dimension."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One trial: parameters, log score, and the log ratio of each guard that was measured."""

    params: Params
    log_score: float
    guards: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of a candidate: its log score, and whether all guards will hold.

    The score counts every setting with what it must at least be worth.
    """

    log_score: float
    holds: bool


class Model:
    """The processes fitted to trials.

    Args:
        choices: of every dimension in their order, ``None`` (leave it to NCCL) first.
        trials: at least one.
        noise: standard deviation of a trial's log score.
        guard_noise: the same of each guard's log ratio, by size.
    """

    def __init__(
        self,
        choices: Mapping[str, Sequence[str | None]],
        trials: Sequence[Observed],
        noise: float,
        guard_noise: Mapping[int, float],
    ) -> None:
        self._choices = {name: tuple(some) for name, some in choices.items()}
        self._likeness = [_likeness(len(some)) for some in self._choices.values()]
        self._tried = self._places([one.params for one in trials])
        covariance = self._covariance(self._tried, self._tried)
        self._score = _Process(covariance, dict(enumerate(one.log_score for one in trials)), noise)
        self._guards = [
            _Process(
                covariance,
                {idx: one.guards[size] for idx, one in enumerate(trials) if size in one.guards},
                guard_noise[size],
            )
            for size in guard_noise
        ]

    def expect(self, candidates: Sequence[Params]) -> list[Expected]:
        """Return what is expected of each."""
        if not candidates:
            return []
        means, _, chances = self._predict(self._places(candidates))
        return [
            Expected(float(mean), bool(chance >= EVEN_CHANCE))
            for mean, chance in zip(means, chances, strict=True)
        ]

    def proposals(
        self, rng: random.Random, among: Sequence[Params] | None = None
    ) -> Iterator[dict[str, str | None]]:
        """Return candidates, the most hopeful first.

        Hopeful means expected improvement, times the chance that the worst guard holds; between
        equals, of which there are many at first, it is drawn.

        Args:
            rng: for the draws.
            among: what can be measured, where not everything can; else all single and double
                changes of the best trial.
        """
        best, best_mean = self._find_best()
        changed = self._changes(best) if among is None else self._places(among)
        changed = changed[rng.sample(range(len(changed)), len(changed))]
        means, spreads, chances = self._predict(changed)
        hopes = [
            chance * spread * (z * _NORMAL.cdf(z) + _NORMAL.pdf(z))
            for z, spread, chance in zip(
                (best_mean - means) / spreads, spreads, chances, strict=True
            )
        ]
        for idx in np.argsort(hopes, kind="stable")[::-1]:
            named = zip(self._choices.items(), changed[idx], strict=True)
            yield {name: some[place] for (name, some), place in named}

    def _find_best(self) -> tuple[Places, float]:
        """Return the trial of the best expected score whose guards hold; else the defaults."""
        candidates = np.vstack([np.zeros_like(self._tried[:1]), self._tried])
        means, _, chances = self._predict(candidates)
        means[1:][chances[1:] < EVEN_CHANCE] = math.inf
        idx = int(np.argmin(means))
        return candidates[idx], float(means[idx])

    def _changes(self, best: Places) -> Places:
        singles = [
            (dimension, place)
            for dimension, some in enumerate(self._choices.values())
            for place in range(len(some))
            if place != best[dimension]
        ]
        pairs = itertools.combinations(singles, 2)
        changes = [(one, one) for one in singles] + [two for two in pairs if two[0][0] != two[1][0]]
        rows = np.tile(best, (len(changes), 1))
        for row, ((first, place), (second, other)) in zip(rows, changes, strict=True):
            row[first], row[second] = place, other
        return rows

    def _predict(self, rows: Places) -> tuple[Array, Array, Array]:
        """Return mean and standard deviation of the log score, and the worst guard's chance."""
        shared = self._covariance(self._tried, rows)
        prior = self._variance(rows)
        means, spreads = self._score.predict(shared, prior)
        means += SETTING_COST * np.count_nonzero(rows, axis=1)
        margins = np.full(len(rows), math.inf)
        for guard in self._guards:
            ratios, errors = guard.predict(shared, prior)
            margins = np.minimum(margins, (math.log(GUARD_REJECT_RATIO) - ratios) / errors)
        chances = np.array([_NORMAL.cdf(margin) for margin in margins])
        return means, spreads, chances

    def _places(self, candidates: Sequence[Params]) -> Places:
        rows = [
            [some.index(params[name]) for name, some in self._choices.items()]
            for params in candidates
        ]
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(self._choices))

    def _covariance(self, left: Places, right: Places) -> Array:
        return _combine(
            table[left[:, idx][:, None], right[:, idx][None, :]]
            for idx, table in enumerate(self._likeness)
        )

    def _variance(self, rows: Places) -> Array:
        return _combine(
            table[rows[:, idx], rows[:, idx]] for idx, table in enumerate(self._likeness)
        )


class _Process:
    """One quantity, known of some of the trials.

    Args:
        covariance: between all trials.
        values: number of the trial -> log ratio.
        noise: standard deviation of a value.
    """

    def __init__(self, covariance: Array, values: Mapping[int, float], noise: float) -> None:
        self._known = np.array(list(values), dtype=np.int64)
        known = np.array(list(values.values()), dtype=np.float64)
        spread = max(noise, MIN_NOISE) ** 2 * np.eye(len(values)) + COMMON_SD**2
        self._precision = np.linalg.inv(covariance[np.ix_(self._known, self._known)] + spread)
        self._weights = self._precision @ np.minimum(known, WORST_LOG)

    def predict(self, shared: Array, prior: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of candidates.

        Args:
            shared: covariance between all trials (rows) and the candidates.
            prior: variance of each candidate as long as nothing is known.
        """
        shared = shared[self._known]
        variance = prior - (shared * (self._precision @ shared)).sum(axis=0)
        return shared.T @ self._weights, np.sqrt(np.maximum(variance, 1e-12))


def _likeness(count: int) -> Array:
    """Return how alike the effects of a dimension's choices are; ``None`` has no effect."""
    places = np.arange(count)
    table: Array = np.exp(-np.abs(places[:, None] - places[None, :]) / REACH)
    table[0, :] = table[:, 0] = 0.0
    return table


def _combine(alike: Iterable[Array]) -> Array:
    """Sum likeness over dimensions, and its products over pairs of them."""
    total: Array = np.zeros(())
    squares: Array = np.zeros(())
    for one in alike:
        total = total + one
        squares = squares + one * one
    covariance: Array = EFFECT_SD**2 * total + PAIR_SD**2 * (total * total - squares) / 2.0
    return covariance
