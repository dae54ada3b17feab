"""A launcher that launches nothing: times follow from the settings, a drift and seeded noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nccltune.measurement import (
    Launch,
    Outcome,
    PayloadMeasurement,
    PayloadRequest,
    Settings,
)

SCORED_SIZES = (43008, 86016)
GUARD_SIZE = 1376256
REQUESTS = tuple(PayloadRequest(size, 123) for size in (*SCORED_SIZES, GUARD_SIZE))

Effect = Callable[[Settings], Mapping[int, float]]
"""Settings -> log ratio to the baseline by payload size; a missing size is unchanged."""


def no_effect(_settings: Settings) -> Mapping[int, float]:
    """Whatever is set, nothing changes."""
    return {}


@dataclass(slots=True)
class NoisyBench:
    """Times of 10 us, times the effect, a drift per launch, and one noise for the whole launch.

    ``outcomes`` maps the number of a launch to how it ends, whatever the settings.
    """

    effect: Effect = no_effect
    noise: float = 0.0
    drift: float = 0.0
    seed: int = 0
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    fails: Callable[[Settings], Outcome] = lambda _settings: Outcome.OK
    launches: list[dict[str, str]] = field(default_factory=list)
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def launch(
        self,
        settings: Settings,
        requests: Sequence[PayloadRequest],
    ) -> Launch:
        """Answer at once."""
        number = len(self.launches)
        self.launches.append(dict(settings))
        outcome = self.outcomes.get(number, self.fails(settings))
        if outcome is not Outcome.OK:
            return Launch(settings, outcome, message="as the test wished")
        logs = self.effect(settings)
        common = self.drift * number + self.noise * self.random.gauss(0.0, 1.0)
        payloads = []
        for request in requests:
            size = request.size_bytes
            median_us = 10.0 * math.exp(common + logs.get(size, 0.0))
            payloads.append(PayloadMeasurement(size, median_us, None, None))
        return Launch(settings, Outcome.OK, tuple(payloads))


@dataclass(frozen=True, slots=True)
class PlainObjective:
    """Equal weights of the scored sizes; guards as told."""

    guard_sizes: tuple[int, ...] = (GUARD_SIZE,)

    def log_score(self, candidate: Mapping[int, float], baseline: Mapping[int, float]) -> float:
        """Return the mean log ratio."""
        logs = [math.log(candidate[size] / baseline[size]) for size in SCORED_SIZES]
        return math.fsum(logs) / len(logs)


def scaled(ratio: float, guard_ratio: float = 1.0) -> Mapping[int, float]:
    """Return the same ratio at every scored size, and another at the guard."""
    logs = dict.fromkeys(SCORED_SIZES, math.log(ratio))
    return {**logs, GUARD_SIZE: math.log(guard_ratio)}
