"""What a search tells: events while it runs, and its result.

Pure data, shared by the engine and the renderers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nccltune.measurement import Launch, Outcome, Settings


class Verdict(StrEnum):
    """The answer of a search."""

    IMPROVED = "improved"
    KEEP_DEFAULT = "keep_default"
    INCONCLUSIVE = "inconclusive"


class TrialsEnd(StrEnum):
    """Why a search made no more trials."""

    COMPLETE = "complete"
    """There are as many as were asked for."""

    EXHAUSTED = "exhausted"
    """Nothing was left to try."""

    OUT_OF_TIME = "out_of_time"
    """The time limit left none for more, beside what proving the winner takes."""

    INTERRUPTED = "interrupted"
    """Somebody stopped the search before."""


@dataclass(frozen=True, slots=True)
class PayloadRow:
    """One payload of the final table: baseline beside tuned, medians in us."""

    size_bytes: int
    weight: float
    is_guard: bool
    baseline_us: float
    tuned_us: float
    ratio: float
    ratio_low: float | None = None
    ratio_high: float | None = None
    used: str = ""
    """What NCCL really did under the tuned settings, e.g. ``ring LL 4 channels``; empty where not
    looked up."""


@dataclass(frozen=True, slots=True)
class GatherRow:
    """One all-gather size under the baseline and the winner: medians of one launch each, in us.

    ``size_bytes`` is what each rank contributes.
    """

    size_bytes: int
    baseline_us: float
    tuned_us: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval of a ratio.

    With how it was found, in words for the report.
    """

    low: float
    high: float
    method: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One candidate beside the baseline (the folk profile, say).

    Score ratio and ratio by payload size.
    """

    name: str
    settings: Settings
    outcome: Outcome
    score_ratio: float | None
    ratios: Mapping[int, float]
    message: str = ""


@dataclass(frozen=True, slots=True)
class DuelReport:
    """Fresh launches of baseline and candidate in ABBA order.

    And what the decision rule made of them.
    """

    settings: Settings
    block_count: int
    launch_count: int
    score_ratio: float
    interval: Interval
    verdict: Verdict
    guards: Mapping[int, Interval]
    rejected_guards: tuple[int, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class AblationStep:
    """One setting left out.

    The score ratio against the whole profile, and whether it was dropped for good.
    """

    variable: str
    score_ratio_without: float | None
    is_dropped: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial that did not end ``ok``."""

    trial_idx: int
    settings: Settings
    outcome: Outcome
    message: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Everything that a finished search knows.

    ``score_ratio`` is the best candidate's weighted geometric mean of communication time over the
    baseline's; below 1 is faster. ``duel``, ``ablation`` and ``collectives`` are None where they
    were not run; ``not_run`` says why. ``gathers`` is empty where none were timed.
    ``pruned_count`` of the trials ended early, because what had been measured ruled them out;
    ``trial_limit`` is how many there were to be, and ``trials_end`` why there are no more.
    ``baseline_noise``: standard deviation of the log score over ``baseline_count`` launches of the
    baseline.
    """

    verdict: Verdict
    sentence: str
    settings: Settings
    score_ratio: float
    score_interval: Interval
    payloads: tuple[PayloadRow, ...]
    trial_count: int
    duration_s: float
    source: str
    outcome_counts: Mapping[Outcome, int]
    failures: tuple[Failure, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    duel: DuelReport | None = None
    ablation: tuple[AblationStep, ...] | None = None
    collectives: Launch | None = None
    gathers: tuple[GatherRow, ...] = ()
    memory_bytes_per_gpu: int | None = None
    memory_baseline_bytes_per_gpu: int | None = None
    not_run: str = ""
    warnings: tuple[str, ...] = ()
    study_path: str = ""
    is_interrupted: bool = False
    pruned_count: int = 0
    trial_limit: int = 0
    trials_end: TrialsEnd = TrialsEnd.COMPLETE
    baseline_noise: float | None = None
    baseline_count: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)


class Stage(StrEnum):
    """Where a search is."""

    BASELINE = "baseline"
    SEARCH = "search"
    REMEASURE = "remeasure"
    ABLATION = "ablation"
    DUEL = "duel"
    CHECKS = "checks"


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of a running search, sent before and after every launch.

    ``launch`` is None before a launch and set after it.
    """

    stage: Stage
    settings: Settings
    trial_idx: int
    trial_total: int
    elapsed_s: float
    remaining_s: float | None
    best_score_ratio: float | None
    best_settings: Settings
    outcome_counts: Mapping[Outcome, int]
    launch: Launch | None = None
    score_ratio: float | None = None
    note: str = ""


class SearchObserver(Protocol):
    """Follows a search; must be quick and must not raise."""

    def update(self, progress: Progress) -> None:
        """Take note of one moment."""
        ...
