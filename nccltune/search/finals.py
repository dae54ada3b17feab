"""After the trials: the best few again on fresh launches, ablation, the duel.

And what a server needs besides.

The best of many noisy trials looks better than it is, so nothing measured before this point
supports a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nccltune.block_rule import MIN_BLOCK_COUNT, BlockRule
from nccltune.measurement import Bench, Launch, Outcome, PayloadRequest, Settings
from nccltune.search.ablation import ablate
from nccltune.search.duel import run_duel
from nccltune.search.objective import Objective, pooled_medians
from nccltune.search.result import AblationStep, DuelReport, Stage, Verdict

if TYPE_CHECKING:
    from nccltune.bench.nccl_log import NcclReport
    from nccltune.search.trials import Trials, Tried

FINALIST_COUNT = 3
DUEL_COUNT = 2
"""If the first candidate fails its duel, the next may try; each has half the error level."""

BLOCK_LAUNCH_COUNT = 4
CHECK_LAUNCH_COUNT = 3
DUEL_RESERVE = 3 * BLOCK_LAUNCH_COUNT + CHECK_LAUNCH_COUNT + 1
"""Launches that must be left for the duel: three blocks tell an effect of 8 % from 2 % noise. One
is to spare, as not all launches take the same time."""

RISKY_GUARD_RATIO = 1.01
"""Guards that seem slower than this are likely to be rejected, or to stay undecided for long."""

LaunchesLeft = Callable[[int], int]
"""How many launches the time limit still allows, beside so many that are reserved."""

Follow = Callable[[Stage, Settings, Launch | None], None]


@runtime_checkable
class FreshBench(Bench, Protocol):
    """A bench that can launch anew, look up what NCCL does, and run other collectives."""

    def inspect(self, settings: Settings, requests: Sequence[PayloadRequest]) -> NcclReport:
        """Look up what NCCL really does."""
        ...

    def check_collectives(
        self, settings: Settings, gathers: Sequence[PayloadRequest] = ()
    ) -> Launch:
        """Run the other collectives, measure memory, time all-gathers."""
        ...


class Finals:
    """The proof of one search; what it found is in its attributes, also when it was interrupted.

    Attributes:
        settings: the settings that won, empty when none did.
        is_promising: whether any trial promised a gain, so that there was something to prove.
        duel: of the candidate that won, or of the last that failed.
        ablation: what each setting of the first finalist was worth.
        collectives: the check of the other collectives under the winner.
        baseline_collectives: the same under the baseline, for its memory and its all-gathers
            beside the winner's.
        used: what NCCL does under the winner, by payload size.
        fresh_us: medians over the winner's fresh launches, by payload size.
        reference_us: the same for the baseline.
    """

    def __init__(
        self,
        bench: FreshBench,
        objective: Objective,
        trials: Trials,
        *,
        min_gain: float,
        launches_left: LaunchesLeft,
        follow: Follow,
    ) -> None:
        self._bench = bench
        self._objective = objective
        self._trials = trials
        self._min_gain = min_gain
        self._launches_left = launches_left
        self._follow = follow
        self.settings: Settings = {}
        self.is_promising = False
        self.duel: DuelReport | None = None
        self.ablation: tuple[AblationStep, ...] | None = None
        self.collectives: Launch | None = None
        self.baseline_collectives: Launch | None = None
        self.used: dict[int, str] = {}
        self.fresh_us: dict[int, float] = {}
        self.reference_us: dict[int, float] = {}

    def run(self) -> None:
        """Prove the best candidate, or find that none holds."""
        self.is_promising = any(self._promises_gain(one) for one in self._trials.ranked())
        if not self.is_promising:
            return
        finalists = self._remeasure(self._trials.finalists(FINALIST_COUNT))
        if not finalists:
            return
        reduced = self._ablate(finalists[0])
        for candidate in [reduced, *finalists[1:]][:DUEL_COUNT]:
            least = MIN_BLOCK_COUNT * BLOCK_LAUNCH_COUNT + CHECK_LAUNCH_COUNT
            if self.duel is not None and self._launches_left(least) < 0:
                return  # no time for another one
            if self._duel(candidate) and self._check(candidate):
                self.settings = candidate
                return

    def _promises_gain(self, tried: Tried) -> bool:
        return tried.assessment is not None and (
            tried.assessment.score_ratio < 1.0 - self._min_gain
        )

    def _remeasure(self, finalists: Sequence[Settings]) -> list[Settings]:
        """Launch each twice more between baselines, mirrored in time.

        And return them best first; behind all others those with a guard that may be rejected, for
        the duel would have to go on until that is decided.
        """
        order: list[Settings] = [{}, *finalists, *reversed(finalists), {}]
        launches: dict[int, list[Launch]] = {}
        for settings in order:
            if self._launches_left(DUEL_RESERVE) < 1:
                break
            self._follow(Stage.REMEASURE, settings, None)
            launch = self._bench.launch(settings, self._objective.requests)
            self._follow(Stage.REMEASURE, settings, launch)
            idx = finalists.index(settings) if settings else -1
            launches.setdefault(idx, []).append(launch)
        if not all(one.is_complete for one in launches.get(-1, [])) or -1 not in launches:
            return list(finalists)
        reference = pooled_medians(launches[-1])
        noise = self._trials.noise
        scores: dict[int, tuple[bool, float]] = {}
        for idx in range(len(finalists)):
            again = launches.get(idx, [])
            if again and all(one.is_complete for one in again):
                assessment = self._objective.assess(pooled_medians(again), reference, noise)
                if assessment.guard != "broken":
                    guards = (assessment.ratios[g] for g in self._objective.guard_sizes)
                    is_risky = max(guards, default=0.0) > RISKY_GUARD_RATIO
                    scores[idx] = is_risky, assessment.score_ratio
        return [finalists[idx] for idx in sorted(scores, key=scores.__getitem__)]

    def _ablate(self, candidate: Settings) -> Settings:
        """Drop what does not pay, in as many rounds as leave time for the duel."""
        round_count = self._launches_left(DUEL_RESERVE) // (2 * (len(candidate) + 2))
        if round_count < 1:
            return candidate
        reduced, self.ablation = ablate(
            self._bench,
            candidate,
            self._objective.requests,
            self._objective,
            noise=self._trials.score_noise,
            max_round_count=round_count,
            deadline=lambda: self._launches_left(DUEL_RESERVE) < 1,
            on_launch=lambda launch: self._follow(Stage.ABLATION, launch.settings, launch),
        )
        return reduced

    def _duel(self, candidate: Settings) -> bool:
        def note(launch: Launch) -> None:
            collected[bool(launch.settings)].append(launch)
            self._follow(Stage.DUEL, launch.settings, launch)

        collected: dict[bool, list[Launch]] = {True: [], False: []}
        # What is known of another candidate must not be shown for this one.
        self.used, self.fresh_us, self.reference_us = {}, {}, {}
        self.duel = run_duel(
            self._bench,
            candidate,
            self._objective.requests,
            self._objective,
            rule=BlockRule(min_gain=self._min_gain).shared_by(DUEL_COUNT),
            noise=self._trials.score_noise,
            deadline=lambda: self._launches_left(BLOCK_LAUNCH_COUNT + CHECK_LAUNCH_COUNT) < 0,
            on_launch=note,
        )
        complete = {
            key: [one for one in some if one.is_complete] for key, some in collected.items()
        }
        if all(complete.values()):
            self.fresh_us = pooled_medians(complete[True])
            self.reference_us = pooled_medians(complete[False])
        return self.duel.verdict is Verdict.IMPROVED

    def _check(self, candidate: Settings) -> bool:
        gathers = self._objective.gather_requests
        self._follow(Stage.CHECKS, candidate, None)
        self.collectives = self._bench.check_collectives(candidate, gathers)
        if self.collectives.outcome in (Outcome.HOST_BUSY, Outcome.HOST_FAILED):
            self.collectives = self._bench.check_collectives(candidate, gathers)
        self._follow(Stage.CHECKS, candidate, self.collectives)
        self.used = dict(self._bench.inspect(candidate, self._objective.requests).used)
        if self.collectives.is_complete:
            self.baseline_collectives = self._bench.check_collectives({}, gathers)
            self._follow(Stage.CHECKS, {}, self.baseline_collectives)
        return self.collectives.is_complete
