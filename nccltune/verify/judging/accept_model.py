"""Tokens a decode step by number of draft steps, from the arms that were measured.

The draft is a chain: a longer one begins with the tokens of a shorter one, and each counts only if
all before it were accepted. So a deep arm that says how many tokens each step accepted answers for
every shallower one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

_Z_95 = 1.96
_SEARCH_STEPS = 100


class AcceptSource(StrEnum):
    """Where accept length by number of steps comes from."""

    BY_POSITION = "by_position"
    GEOMETRIC = "geometric"
    SIMULATED = "simulated"


_NOTES: Mapping[AcceptSource, str] = {
    AcceptSource.BY_POSITION: (
        "accept length by number of steps is counted from the steps measured; it is that of the "
        "built-in prompts"
    ),
    AcceptSource.GEOMETRIC: (
        "the server does not say how many draft tokens each step accepted: between measured arms "
        "every draft token is taken to be accepted with the same chance, within what those arms "
        "accepted"
    ),
    AcceptSource.SIMULATED: (
        "acceptance was set, not measured: between arms it is taken on a straight line, and never "
        "above what a step proposes"
    ),
}


@dataclass(frozen=True, slots=True)
class AcceptPoint:
    """One arm: draft steps, tokens a decode step, and steps by how many draft tokens they took."""

    num_steps: int
    accept_length: float
    by_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptModel:
    """Accept length by number of steps.

    Attributes:
        lengths: number of steps -> tokens a decode step, and the half width of its 95 % interval,
            infinite where nothing tells.
    """

    source: AcceptSource
    lengths: Mapping[int, tuple[float, float]]

    @property
    def note(self) -> str:
        """What to keep in mind of it."""
        return _NOTES[self.source]

    def at(self, num_steps: int) -> tuple[float, float]:
        """Return the length and its half width within the steps that were measured."""
        return self.lengths[num_steps]


def fit_accept_model(points: Sequence[AcceptPoint], *, is_simulated: bool) -> AcceptModel:
    """Fill in the numbers of steps between the fewest and the most measured."""
    measured = _measured(points)
    wanted = range(min(measured), max(measured) + 1)
    counts = [p.by_position for p in points if p.num_steps > 0]
    if is_simulated:
        source = AcceptSource.SIMULATED
        filled = {steps: (_as_set(measured, steps), 0.0) for steps in wanted}
    elif counts and all(counts):
        source = AcceptSource.BY_POSITION
        filled = {steps: _counted(points, steps) for steps in wanted}
    else:
        source = AcceptSource.GEOMETRIC
        filled = {
            steps: (_between(measured, steps, length), half)
            for steps, (length, half) in _geometric(measured, wanted).items()
        }
    # A measured length stays what it is, and is not the worse for how well a model fits it.
    is_counted = source is AcceptSource.BY_POSITION
    own = {
        steps: (length, filled[steps][1] if is_counted and steps else 0.0)
        for steps, length in measured.items()
    }
    return AcceptModel(source, {**filled, **own})


def geometric_length(chance: float, num_steps: int) -> float:
    """Return tokens a step if every draft token is accepted with the same chance.

    >>> geometric_length(0.5, 2)
    1.75
    """
    return math.fsum(chance**idx for idx in range(num_steps + 1))


def _measured(points: Sequence[AcceptPoint]) -> dict[int, float]:
    """Average over arms with the same number of steps."""
    rows: dict[int, list[float]] = {}
    for point in points:
        length = point.accept_length if point.num_steps else 1.0
        rows.setdefault(point.num_steps, []).append(length)
    return {steps: math.fsum(row) / len(row) for steps, row in sorted(rows.items())}


def _as_set(measured: Mapping[int, float], steps: int) -> float:
    """Take a length between those of the nearest arms; no step accepts more than it proposes.

    Below the fewest steps of an arm that speculates, its own setting holds.
    """
    arms = {k: length for k, length in measured.items() if k} or {0: 1.0}
    high = min((k for k in arms if k >= steps), default=max(arms))
    low = max((k for k in arms if k <= steps), default=high)
    share = (steps - low) / (high - low) if high > low else 0.0
    return min(steps + 1.0, arms[low] + share * (arms[high] - arms[low]))


def _between(measured: Mapping[int, float], steps: int, length: float) -> float:
    """Keep a fitted length between the measured ones on both sides.

    A chain is the beginning of a longer one, so it is accepted no less far than a shorter one and
    no further than a longer one. By noise the shorter one may have come further.
    """
    shorter = measured[max(k for k in measured if k <= steps)]
    longer = measured[min(k for k in measured if k >= steps)]
    low, high = sorted((shorter, longer))
    return min(max(length, low), high)


def _counted(points: Sequence[AcceptPoint], steps: int) -> tuple[float, float]:
    """Count how far a chain of ``steps`` would have come in every step of arms at least as deep."""
    deep = [point.by_position for point in points if point.num_steps >= max(steps, 1)]
    total = sum(sum(row) for row in deep)
    if not total:
        return 1.0, math.inf
    taken = [(min(idx, steps), count) for row in deep for idx, count in enumerate(row)]
    mean = math.fsum(length * count for length, count in taken) / total
    squares = math.fsum(count * (length - mean) ** 2 for length, count in taken)
    return 1.0 + mean, _Z_95 * math.sqrt(squares) / total


def _geometric(measured: Mapping[int, float], wanted: range) -> dict[int, tuple[float, float]]:
    """Fit one chance to all arms that speculate; how far they lie off it is how sure it is."""
    arms = {steps: length for steps, length in measured.items() if steps > 0}

    def misfit(chance: float) -> float:
        return math.fsum((geometric_length(chance, k) - arms[k]) ** 2 for k in arms)

    low, high = 0.0, 1.0
    for _ in range(_SEARCH_STEPS):
        third = (high - low) / 3.0
        if misfit(low + third) < misfit(high - third):
            high -= third
        else:
            low += third
    chance = 0.5 * (low + high)
    worst = max(abs(geometric_length(chance, k) - length) for k, length in arms.items())
    half = worst if len(arms) > 1 else math.inf
    return {steps: (geometric_length(chance, steps), half) for steps in wanted}
