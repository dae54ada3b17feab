"""Which settings of a winner pay for themselves: each is left out in turn, on fresh launches.

A setting that changes nothing is one more thing to go stale with the next NCCL, so it is dropped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nccltune.search.duel import (
    Deadline,
    DuelObjective,
    FreshLaunches,
    Launcher,
    LaunchFailedError,
    OnLaunch,
)
from nccltune.search.result import AblationStep

if TYPE_CHECKING:
    from nccltune.measurement import PayloadRequest, Settings

TOLERANCE = math.log(1.005)
"""A setting must be worth more than this. Half of the smallest gain worth claiming, so that two
that are dropped cannot together hide one."""
JOINT_TOLERANCE = math.log(1.01)
"""All that are dropped may together cost this: the smallest gain worth having."""
GUARD_LIMIT = math.log(1.03)
"""Point ratio over the baseline beyond which a guard counts as slower for lack of a setting."""
TARGET_NOISE = 0.01
"""Standard error that a comparison should reach; one round alone has the noise of one launch."""
MAX_ROUND_COUNT = 3

_BASELINE = "the baseline"
_WHOLE = "the whole profile"
_REDUCED = "the reduced profile"

Medians = Mapping[int, float]


def ablate(
    bench: Launcher,
    settings: Settings,
    requests: Sequence[PayloadRequest],
    objective: DuelObjective,
    *,
    baseline: Settings | None = None,
    noise: float | None = None,
    max_round_count: int = MAX_ROUND_COUNT,
    deadline: Deadline = lambda: False,
    on_launch: OnLaunch | None = None,
) -> tuple[dict[str, str], tuple[AblationStep, ...]]:
    """Drop every setting whose absence costs nothing that counts.

    A round launches baseline, whole profile and the profile without each setting, then all of them
    in reverse order, so that a linear drift cancels. At least one setting is always left: whether
    the profile is worth having at all is for the duel to say. Whatever was not measured stays.

    Args:
        bench: must really launch.
        settings: the winner, baseline settings included.
        requests: payloads of every launch.
        objective: scores a pair of launches and names the guards.
        baseline: settings of the baseline; never left out.
        noise: the host's A/A noise; more of it means more rounds.
        max_round_count: rounds that the time left allows.
        deadline: asked before every launch; a round cut short counts for nothing.
        on_launch: called after every launch.
    """
    fixed = dict(baseline or {})
    names = [name for name, value in settings.items() if fixed.get(name) != value]
    if len(names) < 2:
        return dict(settings), ()
    launches = FreshLaunches(bench, requests, on_launch)
    work = _Ablation(launches, objective, dict(settings), fixed, deadline)
    costs = work.costs(names, min(max_round_count, _round_count(noise)))
    dropped = work.confirm(_droppable(costs))
    steps = tuple(
        AblationStep(name, None if cost is None else math.exp(cost.log_score), name in dropped)
        for name, cost in costs.items()
    )
    return work.without(dropped), steps


def _round_count(noise: float | None) -> int:
    """Return the rounds after which a comparison's standard error is TARGET_NOISE, within bounds.

    The means of two launches each, twice: the difference has the noise of one launch, and shrinks
    with the root of the rounds.
    """
    if noise is None:
        return 2
    return min(MAX_ROUND_COUNT, max(1, math.ceil((noise / TARGET_NOISE) ** 2)))


@dataclass(frozen=True, slots=True)
class _Cost:
    """What leaving out costs: log score against the whole profile, and whether a guard suffers."""

    log_score: float
    is_guard_hurt: bool


def _droppable(costs: Mapping[str, _Cost | None]) -> tuple[str, ...]:
    """Return the settings that do not pay, cheapest to leave out first; never all of them."""
    measured = [(cost.log_score, name) for name, cost in costs.items() if cost is not None]
    hurt = {name for name, cost in costs.items() if cost is not None and cost.is_guard_hurt}
    idle = [name for score, name in sorted(measured) if score <= TOLERANCE and name not in hurt]
    return tuple(idle[:-1] if len(idle) == len(costs) else idle)


@dataclass(slots=True)
class _Arm:
    """One arm of the interleaved launches, with its medians so far in order."""

    role: str
    settings: dict[str, str]
    medians: list[Medians] = field(default_factory=list)
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class _Ablation:
    launches: FreshLaunches
    objective: DuelObjective
    settings: dict[str, str]
    baseline: dict[str, str]
    deadline: Deadline

    def without(self, names: Sequence[str]) -> dict[str, str]:
        kept = {name: value for name, value in self.settings.items() if name not in names}
        return {**self.baseline, **kept}

    def costs(self, names: Sequence[str], round_count: int) -> dict[str, _Cost | None]:
        """Measure every setting's absence; None where its launches failed or the time was over."""
        variants = {
            name: _Arm(f"the profile without {name}", self.without([name])) for name in names
        }
        reference = self._reference_arms()
        for _ in range(round_count):
            if not self._run_round([*reference, *variants.values()]):
                break
        return {name: self._cost(arm, *reference) for name, arm in variants.items()}

    def confirm(self, droppable: tuple[str, ...]) -> tuple[str, ...]:
        """Measure what is left when all are dropped, and put back the dearest until it is fine.

        One alone was measured already. It is also the answer when the time ends before the rest
        is confirmed.
        """
        for count in range(len(droppable), 1, -1):
            reference = self._reference_arms()
            reduced = _Arm(_REDUCED, self.without(droppable[:count]))
            if not self._run_round([*reference, reduced]):
                break
            cost = self._cost(reduced, *reference)
            if cost and cost.log_score <= JOINT_TOLERANCE and not cost.is_guard_hurt:
                return droppable[:count]
        return droppable[:1]

    def _reference_arms(self) -> tuple[_Arm, _Arm]:
        return _Arm(_BASELINE, self.baseline), _Arm(_WHOLE, self.settings)

    def _run_round(self, arms: Sequence[_Arm]) -> bool:
        """Launch all arms forth and back; False, and nothing kept, if that was not possible."""
        fresh: list[tuple[_Arm, Medians]] = []
        for arm in (*arms, *reversed(arms)):
            if arm.is_broken:
                continue
            if self.deadline():
                return False
            is_tested = arm.role not in (_BASELINE, _WHOLE)
            try:
                medians = self.launches.medians_us(arm.settings, arm.role, is_tested=is_tested)
            except LaunchFailedError:
                if not is_tested:
                    return False
                arm.is_broken = True
            else:
                fresh.append((arm, medians))
        for arm, measured in fresh:
            arm.medians.append(measured)
        return True

    def _cost(self, arm: _Arm, baseline: _Arm, whole: _Arm) -> _Cost | None:
        if arm.is_broken or not arm.medians:
            return None
        pairs = zip(arm.medians, whole.medians, strict=True)
        return _Cost(
            statistics.fmean(self.objective.log_score(*pair) for pair in pairs),
            any(
                _guard_ratio(size, arm, baseline)
                > max(GUARD_LIMIT, _guard_ratio(size, whole, baseline))
                for size in self.objective.guard_sizes
            ),
        )


def _guard_ratio(size: int, arm: _Arm, baseline: _Arm) -> float:
    """Return the log of the arm's time over the baseline's at one size, paired by time."""
    pairs = zip(arm.medians, baseline.medians, strict=True)
    return statistics.fmean(math.log(mine[size] / theirs[size]) for mine, theirs in pairs)
