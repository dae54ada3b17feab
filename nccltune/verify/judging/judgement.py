"""How the answer of a verify is written down: verdict, comparisons, reasons. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from nccltune.errors import ExitCode

if TYPE_CHECKING:
    from nccltune.block_rule import GuardAnswer
    from nccltune.verify.judging.cost_model import CostModel, Refusal
    from nccltune.verify.judging.prediction import PredictionCheck


class Verdict(StrEnum):
    """The answer of a verify, and of each comparison in it."""

    GAIN = "gain"
    NO_DIFFERENCE = "no_difference"
    REGRESSION = "regression"
    DRIFT = "drift"
    INCONCLUSIVE = "inconclusive"
    UNUSABLE = "unusable"


EXIT_CODES: Mapping[Verdict, ExitCode] = {
    Verdict.GAIN: ExitCode.DONE,
    Verdict.NO_DIFFERENCE: ExitCode.NO,
    Verdict.REGRESSION: ExitCode.NO,
    Verdict.DRIFT: ExitCode.UNKNOWN,
    Verdict.INCONCLUSIVE: ExitCode.UNKNOWN,
    Verdict.UNUSABLE: ExitCode.SERVER,
}


class Metric(StrEnum):
    """What two arms are compared by; smaller is better."""

    MS_PER_VERIFY = "ms_per_verify"
    MS_PER_TOKEN = "ms_per_token"


class Cause(StrEnum):
    """Stable names of reasons, for scripts."""

    NOT_ON_PATH = "nccl_not_on_path"
    PATH_UNKNOWN = "nccl_path_unknown"
    NOT_IN_EFFECT = "profile_not_in_effect"
    ENVIRONMENT_UNSEEN = "environment_unseen"
    SHARED_SETTINGS = "settings_in_both_arms"
    NOT_SHOWN = "tokens_do_not_show_it"
    SMALL_SHARE = "nccl_share_small"
    LOW_ACCEPTANCE = "low_acceptance"
    SPECULATION_LOSES = "speculation_loses"
    SIMULATED = "simulated_acceptance"
    GUARD_REJECTED = "guard_rejected"
    GUARD_UNDECIDED = "guard_undecided"
    FEW_BOOTS = "few_boots"
    RECORDED_NOISE = "recorded_noise"
    HOST_CHANGED = "host_changed"
    NO_BASELINE = "no_baseline"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that explains a verdict, or limits it."""

    cause: Cause
    text: str


@dataclass(frozen=True, slots=True)
class GuardReport:
    """Time to first token of one prompt; above 0 ``effect_pct`` is faster.

    Attributes:
        name: ``ttft_short`` or ``ttft_long``.
        is_deciding: it may turn a gain down. Only where NCCL settings are all that differs: a
            draft model has a prefill of its own.
        spread_pct: how far boots of the baseline lie apart, one standard deviation; None below two
            blocks.
        is_too_uneven: they lie so far apart that the boots planned could not accept it whatever the
            settings do; a large loss is rejected all the same.
        is_suspect: it got longer by more than one standard error.
    """

    name: str
    answer: GuardAnswer
    effect_pct: float | None
    effect_ci_pct: tuple[float, float] | None
    is_deciding: bool
    spread_pct: float | None = None
    is_too_uneven: bool = False
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against the baseline.

    Attributes:
        answer: never ``drift`` or ``unusable``.
        effect_pct: above 0 is a gain: 100 * (1 - candidate / baseline); None without a whole block.
        effect_ci_pct: low and high; None below two blocks, where nothing tells how sure it is.
        level: error probability of that interval.
        check: prediction beside measurement, where there is one.
        is_wholly_in_effect: every key of every profile was seen in every rank of every boot.
        noise_pct: how far boots lay apart in earlier verifies, where that leaves the answer open.
    """

    arm: str
    baseline: str
    metric: Metric
    answer: Verdict
    effect_pct: float | None
    effect_ci_pct: tuple[float, float] | None
    level: float
    block_count: int
    guards: tuple[GuardReport, ...] = ()
    check: PredictionCheck | None = None
    sentence: str = ""
    is_wholly_in_effect: bool = False
    noise_pct: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of a verify.

    Attributes:
        exit_code: of the verdict; 3 as well where a profile was not in effect.
        cost_model: of the number of steps, or why there is none; None where nobody asks (arms that
            do not differ in it).
    """

    verdict: Verdict
    exit_code: ExitCode
    sentence: str
    comparisons: tuple[Comparison, ...] = ()
    reasons: tuple[Reason, ...] = ()
    cost_model: CostModel | Refusal | None = None
