"""From trials and finals to the result: verdict, one sentence, the table payload by payload."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nccltune.block_rule import GUARD_ACCEPT_RATIO
from nccltune.measurement import Bench, Launch, Outcome, Settings
from nccltune.recording import candidate_key
from nccltune.search.objective import Objective, pooled_medians
from nccltune.search.result import (
    Comparison,
    GatherRow,
    Interval,
    PayloadRow,
    SearchResult,
    TrialsEnd,
    Verdict,
)
from nccltune.stats import interval_from_baseline_spread

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nccltune.search.engine import SearchPlan
    from nccltune.search.finals import Finals
    from nccltune.search.trials import Trials, Tried

FOLK_NAME = "folk-ll-ring"
ENOUGH_TRIALS = 10
"""Measured trials, the defaults included, after which no gain found counts as none to be had; as
many as were asked for where those are fewer."""

UNKNOWN = Interval(0.0, math.inf, "not enough launches for an interval")
NO_FRESH = (
    "duel, ablation, the check of other collectives and the memory cost were not run:"
    " a recording has no fresh launches"
)
NOT_ASKED = "duel, ablation and the check of other collectives were not run: switched off"
NO_PROMISE = "duel and ablation were not run: no candidate came near a gain worth having"
NOT_HELD = "duel and ablation were not run: the best candidates did not hold on fresh launches"
ENDED = "duel and ablation were not finished: the search was stopped"


class Report:
    """Turns what a search knows into its result."""

    def __init__(
        self,
        plan: SearchPlan,
        bench: Bench,
        objective: Objective,
        trials: Trials,
        study_path: Path,
    ) -> None:
        self._plan = plan
        self._bench = bench
        self._objective = objective
        self._trials = trials
        self._study_path = study_path

    def result(
        self,
        finals: Finals | None,
        duration_s: float,
        *,
        trials_end: TrialsEnd,
        is_interrupted: bool,
    ) -> SearchResult:
        """Return what is known now."""
        winner, ratio, interval, verdict = self._answer(finals)
        if verdict is Verdict.KEEP_DEFAULT and not self._is_searched():
            verdict = Verdict.INCONCLUSIVE
        if is_interrupted and not (finals and finals.settings):
            verdict = Verdict.INCONCLUSIVE
        duel = finals.duel if finals else None
        settings = winner if verdict is Verdict.IMPROVED else {}
        shown = settings or (duel.settings if duel else winner)
        return SearchResult(
            verdict=verdict,
            sentence=self._sentence(
                verdict, ratio, interval, finals, is_interrupted=is_interrupted
            ),
            settings=dict(settings),
            score_ratio=ratio,
            score_interval=interval,
            payloads=self._rows(shown, finals),
            trial_count=len(self._trials.finished),
            duration_s=duration_s,
            source=self._bench.source,
            outcome_counts={Outcome(k): v for k, v in self._trials.outcome_counts.items()},
            failures=self._trials.failures,
            comparisons=self._comparisons(),
            duel=duel,
            ablation=finals.ablation if finals else None,
            collectives=finals.collectives if finals else None,
            gathers=_gather_rows(finals),
            memory_bytes_per_gpu=_memory_bytes(finals.collectives if finals else None),
            memory_baseline_bytes_per_gpu=_memory_bytes(
                finals.baseline_collectives if finals else None
            ),
            not_run=self._not_run(finals, is_interrupted=is_interrupted),
            study_path=str(self._study_path),
            is_interrupted=is_interrupted,
            pruned_count=sum(tried.launch.is_pruned for tried in self._trials.finished),
            trial_limit=self._plan.trial_count,
            trials_end=trials_end,
            baseline_noise=self._trials.baseline_noise,
            baseline_count=len(self._trials.baselines),
            phases_s={"engine": self._trials.engine_s},
        )

    def _answer(self, finals: Finals | None) -> tuple[Settings, float, Interval, Verdict]:
        """Return winner, score ratio, its interval and the verdict."""
        duel = None if finals is None else finals.duel
        # Settings that fail in their first block are unfit, whatever their trial promised.
        if (
            finals is not None
            and duel is not None
            and (duel.block_count or duel.verdict is Verdict.KEEP_DEFAULT)
        ):
            verdict = duel.verdict
            if verdict is Verdict.IMPROVED and not finals.settings:
                verdict = _unchecked(finals)
            return finals.settings, duel.score_ratio, duel.interval, verdict
        best = next(iter(self._trials.ranked()), None)
        if best is None or best.assessment is None:
            return {}, 1.0, UNKNOWN, Verdict.KEEP_DEFAULT
        ratio = best.assessment.score_ratio
        interval = self._interval_from_spread(ratio)
        worth = 1.0 - self._plan.min_gain
        if ratio > worth:
            verdict = Verdict.KEEP_DEFAULT
        elif self._bench.baseline_launches() and interval.high < 1.0:
            verdict = Verdict.IMPROVED
        else:
            verdict = Verdict.INCONCLUSIVE
        return best.launch.settings, ratio, interval, verdict

    def _is_searched(self) -> bool:
        """Whether enough was measured, the defaults included, to say that nothing is better."""
        return 1 + self._trials.measured_count >= min(self._plan.trial_count, ENOUGH_TRIALS)

    def _shortage(self) -> str:
        """Say how few candidates could be measured; empty where that is not what was missing."""
        count, measured = self._trials.candidate_count, self._trials.measured_count
        if self._is_searched() or measured == count:
            return ""
        few = f"only {measured}" if measured else "none"
        return f"{few} of {count} candidates could be measured"

    def _interval_from_spread(self, ratio: float) -> Interval:
        """The interval of a single launch, or of a recorded candidate.

        From the baseline's own spread.
        """
        baselines = list(self._bench.baseline_launches()) or self._trials.baselines
        if not baselines:
            return UNKNOWN
        reference = pooled_medians(baselines)
        scores = [
            math.exp(self._objective.log_score(one.median_us, reference)) for one in baselines
        ]
        count = len(baselines) if self._bench.baseline_launches() else 1
        found = interval_from_baseline_spread(
            ratio,
            scores,
            reference_count=count,
            candidate_count=self._trials.measured_count,
        )
        return Interval(found.low, found.high, found.method) if found else UNKNOWN

    def _rows(self, settings: Settings, finals: Finals | None) -> tuple[PayloadRow, ...]:
        tuned, baseline = self._pair(settings, finals)
        guards = finals.duel.guards if finals and finals.duel else {}
        weights = self._objective.weights
        rows = []
        for size in sorted(tuned.keys() & baseline.keys()):
            interval = guards.get(size)
            rows.append(
                PayloadRow(
                    size_bytes=size,
                    weight=weights.get(size, 0.0),
                    is_guard=size in self._objective.guard_sizes,
                    baseline_us=baseline[size],
                    tuned_us=tuned[size],
                    ratio=tuned[size] / baseline[size],
                    ratio_low=interval.low if interval else None,
                    ratio_high=interval.high if interval else None,
                    used=finals.used.get(size, "") if finals else "",
                )
            )
        return tuple(rows)

    def _pair(
        self, settings: Settings, finals: Finals | None
    ) -> tuple[Mapping[int, float], Mapping[int, float]]:
        if finals is not None and finals.fresh_us:
            return finals.fresh_us, finals.reference_us
        trial = self._trial_of(settings)
        if trial is None or not self._trials.baselines:
            return {}, {}
        baseline = {
            size: trial.launch.median_us[size] / ratio
            for size, ratio in (trial.assessment.ratios if trial.assessment else {}).items()
        }
        return trial.launch.median_us, baseline

    def _trial_of(self, settings: Settings) -> Tried | None:
        key = candidate_key(settings)
        found = (t for t in self._trials.finished if candidate_key(t.launch.settings) == key)
        return next(found, None)

    def _comparisons(self) -> tuple[Comparison, ...]:
        if self._plan.folk is None:
            return ()
        trial = self._trial_of(self._plan.folk)
        if trial is None:
            return ()
        assessment = trial.assessment
        return (
            Comparison(
                name=FOLK_NAME,
                settings=trial.launch.settings,
                outcome=trial.launch.outcome,
                score_ratio=assessment.score_ratio if assessment else None,
                ratios=assessment.ratios if assessment else {},
                message=trial.launch.message or self._folk_words(assessment.ratios)
                if assessment
                else trial.launch.message,
            ),
        )

    def _folk_words(self, ratios: Mapping[int, float]) -> str:
        scored = self._objective.weights
        verify = [ratio for size, ratio in ratios.items() if size in scored]
        slow = max(self._objective.guard_sizes, key=lambda size: ratios.get(size, 0.0), default=0)
        is_better = bool(verify) and max(verify) < 1.0 - self._plan.min_gain
        first = "faster than" if is_better else "no better than"
        words = f"{first} the defaults at verify sizes"
        if ratios.get(slow, 0.0) > 1.05:
            words += f", {ratios[slow]:.1f} times as long at {slow} B"
        return words

    def _not_run(self, finals: Finals | None, *, is_interrupted: bool) -> str:
        if self._bench.baseline_launches():
            return NO_FRESH
        if is_interrupted and not (finals and finals.duel):
            return ENDED
        if finals is None:
            return NOT_ASKED
        if finals.duel is not None:
            return ""
        return NOT_HELD if finals.is_promising else NO_PROMISE

    def _sentence(
        self,
        verdict: Verdict,
        ratio: float,
        interval: Interval,
        finals: Finals | None,
        *,
        is_interrupted: bool,
    ) -> str:
        count = len(self._trials.finished)
        trials = f"{count} trial{'' if count == 1 else 's'}"
        reason = _doubt(finals)
        worth = f"{100 * self._plan.min_gain:g} %"
        if is_interrupted and verdict is Verdict.INCONCLUSIVE:
            return f"Stopped after {trials}; all finished ones are kept."
        band = f"{ratio:.3f}"
        if math.isfinite(interval.high):
            band += f" (95 % interval {interval.low:.3f} to {interval.high:.3f})"
        if verdict is Verdict.IMPROVED:
            return (
                "Improved: the communication time of a decode step falls to"
                f" {band} of the defaults'{self._guard_words()}."
            )
        if verdict is Verdict.KEEP_DEFAULT:
            if reason:
                return (
                    f"The defaults are already best here: the best of {trials}"
                    f" did not hold ({reason})."
                )
            return f"The defaults are already best here: none of {trials} gains {worth} over them."
        shortage = self._shortage()
        if not reason and ratio > 1.0 - self._plan.min_gain:
            if shortage:
                return f"Inconclusive: {shortage}, too few to rule a gain of {worth} out."
            return f"Inconclusive: no gain of {worth} found in {trials}, too few to rule one out."
        reason = reason or "not proven on fresh launches"
        more = f"; {shortage}" if shortage else ""
        return f"Inconclusive: the best of {trials} reaches {band}, {reason}{more}."

    def _guard_words(self) -> str:
        """Say of the guards that there were, and of no others, that they hold."""
        sizes = sorted(self._objective.guard_sizes)
        limit = f"{100 * (GUARD_ACCEPT_RATIO - 1):.0f} %"
        if not sizes:
            return "; no size was guarded"
        if len(sizes) == 1:
            return f", and the one guarded size, {sizes[0]} B, gets less than {limit} slower"
        return f", and none of {len(sizes)} guarded sizes gets {limit} slower or more"


def _doubt(finals: Finals | None) -> str:
    """Say why what the finals were about did not win; empty when they did not get that far."""
    if finals is None or finals.duel is None or finals.settings:
        return ""
    if finals.duel.verdict is not Verdict.IMPROVED:
        return finals.duel.message
    check = finals.collectives
    if check is None or not check.outcome.is_candidates_fault:
        return "the other collectives could not be checked"
    return f"other collectives ended {check.outcome} under it"


def _unchecked(finals: Finals) -> Verdict:
    """Judge a winner of the duel that did not pass the check of the other collectives."""
    check = finals.collectives
    is_unfit = check is not None and check.outcome.is_candidates_fault
    return Verdict.KEEP_DEFAULT if is_unfit else Verdict.INCONCLUSIVE


def _gather_rows(finals: Finals | None) -> tuple[GatherRow, ...]:
    """Put the all-gathers of both arms side by side; empty unless both were timed."""
    if finals is None or finals.collectives is None or finals.baseline_collectives is None:
        return ()
    tuned = finals.collectives.gather_median_us
    baseline = finals.baseline_collectives.gather_median_us
    return tuple(
        GatherRow(size, baseline[size], tuned[size])
        for size in sorted(tuned.keys() & baseline.keys())
    )


def _memory_bytes(check: Launch | None) -> int | None:
    """Return the GPU memory of a server's communicators on the GPU where they take most."""
    return max(check.memory_bytes) if check and check.memory_bytes else None
