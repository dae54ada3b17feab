"""The ask-and-tell loop.

Proposals from a sampler, launches from a bench, every result into the journal at once.

A trial is asked for only once it is known what will be measured, so that the study holds nothing
but real measurements. Candidates that fail are told as a very bad score and a broken constraint: a
sampler does not see failed trials, and would propose the same settings again. FAIL is kept for
faults of the host.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import TrialState, create_trial

from nccltune.envvars import canonical
from nccltune.errors import HostError
from nccltune.measurement import Bench, Launch, Outcome, Settings
from nccltune.search.objective import (
    FAILED_SCORE,
    Assessment,
    GuardState,
    Objective,
    log_noise,
    pooled_medians,
)
from nccltune.search.records import launch_from_record, record_from_launch
from nccltune.search.result import Failure

if TYPE_CHECKING:
    from nccltune.search.space import Params, Space

SPARSE_TRIAL_COUNT = 7
"""Proposals that set only a few dimensions, before the sampler takes over."""

STARTUP_TRIAL_COUNT = SPARSE_TRIAL_COUNT + 2
BASELINE_EVERY = 8
"""Trials between two measurements of the baseline: about 20 s on two GPUs, quicker than clocks
drift."""

HOST_FAULT_LIMIT = 3
"""Launches in a row that fail through the host before a search gives up; everything told so far is
kept."""

STEP_SHARE = 0.8
"""Share of the sampler's draws that become small steps from the best candidate so far."""

