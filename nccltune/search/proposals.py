"""What to measure next, and what to prove in the end: the model applied to a space's trials."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nccltune.recording import candidate_key
from nccltune.search.model import WORST_LOG, Expected, Model, Observed

if TYPE_CHECKING:
    from nccltune.measurement import Settings
    from nccltune.recording import SettingsKey
    from nccltune.search.objective import Assessment
    from nccltune.search.space import Params, Space

UNKNOWN_NOISE = 0.01
"""Launch noise, as a log ratio, as long as too few baselines say how large it is."""

RANDOM_DRAWS = 1000
"""Draws after which everything counts as tried."""

Result = tuple["Settings", "Assessment | None"]
"""Settings that were tried, and what came of them; None for a failure."""


def draw_evenly(space: Space, rng: random.Random) -> Iterator[Params]:
    """Draw from the whole space."""
    for _ in range(RANDOM_DRAWS):
        yield {name: rng.choice(some) for name, some in space.choices.items()}


def fit_model(
    space: Space,
    results: Sequence[Result],
    guard_sizes: Sequence[int],
    score_noise: float | None,
    noise: Mapping[int, float],
) -> Model:
    """Fit the model to all results that the space can express.

    Args:
        space: its dimensions.
        results: of all finished trials; the baseline is one of them.
        guard_sizes: payloads, in bytes, that must not get slower.
        score_noise: standard deviation of a launch's log score, where it is known.
        noise: the same by payload size.
    """
    observed = []
    for settings, assessment in results:
        params = space.params(settings)
        if params is None:
            continue
        ratios = assessment.ratios if assessment is not None else {}
        guards = {size: math.log(ratios[size]) for size in guard_sizes if size in ratios}
        observed.append(Observed(params, log_score(assessment), guards))
    guard_noise = {size: noise.get(size, UNKNOWN_NOISE) for size in guard_sizes}
    return Model(space.choices, observed, score_noise or UNKNOWN_NOISE, guard_noise)


def log_score(assessment: Assessment | None) -> float:
    """Return the log score; a failure leaves no hope."""
    return WORST_LOG if assessment is None else math.log(assessment.score_ratio)


def finalists(model: Model, space: Space, results: Sequence[Result], count: int) -> list[Settings]:
    """Return the settings that most promise a gain, by all that the trials say together.

    Each comes without those of its settings that seem to do nothing, so that fewer are left for
    ablation; such a candidate need not have been tried as it is. Candidates whose guards may not
    hold come last.

    Args:
        model: fitted to all trials.
        space: what can be simplified; other settings are taken as they are.
        results: of the trials that may win.
        count: how many to return at most.
    """
    found: dict[SettingsKey, tuple[bool, float, Settings]] = {}
    for settings, assessment in results:
        params = space.params(settings)
        if params is None:
            found[candidate_key(settings)] = (False, log_score(assessment), settings)
            continue
        fewest, expected = _simplified(model, params)
        simpler = space.settings(fewest)
        found[candidate_key(simpler)] = (not expected.holds, expected.log_score, simpler)
    ranked = sorted(found.values(), key=lambda one: one[:2])
    return [settings for _, _, settings in ranked[:count]]


def _simplified(model: Model, params: Params) -> tuple[Params, Expected]:
    """Leave out one setting after the other while that makes nothing worse; never the last."""
    (now,) = model.expect([params])
    while True:
        names = [name for name, choice in params.items() if choice is not None]
        without = [{**params, name: None} for name in names] if len(names) > 1 else []
        better = [
            (expected.log_score, idx, expected)
            for idx, expected in enumerate(model.expect(without))
            if expected.holds >= now.holds and expected.log_score <= now.log_score
        ]
        if not better:
            return params, now
        _, idx, now = min(better, key=lambda one: one[:2])
        params = without[idx]
