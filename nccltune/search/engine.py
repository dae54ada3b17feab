"""One search from start to verdict.

Baseline, trials, fresh launches of the best, ablation, duel, last checks.

What is saved is what was proven: ablation comes before the duel, so that the duel judges the very
settings that a profile will hold.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nccltune.bench.host_lock import LOCK_NAME
from nccltune.recording import candidate_key
from nccltune.search.finals import Finals, FreshBench
from nccltune.search.journal import (
    DAMAGE,
    TRIAL_COUNT,
    damaged_study,
    keep_trial_count,
    open_study,
    search_lock,
)
from nccltune.search.objective import Objective
from nccltune.search.report import Report
from nccltune.search.result import Progress, SearchObserver, SearchResult, Stage, TrialsEnd
from nccltune.search.space import HostFacts, Space
from nccltune.search.trials import BASELINE_EVERY, Trials, Tried

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nccltune.measurement import Bench, Launch, Settings
    from nccltune.payloads.derive import Workload
    from nccltune.recording import SettingsKey

FINALS_SHARE = 0.6
"""Share of the time limit that is kept for proving the winner, at most."""

FINALS_LAUNCH_COUNT = 38
"""Launches that proving takes as a rule: 8 again, 14 for ablation, 12 in the duel, 4 for checks."""

MIN_LAUNCH_S = 0.001
UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """What to search.

    Attributes:
        workload: payloads, uses and guards.
        facts: what the space depends on.
        identity: what must be equal for a search to be resumed: host, versions, base environment.
        pinned: the operator's own NCCL variables; they hold in every launch and are not searched.
        folk: a profile to put beside the result; measured whole, right after the baseline.
        extra_candidates: measured next, whole or not.
        trial_count: trials in all, the baseline and those of an earlier process included.
        keeps_trial_count: a search that is resumed has as many as it was asked for before.
        timeout_s: for everything; None for no limit.
        sampler: ``random`` draws evenly; anything else follows a model of the trials so far.
        min_gain: smallest gain worth having, as a share.
        use_duel: prove the winner on fresh launches, where the bench can make them.
        known_noise: spread of a launch's log score that earlier searches saw here, if any did.
    """

    workload: Workload
    facts: HostFacts
    identity: Mapping[str, object] = field(default_factory=dict)
    pinned: Settings = field(default_factory=dict)
    folk: Settings | None = None
    extra_candidates: tuple[Settings, ...] = ()
    trial_count: int = 40
    keeps_trial_count: bool = False
    timeout_s: float | None = None
    seed: int = 0
    sampler: str = "model"
    min_gain: float = 0.01
    use_duel: bool = True
    known_noise: float | None = None
    is_shared_gpu: bool = False


def run_search(
    plan: SearchPlan,
    bench: Bench,
    study_path: Path,
    *,
    is_resume: bool,
    observer: SearchObserver,
) -> SearchResult:
    """Search, prove, and return what is known; Ctrl-C ends it early with everything kept.

    Raises:
        BusyError: another search runs on this host.
        FileError: the study file cannot be used.
        HostError: the baseline does not run, or the host fails again and again.
    """
    with search_lock(study_path.parent / LOCK_NAME):
        return _Search(plan, bench, study_path, is_resume=is_resume, observer=observer).run()


class _Search:
    def __init__(
        self,
        plan: SearchPlan,
        bench: Bench,
        study_path: Path,
        *,
        is_resume: bool,
        observer: SearchObserver,
    ) -> None:
        self._bench = bench
        self._observer = observer
        self._began = time.monotonic()
        self._objective = Objective(plan.workload, is_shared_gpu=plan.is_shared_gpu)
        self._space = Space(plan.facts, plan.pinned)
        kept = {
            "workload": plan.workload.digest(),
            "source": bench.source,
            **plan.identity,
            TRIAL_COUNT: plan.trial_count,
        }
        study = open_study(
            study_path,
            kept,
            is_resume=is_resume,
        )
        asked = None if plan.keeps_trial_count else plan.trial_count
        plan = replace(plan, trial_count=keep_trial_count(study, asked, plan.trial_count))
        self._plan = plan
        try:
            self._trials = Trials(
                study,
                bench,
                self._objective,
                self._space,
                seed=plan.seed,
                is_random=plan.sampler == "random",
                known_noise=plan.known_noise,
            )
        except DAMAGE as error:
            raise damaged_study(study_path, error) from error
        self._stage = Stage.BASELINE
        self._launch_count = 0
        self._report = Report(plan, bench, self._objective, self._trials, study_path)

    def run(self) -> SearchResult:
        """Go through all stages; an interrupt ends them, and what is known is reported."""
        finals: Finals | None = None
        trials_end, is_interrupted = TrialsEnd.INTERRUPTED, False
        try:
            self._measure_baseline()
            trials_end = self._run_trials()
            if isinstance(self._bench, FreshBench) and self._plan.use_duel:
                finals = Finals(
                    self._bench,
                    self._objective,
                    self._trials,
                    min_gain=self._plan.min_gain,
                    launches_left=self._launches_left,
                    follow=self._follow,
                )
                finals.run()
        except KeyboardInterrupt:
            is_interrupted = True
        return self._report.result(
            finals, self._elapsed_s, trials_end=trials_end, is_interrupted=is_interrupted
        )

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _launches_left(self, reserved: int) -> int:
        """Return how many launches the time limit still allows beside those reserved."""
        if self._plan.timeout_s is None:
            return UNLIMITED
        left_s = self._plan.timeout_s - self._elapsed_s
        return math.floor(left_s / self._launch_s) - reserved

    @property
    def _launch_s(self) -> float:
        """Mean time of a launch so far."""
        return max(MIN_LAUNCH_S, self._elapsed_s / max(1, self._launch_count))

    def _measure_baseline(self) -> None:
        self._follow(Stage.BASELINE, {}, None)
        self._follow(Stage.BASELINE, {}, self._trials.measure_baseline())

    def _run_trials(self) -> TrialsEnd:
        """Make the trials, and return why there are no more."""
        plan = self._plan
        given = self._given()
        waiting = list(given)
        since_baseline = 0
        while len(self._trials.finished) < plan.trial_count:
            if not self._has_time_for_trials():
                return TrialsEnd.OUT_OF_TIME
            settings = waiting.pop(0) if waiting else self._trials.propose()
            if settings is None:
                return TrialsEnd.EXHAUSTED
            if since_baseline >= BASELINE_EVERY and not self._bench.baseline_launches():
                self._measure_baseline()
                since_baseline = 0
            self._follow(Stage.SEARCH, settings, None)
            is_folk = plan.folk is not None and candidate_key(settings) == candidate_key(plan.folk)
            tried = self._trials.measure(settings, is_whole=is_folk)
            since_baseline += 1
            if tried is not None:
                self._follow(Stage.SEARCH, settings, tried.launch, tried)
            elif settings in given:
                waiting.insert(0, settings)  # the host's fault: these settings are still to come
        return TrialsEnd.COMPLETE

    def _given(self) -> list[Settings]:
        """Return what is to be measured before the sampler proposes, where it can be measured.

        Each once, and in the words of a recording that spells it in another way.
        """
        folk = [] if self._plan.folk is None else [self._plan.folk]
        given: dict[SettingsKey, Settings] = {}
        for asked in (*folk, *self._plan.extra_candidates):
            key, found = candidate_key(asked), self._bench.nearest(asked, ())
            if found is None or candidate_key(found) != key or self._trials.has_tried(asked):
                continue
            given.setdefault(key, found)
        return list(given.values())

    def _has_time_for_trials(self) -> bool:
        limit = self._plan.timeout_s
        if limit is None:
            return True
        reserve_s = FINALS_LAUNCH_COUNT * self._launch_s if self._plan.use_duel else 0.0
        return self._elapsed_s + self._launch_s < limit - min(reserve_s, FINALS_SHARE * limit)

    def _follow(
        self, stage: Stage, settings: Settings, launch: Launch | None, tried: Tried | None = None
    ) -> None:
        """Tell the observer; a launch is None before it starts."""
        if launch is not None:
            self._launch_count += 1
        best = next(iter(self._trials.ranked()), None)
        progress = Progress(
            stage=stage,
            settings=settings,
            trial_idx=len(self._trials.finished) - (tried is not None),
            trial_total=self._plan.trial_count,
            elapsed_s=self._elapsed_s,
            remaining_s=self._remaining_s(stage),
            best_score_ratio=best.assessment.score_ratio if best and best.assessment else None,
            best_settings=best.launch.settings if best else {},
            outcome_counts=self._trials.outcome_counts,
            launch=launch,
        )
        if tried is not None and tried.assessment is not None:
            progress = replace(progress, score_ratio=tried.assessment.score_ratio)
        self._observer.update(progress)

    def _remaining_s(self, stage: Stage) -> float | None:
        """Estimate from the launches so far; None before the first."""
        if not self._launch_count:
            return None
        trials_left = max(0, self._plan.trial_count - len(self._trials.finished))
        launches = trials_left * (1.0 + 1.0 / BASELINE_EVERY)
        if self._plan.use_duel and not self._bench.baseline_launches():
            launches += FINALS_LAUNCH_COUNT if stage in (Stage.BASELINE, Stage.SEARCH) else 0
        estimate_s = launches * self._launch_s
        limit = self._plan.timeout_s
        return estimate_s if limit is None else max(0.0, min(estimate_s, limit - self._elapsed_s))
