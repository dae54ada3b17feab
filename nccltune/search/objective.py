"""What a search minimises, what it must not make worse, and when a launch has told enough."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from nccltune.block_rule import GUARD_REJECT_RATIO
from nccltune.measurement import Launch, PayloadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nccltune.payloads.derive import Workload

GUARD_POINT_RATIO = 1.03
"""Limit of a guard's ratio where only one figure is to be had: within the band that more launches
would decide."""

Z_95 = 1.96
HOPELESS_RATIO = 1.15
"""A launch whose score can no longer come below this is not worth finishing: far beyond any launch
noise seen."""

BEST_CASE_RATIO = 0.5
"""What a payload that is not measured yet is assumed to reach when judging whether a launch is
hopeless."""

FAILED_SCORE = 10.0
"""Told for settings that fail: finite, since a sampler does not see failed trials and would propose
them again."""

SHARED_GPU_GUARD_BYTES = 1 << 20
SHARED_GPU_GRAPH_COUNT = 3
SHARED_GPU_REPLAY_COUNT = 3


class GuardState(StrEnum):
    """What one launch says of a guard."""

    HELD = "held"
    UNDECIDED = "undecided"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Assessment:
    """One launch beside the baseline.

    Attributes:
        score_ratio: weighted geometric mean of communication time over the baseline's; of what was
            measured, with the rest taken as unchanged, when the launch is incomplete.
        ratios: candidate over baseline by payload size.
        guard: the worst state of any guard.
        violation: how far the worst guard lies above the limit that it was held to; above 0 where
            one is broken, at most 0 where all hold.
    """

    score_ratio: float
    ratios: Mapping[int, float]
    guard: GuardState
    violation: float


class Objective:
    """Score and guards of a workload.

    For each batch size, communication time is the sum over its scored payloads of count x us. The
    score is the geometric mean over batch sizes of candidate over baseline, weighted by how often
    each size is used.

    Args:
        workload: payloads, uses and guards.
        is_shared_gpu: ranks take turns on one GPU; small graphs, and only guards that end in this
            life.
    """

    def __init__(self, workload: Workload, *, is_shared_gpu: bool = False) -> None:
        self._workload = workload
        self._is_shared = is_shared_gpu
        total_use = sum(batch.use for batch in workload.batches)
        self._batches = [
            (batch.use / total_use, workload.scored(batch)) for batch in workload.batches
        ]
        guards = [
            guard
            for guard in workload.guards
            if not is_shared_gpu or guard.size_bytes <= SHARED_GPU_GUARD_BYTES
        ]
        self.guard_sizes: tuple[int, ...] = tuple(guard.size_bytes for guard in guards)
        counts = {guard.size_bytes: guard.graph_count for guard in guards}
        counts |= {p.size_bytes: p.graph_count for _, scored in self._batches for p in scored}
        self._graph_counts = counts

    @property
    def weights(self) -> dict[int, float]:
        """Share of each scored payload in the score, at equal time an all-reduce.

        Guards have none.
        """
        weights: dict[int, float] = {}
        for use, scored in self._batches:
            total = sum(payload.count for payload in scored)
            for payload in scored:
                share = use * payload.count / total
                weights[payload.size_bytes] = weights.get(payload.size_bytes, 0.0) + share
        return weights

    @property
    def requests(self) -> tuple[PayloadRequest, ...]:
        """What a launch measures, in this order: scored payloads by weight, then guards by size.

        A broken guard prunes the rest, but the score is known by then: a sampler learns from it,
        and a payload costs little beside the start of a launch.
        """
        weights = self.weights
        sizes = sorted(self._graph_counts, key=lambda size: (-weights.get(size, 0.0), -size))
        if self._is_shared:
            return tuple(
                PayloadRequest(size, SHARED_GPU_GRAPH_COUNT, SHARED_GPU_REPLAY_COUNT, 1)
                for size in sizes
            )
        return tuple(PayloadRequest(size, self._graph_counts[size]) for size in sizes)

    @property
    def gather_requests(self) -> tuple[PayloadRequest, ...]:
        """The all-gathers to time beside the check of the other collectives, by size.

        None where ranks share a GPU: those times mean nothing.
        """
        gathers = () if self._is_shared else (g for b in self._workload.batches for g in b.gathers)
        counts = {gather.size_bytes: gather.graph_count for gather in gathers}
        return tuple(PayloadRequest(size, counts[size]) for size in sorted(counts))

    def log_score(self, candidate: Mapping[int, float], baseline: Mapping[int, float]) -> float:
        """Return the natural logarithm of the score; both map payload size to us."""
        total = 0.0
        for use, scored in self._batches:
            ours = sum(payload.count * candidate[payload.size_bytes] for payload in scored)
            theirs = sum(payload.count * baseline[payload.size_bytes] for payload in scored)
            total += use * math.log(ours / theirs)
        return total

    def assess(
        self,
        measured: Mapping[int, float],
        baseline: Mapping[int, float],
        noise: Mapping[int, float],
    ) -> Assessment:
        """Put a launch, complete or not, beside the baseline.

        Args:
            measured: payload size to median us.
            baseline: the same for the baseline.
            noise: standard deviation of the logarithm of one launch's median, by size; empty means
                that only a point ratio is to be had, and the point limit decides.
        """
        ratios = {size: us / baseline[size] for size, us in measured.items()}
        filled = {size: measured.get(size, us) for size, us in baseline.items()}
        guards = [self._guard(ratios[g], noise.get(g)) for g in self.guard_sizes if g in ratios]
        state = GuardState.HELD
        if GuardState.BROKEN in guards:
            state = GuardState.BROKEN
        elif GuardState.UNDECIDED in guards:
            state = GuardState.UNDECIDED
        # Where there is little noise, a guard below the point limit is broken already.
        is_sure = noise and state is GuardState.BROKEN
        limit = GUARD_REJECT_RATIO if is_sure else GUARD_POINT_RATIO
        worst = max((ratios[g] - limit for g in self.guard_sizes if g in ratios), default=0.0)
        score_ratio = math.exp(self.log_score(filled, baseline))
        return Assessment(score_ratio, ratios, state, worst)

    @staticmethod
    def _guard(ratio: float, noise: float | None) -> GuardState:
        if noise is None:
            return GuardState.HELD if ratio <= GUARD_POINT_RATIO else GuardState.BROKEN
        margin = math.exp(Z_95 * math.sqrt(2.0) * noise)
        if ratio / margin > GUARD_REJECT_RATIO:
            return GuardState.BROKEN
        return GuardState.HELD if ratio <= GUARD_POINT_RATIO else GuardState.UNDECIDED

    def is_decided(
        self,
        measured: Mapping[int, float],
        baseline: Mapping[int, float],
        noise: Mapping[int, float],
    ) -> bool:
        """Whether what has been measured already rules the candidate out.

        So that the rest can be pruned.
        """
        if self.assess(measured, baseline, noise).guard is GuardState.BROKEN:
            return True
        best_case = {
            size: measured.get(size, us * BEST_CASE_RATIO) for size, us in baseline.items()
        }
        return math.exp(self.log_score(best_case, baseline)) > HOPELESS_RATIO


def pooled_medians(launches: Sequence[Launch]) -> dict[int, float]:
    """Return the median over launches of each payload's median, in us."""
    sizes = launches[0].median_us
    return {size: statistics.median(one.median_us[size] for one in launches) for size in sizes}


def log_noise(launches: Sequence[Launch]) -> dict[int, float]:
    """Return the standard deviation of the logarithm of one launch's median, by payload size.

    Empty under 3 launches.
    """
    if len(launches) < 3:
        return {}
    return {
        size: statistics.stdev(math.log(one.median_us[size]) for one in launches)
        for size in launches[0].median_us
    }