STEP_SIZES = (1, 2, 2, 3)
NUDGE_LIMIT = 50
BASELINE_KEY = "nccltune.baseline."
CONSTRAINT = "guards"


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Return a sampler: ``tpe`` (each dimension by itself, aware of the guards) or ``random``."""
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(
        multivariate=False, n_startup_trials=STARTUP_TRIAL_COUNT, seed=seed, constant_liar=False
    )


@dataclass(frozen=True, slots=True)
class Tried:
    """One finished trial."""

    trial_idx: int
    launch: Launch
    assessment: Assessment | None
    """None when the launch failed."""

    @property
    def is_eligible(self) -> bool:
        """Whether it may win: measured whole, and no guard is known to be broken."""
        return (
            self.launch.is_complete
            and self.assessment is not None
            and self.assessment.guard is not GuardState.BROKEN
        )


class Trials:
    """The trials of one study, those of an earlier process included."""

    def __init__(
        self,
        study: optuna.Study,
        bench: Bench,
        objective: Objective,
        space: Space,
        *,
        seed: int,
        is_random: bool,
    ) -> None:
        self._study = study
        self._bench = bench
        self._objective = objective
        self._space = space
        self._is_random = is_random
        self._host_faults = 0
        self.finished: list[Tried] = []
        self.baselines: list[Launch] = []
        self.engine_s = 0.0
        self._load()
        # A resumed search must not draw what it has drawn before.
        self._rng = random.Random(f"{seed}/{len(self.finished)}")
        self._sparse_params = space.sparse_params(self._rng)

    def _load(self) -> None:
        records = sorted(
            (key, record)
            for key, record in self._study.user_attrs.items()
            if key.startswith(BASELINE_KEY)
        )
        self.baselines = [launch_from_record(record) for _, record in records]
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            launch = launch_from_record(trial.user_attrs["launch"])
            baseline_us = self._baseline_us(trial.user_attrs["baseline_idx"])
            self.finished.append(Tried(trial.number, launch, self._assess(launch, baseline_us)))

    @property
    def outcome_counts(self) -> Counter[Outcome]:
        """How the trials ended."""
        return Counter(tried.launch.outcome for tried in self.finished)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Trials that did not end well."""
        return tuple(
            Failure(t.trial_idx, t.launch.settings, t.launch.outcome, t.launch.message)
            for t in self.finished
            if t.launch.outcome is not Outcome.OK
        )

    @property
    def noise(self) -> dict[int, float]:
        """Launch-to-launch noise of the baseline by payload size; empty while it is not known."""
        return {} if self._bench.baseline_launches() else log_noise(self.baselines)

    @property
    def baseline_us(self) -> dict[int, float]:
        """The baseline that ratios use now: the last one measured, or all that a recording has."""
        return self._baseline_us(len(self.baselines) - 1)

    def _baseline_us(self, idx: int) -> dict[int, float]:
        recorded = self._bench.baseline_launches()
        return pooled_medians(recorded) if recorded else self.baselines[idx].median_us

    def ranked(self) -> list[Tried]:
        """Eligible trials with settings of their own, best first, each candidate once."""
        best: dict[tuple[tuple[str, str], ...], Tried] = {}
        for tried in sorted(filter(_may_win, self.finished), key=_score):
            best.setdefault(tuple(sorted(tried.launch.settings.items())), tried)
        return list(best.values())

    def measure_baseline(self) -> Launch:
        """Measure the baseline; the first time it becomes trial 0.

        Raises:
            HostError: it does not run the second time either, so that nothing can be compared.
        """
        launch = self._bench.launch({}, self._objective.requests)
        if not launch.is_complete:
            launch = self._bench.launch({}, self._objective.requests)
        if not launch.is_complete:
            message = (
                f"the baseline itself does not run ({launch.outcome}: {launch.message});"
                " nothing can be tuned before that works"
            )
            raise HostError(message, code="baseline_failed")
        self.baselines.append(launch)
        key = f"{BASELINE_KEY}{len(self.baselines):04d}"
        self._study.set_user_attr(key, record_from_launch(launch))
        if not self.finished:
            self._tell({}, launch)
        return launch

    def has_tried(self, settings: Settings) -> bool:
        """Whether these settings, in whatever spelling, are among the finished trials."""
        wanted = canonical(settings)
        return any(canonical(tried.launch.settings) == wanted for tried in self.finished)

    def propose(self) -> Settings | None:
        """Return the next settings to measure.

        None when a recording has nothing left, or the operator has pinned every dimension.
        """
        if not self._space.dimension_count:
            return None
        began = time.perf_counter()
        tried = [one.launch.settings for one in self.finished]
        params = self._draw()
        found = self._bench.nearest(self._space.settings(params), tried)
        # A sampler that has found a good place proposes it again; its neighbours are worth more.
        for _ in range(NUDGE_LIMIT):
            if found is None or (found and not self.has_tried(found)):
                break
            params = self._space.nudge(params, self._rng)
            found = self._bench.nearest(self._space.settings(params), tried)
        self.engine_s += time.perf_counter() - began
        return found

    def _draw(self) -> dict[str, Any]:
        """Draw parameters: sparse ones first, then the sampler's, mostly as steps from the best."""
        if self._is_random:
            return self._sampled()
        if len(self.finished) < STARTUP_TRIAL_COUNT:
            return next(self._sparse_params)
        drawn = self._sampled()
        return self._step(drawn) if self._rng.random() < STEP_SHARE else drawn

    def _step(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Take over only a few dimensions of a draw into the best candidate so far.

        NCCL's defaults are good, most settings do nothing or harm, and a dense draw from ten
        dimensions almost always holds one that ruins it.
        """
        best = next(iter(self.ranked()), None)
        start: Params = {}
        if best is not None and _score(best) < 1.0:
            start = self._space.params(best.launch.settings) or {}
        params = {name: start.get(name) for name in drawn}
        differing = sorted(name for name in drawn if drawn[name] != params[name])
        count = min(self._rng.choice(STEP_SIZES), len(differing))
        for name in self._rng.sample(differing, count):
            params[name] = drawn[name]
        return params

    def _sampled(self) -> dict[str, Any]:
        space = self._space.distributions
        trial = create_trial(state=TrialState.RUNNING, params={}, distributions={})
        sampler = self._study.sampler
        drawn = sampler.sample_relative(self._study, trial, space)
        for name in sorted(space.keys() - drawn.keys()):
            drawn[name] = sampler.sample_independent(self._study, trial, name, space[name])
        return drawn

    def measure(self, settings: Settings, *, is_whole: bool = False) -> Tried | None:
        """Launch a candidate, tell the study, and return it; None when the host was at fault.

        Args:
            settings: the candidate's.
            is_whole: measure every payload, even after one has ruled the candidate out.

        Raises:
            HostError: the host failed several times in a row.
        """
        baseline, noise = self.baseline_us, self.noise
        measured: dict[int, float] = {}

        def keep_going(payload: Any) -> bool:
            measured[payload.size_bytes] = payload.median_us
            return not self._objective.is_decided(measured, baseline, noise)

        launch = self._bench.launch(
            settings, self._objective.requests, keep_going=None if is_whole else keep_going
        )
        if launch.outcome in (Outcome.HOST_BUSY, Outcome.HOST_FAILED):
            self._host_faults += 1
            if self._host_faults >= HOST_FAULT_LIMIT:
                message = f"{launch.message}; {HOST_FAULT_LIMIT} launches in a row failed like that"
                raise HostError(message, code=launch.outcome.value)
            return None
        self._host_faults = 0
        return self._tell(settings, launch)

    def _tell(self, settings: Settings, launch: Launch) -> Tried:
        began = time.perf_counter()
        params = self._space.params(settings)
        assessment = self._assess(launch, self.baseline_us)
        score, violation = FAILED_SCORE, 1.0
        if assessment is not None:
            score, violation = assessment.score_ratio, assessment.violation
        trial = self._ask(params)
        trial.set_user_attr("launch", record_from_launch(launch))
        trial.set_user_attr("baseline_idx", len(self.baselines) - 1)
        trial.set_constraint(CONSTRAINT, violation)
        self._study.tell(trial, score)
        tried = Tried(trial.number, launch, assessment)
        self.finished.append(tried)
        self.engine_s += time.perf_counter() - began
        return tried

    def _ask(self, params: dict[str, str | None] | None) -> optuna.Trial:
        """Ask for a trial with exactly these parameters.

        With none where the space cannot express the settings.
        """
        if params is None:
            return self._study.ask()
        self._study.enqueue_trial(params)
        return self._study.ask(self._space.distributions)

    def _assess(self, launch: Launch, baseline_us: dict[int, float]) -> Assessment | None:
        if launch.outcome is not Outcome.OK or not launch.payloads:
            return None
        return self._objective.assess(launch.median_us, baseline_us, self.noise)


def _may_win(tried: Tried) -> bool:
    return tried.is_eligible and bool(tried.launch.settings)


def _score(tried: Tried) -> float:
    return tried.assessment.score_ratio if tried.assessment is not None else FAILED_SCORE
