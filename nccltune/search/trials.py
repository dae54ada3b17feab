"""The ask-and-tell loop.

Proposals from a model of the trials so far, launches from a bench, every result into the journal at
once.

A trial is asked for only once it is known what will be measured, so that the study holds nothing
but real measurements. Candidates that fail are told as a very bad score and a broken constraint,
as whoever opens the study with Optuna expects; FAIL is kept for faults of the host.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from optuna.trial import TrialState

from nccltune.errors import HostError
from nccltune.measurement import Bench, Launch, Outcome, Settings
from nccltune.recording import candidate_key
from nccltune.search.objective import (
    FAILED_SCORE,
    Assessment,
    GuardState,
    Objective,
    log_noise,
    pooled_medians,
)
from nccltune.search.proposals import draw_evenly, finalists, fit_model
from nccltune.search.records import launch_from_record, record_from_launch
from nccltune.search.result import Failure
from nccltune.stats import aa_noise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import optuna

    from nccltune.recording import SettingsKey
    from nccltune.search.model import Model
    from nccltune.search.space import Params, Space

BASELINE_EVERY = 8
"""Trials between two measurements of the baseline: about 20 s on two GPUs, quicker than clocks
drift."""

BASELINE_COUNT = 3
"""Baselines nearest in time whose median a ratio is taken against: one alone is as noisy as the
candidate, and now and then 1.5 % off."""

HOST_FAULT_LIMIT = 3
"""Launches in a row that fail through the host before a search gives up; everything told so far is
kept."""

BASELINE_KEY = "nccltune.baseline."
CONSTRAINT = "guards"


@runtime_checkable
class FixedBench(Protocol):
    """A bench that can measure certain candidates alone: a recording."""

    @property
    def candidates(self) -> Sequence[Settings] | None:
        """All of them, without the baseline; None where anything can be measured after all."""
        ...


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
        known_noise: float | None = None,
    ) -> None:
        self._study = study
        self._bench = bench
        self._objective = objective
        self._space = space
        self._is_random = is_random
        self._known_noise = known_noise
        self._host_faults = 0
        self.finished: list[Tried] = []
        self.baselines: list[Launch] = []
        self.engine_s = 0.0
        self._load()
        # A resumed search must not draw what it has drawn before.
        self._rng = random.Random(f"{seed}/{len(self.finished)}")

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
        """The baseline that ratios use now: the last ones measured, or all that a recording has."""
        return self._baseline_us(len(self.baselines) - 1)

    def _baseline_us(self, idx: int) -> dict[int, float]:
        recorded = self._bench.baseline_launches()
        return pooled_medians(recorded or self.baselines[: idx + 1][-BASELINE_COUNT:])

    @property
    def score_noise(self) -> float | None:
        """A/A noise of this host: what is on record, and at least what these baselines show."""
        found = (self.baseline_noise, self._known_noise)
        return max((noise for noise in found if noise is not None), default=None)

    @property
    def baseline_noise(self) -> float | None:
        """Spread of the log score over the baselines of this search; None for too few."""
        if not self.baselines:
            return None
        reference = pooled_medians(self.baselines)
        return aa_noise(
            [
                math.exp(self._objective.log_score(one.median_us, reference))
                for one in self.baselines
            ]
        )

    @property
    def candidate_count(self) -> int:
        """How many candidates were launched, the defaults aside."""
        return sum(bool(tried.launch.settings) for tried in self.finished)

    @property
    def measured_count(self) -> int:
        """How many of them have times, be it in part; the others failed."""
        return sum(bool(t.launch.settings) and t.assessment is not None for t in self.finished)

    def ranked(self) -> list[Tried]:
        """Eligible trials with settings of their own, best first, each candidate once."""
        best: dict[SettingsKey, Tried] = {}
        for tried in sorted(filter(_may_win, self.finished), key=_score):
            best.setdefault(candidate_key(tried.launch.settings), tried)
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
        return candidate_key(settings) in self._tried_keys()

    def _tried_keys(self) -> set[SettingsKey]:
        return {candidate_key(tried.launch.settings) for tried in self.finished}

    def propose(self) -> Settings | None:
        """Return the next settings to measure; None when there is nothing left to try."""
        if not self._space.dimension_count:
            return None
        began = time.perf_counter()
        left = self._left()
        if self._is_random:
            found = self._first_new(draw_evenly(self._space, self._rng))
        elif left is None:
            # The model changes the best trial in one place or two; what is left is drawn.
            drawn = draw_evenly(self._space, self._rng)
            found = self._first_new(chain(self._model().proposals(self._rng), drawn))
        else:
            found = self._most_hopeful(left)
        if found is None and left:
            found = self._rng.choice(left)  # recorded, and nothing says more of it
        self.engine_s += time.perf_counter() - began
        return found

    def _left(self) -> list[Settings] | None:
        """Return what a recording holds and was not tried yet; None where anything can be."""
        fixed = self._bench.candidates if isinstance(self._bench, FixedBench) else None
        if fixed is None:
            return None
        known = self._tried_keys()
        return [settings for settings in fixed if candidate_key(settings) not in known]

    def _most_hopeful(self, left: Sequence[Settings]) -> Settings | None:
        """Return the first by the model; None where the space can express none of them."""
        ranked = {
            tuple(params.items()): settings
            for settings in left
            if (params := self._space.params(settings)) is not None
        }
        if not ranked:
            return None
        best = next(self._model().proposals(self._rng, [dict(key) for key in ranked]))
        return ranked[tuple(best.items())]

    def _first_new(self, proposals: Iterable[Params]) -> Settings | None:
        tried, known = [one.launch.settings for one in self.finished], self._tried_keys()
        for params in proposals:
            settings = self._space.settings(params)
            if self._space.params(settings) != params:
                continue  # NCCL would take it for another candidate
            found = self._bench.nearest(settings, tried)
            if found is None or (found and candidate_key(found) not in known):
                return found
        return None

    def finalists(self, count: int) -> list[Settings]:
        """Return the settings that most promise a gain, by all that the trials say together."""
        results = [(one.launch.settings, one.assessment) for one in filter(_may_win, self.finished)]
        if not self._space.dimension_count:
            return [settings for settings, _ in results[:count]]
        return finalists(self._model(), self._space, results, count)

    def _model(self) -> Model:
        return fit_model(
            self._space,
            [(one.launch.settings, one.assessment) for one in self.finished],
            self._objective.guard_sizes,
            self.score_noise,
            self.noise,
        )

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
