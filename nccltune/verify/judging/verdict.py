"""What the boots say: one verdict, one sentence, and where the time goes when there is no gain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nccltune.errors import ExitCode
from nccltune.verify.judging.comparison import (
    Look,
    counts_verifies,
    effect_of,
    is_simulated,
    look_at,
    rule_for,
    settings_of,
    steps_of,
    topk_of,
)
from nccltune.verify.judging.cost_model import ArmPoint, CostModel, Refusal, fit_cost_model
from nccltune.verify.judging.evidence import Evidence, gather_evidence
from nccltune.verify.judging.judgement import EXIT_CODES as EXIT_CODES
from nccltune.verify.judging.judgement import Cause as Cause
from nccltune.verify.judging.judgement import Comparison as Comparison
from nccltune.verify.judging.judgement import GuardReport as GuardReport
from nccltune.verify.judging.judgement import Judgement as Judgement
from nccltune.verify.judging.judgement import Metric as Metric
from nccltune.verify.judging.judgement import Reason as Reason
from nccltune.verify.judging.judgement import Verdict as Verdict
from nccltune.verify.judging.numbers import is_time, summarize_arms
from nccltune.verify.judging.prediction import check_prediction
from nccltune.verify.judging.reasons import Findings, explain
from nccltune.verify.judging.wording import comparison_sentence, overall_sentence

if TYPE_CHECKING:
    from nccltune.verify.judging.numbers import ArmSummary
    from nccltune.verify.judging.prediction import Prediction, PredictionCheck
    from nccltune.verify.model import Arm, Boot

QUOTE_START = ": '"
_UNCOUNTED = (
    "the server speculates, and its answers count no verify steps (spec_verify_ct): what a step "
    "takes is not known"
)
_COUNTED = "its answers count verify steps (spec_verify_ct), and it was started without speculation"
_ORDER = (Verdict.GAIN, Verdict.REGRESSION, Verdict.INCONCLUSIVE, Verdict.NO_DIFFERENCE)
"""Which answer of several comparisons is the verdict: the first that one of them gives."""


def judge(
    boots: Sequence[Boot],
    arms: Sequence[Arm],
    *,
    noise: float | None,
    boots_planned: int | None = None,
    problems: Sequence[str] = (),
    predictions: Mapping[str, Prediction] | None = None,
    operator: Mapping[str, str] | None = None,
) -> Judgement:
    """Judge every arm against the first.

    Args:
        boots: all of them.
        arms: the first is the baseline.
        noise: recorded boot-to-boot standard deviation of the log of ``ms_per_verify``; the least
            spread ever assumed.
        boots_planned: boots an arm that were to be made; None for as many as there are. Fewer, as
            after Ctrl-C, are judged by the strict level of an early look, for whoever stopped may
            have seen the figures.
        problems: why an arm could not be measured; any makes the verdict ``unusable``.
        predictions: by arm, what its settings should save.
        operator: variables that every arm was started with, whatever its profile.
    """
    troubles = (*problems, *untimed(boots, arms))
    if troubles:
        return unusable(troubles)
    baseline, *candidates = arms
    planned = boots_planned or max((_count(boots, arm) for arm in candidates), default=0)
    rule = rule_for(planned, len(candidates))
    summaries = summarize_arms(arms, boots)
    evidence: dict[str, Evidence] = {}
    comparisons = []
    for arm in candidates:
        look = look_at(boots, baseline, arm, rule, noise)
        evidence[arm.name] = proof = _evidence(look, boots, operator)
        check = _check(look, summaries[0], (predictions or {}).get(arm.name))
        comparisons.append(_comparison(look, proof, check, planned))
    verdict = next((v for v in _ORDER if any(c.answer is v for c in comparisons)), _ORDER[2])
    model = fit_steps(arms, boots, summaries)
    found = Findings(arms, boots, summaries, comparisons, model, evidence, planned)
    is_lost = any(proof.is_lost for proof in evidence.values())
    return Judgement(
        verdict=verdict,
        exit_code=_exit_code(verdict, is_lost=is_lost),
        sentence=overall_sentence(verdict, comparisons, is_simulated=is_simulated(boots, *arms)),
        comparisons=tuple(comparisons),
        reasons=tuple(explain(found, verdict)),
        cost_model=model,
    )


def is_decided(
    boots: Sequence[Boot], arms: Sequence[Arm], *, noise: float | None, boots_planned: int
) -> bool:
    """Whether more boots would change nothing: asked between blocks."""
    baseline, *candidates = arms
    rule = rule_for(boots_planned, len(candidates))
    if any(untimed(boots, arms)):
        return True
    return all(look_at(boots, baseline, arm, rule, noise).is_final for arm in candidates)


def unusable(troubles: Sequence[str]) -> Judgement:
    """Return the judgement where something could not be measured: no effect at all."""
    verdict = Verdict.UNUSABLE
    reasons = tuple(Reason(Cause.PROBLEM, text) for text in troubles)
    # What a server said is quoted where the problem is told, and not in every line about it.
    sentence = f"unusable: {troubles[0].partition(QUOTE_START)[0]}"
    return Judgement(verdict, EXIT_CODES[verdict], sentence, reasons=reasons)


def untimed(boots: Sequence[Boot], arms: Sequence[Arm]) -> Iterator[str]:
    """Say which boots gave no time of a decode step: no number is made up for them."""
    by_name = {arm.name: arm for arm in arms}
    for boot in boots:
        name = f"boot {boot.position + 1} ({boot.arm}) cannot be timed"
        counts = {stream.verify_count is not None for run in boot.runs for stream in run.streams}
        arm = by_name.get(boot.arm)
        expected = None if arm is None else counts_verifies(arm, boot)
        if expected is not None and (not expected) in counts:
            yield f"{name}: {_UNCOUNTED if expected else _COUNTED}"
        elif len(counts) > 1:
            yield f"{name}: some of its answers count verify steps (spec_verify_ct), some do not"
        elif not (is_time(boot.ms_per_verify) and is_time(boot.ms_per_token)):
            yield (
                f"{name}: an answer came in one piece, or its times make no sense; the server must "
                "stream"
            )


def fit_steps(
    arms: Sequence[Arm], boots: Sequence[Boot], summaries: Sequence[ArmSummary]
) -> CostModel | Refusal | None:
    """Fit the cost of a draft step; None where the arms do not differ in their number."""
    chosen = [
        (arm, summary, steps)
        for arm, summary in zip(arms, summaries, strict=True)
        if settings_of(arm) == settings_of(arms[0]) and summary.boot_count
        if (steps := steps_of(arm, boots)) is not None
    ]
    if len({steps for _, _, steps in chosen}) < 2:
        return None
    points = []
    for arm, summary, steps in chosen:
        if topk_of(arm, boots) > 1:
            return Refusal(
                f"{arm.name} drafts a tree (top-k above 1), and the cost model is of a chain"
            )
        length = summary.accept_length if steps else 1.0
        if length is None:
            return Refusal(f"the server does not say the accept length of {arm.name}")
        own = [boot.ms_per_verify for boot in boots if boot.arm == arm.name]
        times = tuple(ms for ms in own if ms is not None)
        points.append(ArmPoint(arm.name, steps, times, length, summary.accept_by_position))
    return fit_cost_model(points, is_simulated=is_simulated(boots, *arms))


def _evidence(look: Look, boots: Sequence[Boot], operator: Mapping[str, str] | None) -> Evidence:
    """Look for what forbids a claim; settings that both arms share made no difference."""
    found = gather_evidence((look.baseline, look.candidate), boots, operator)
    if settings_of(look.candidate) == settings_of(look.baseline):
        about_ranks = (Cause.NOT_IN_EFFECT, Cause.ENVIRONMENT_UNSEEN)
        told = tuple(reason for reason in found.reasons if reason.cause in about_ranks)
        found = Evidence(told, is_lost=found.is_lost, is_whole=found.is_whole)
    if not look.is_contradicted:
        return found
    text = (
        f"the time per step of {look.candidate.name} moved, and its time per token did not move "
        "with it: the server's counts of verify steps, or the moments of its streams, are not to "
        "be believed"
    )
    reasons = (Reason(Cause.NOT_SHOWN, text), *found.reasons)
    return replace(found, reasons=reasons, is_claimable=False)


def _count(boots: Sequence[Boot], arm: Arm) -> int:
    return sum(boot.arm == arm.name for boot in boots)


def _check(
    look: Look, baseline: ArmSummary, prediction: Prediction | None
) -> PredictionCheck | None:
    """Put the prediction beside the effect; it is of a step, between the same numbers of steps."""
    effect_pct, interval = effect_of(look.estimate)
    is_fit = look.is_about_settings and look.metric is Metric.MS_PER_VERIFY
    if prediction is None or not is_fit or effect_pct is None or baseline.ms_per_verify is None:
        return None
    return check_prediction(
        prediction,
        baseline_ms=baseline.ms_per_verify,
        effect_pct=effect_pct,
        effect_ci_pct=interval,
    )


def _comparison(
    look: Look, proof: Evidence, check: PredictionCheck | None, planned: int
) -> Comparison:
    answer = look.verdict(is_claimable=proof.is_claimable, is_tried=proof.is_tried)
    effect_pct, interval = effect_of(look.estimate)
    return Comparison(
        arm=look.candidate.name,
        baseline=look.baseline.name,
        metric=look.metric,
        answer=answer,
        effect_pct=effect_pct,
        effect_ci_pct=interval,
        level=look.estimate.level,
        block_count=look.estimate.block_count,
        guards=look.guards,
        check=check,
        sentence=comparison_sentence(look, answer, proof, planned),
        is_wholly_in_effect=proof.is_whole,
        noise_pct=None if look.noise is None else 100.0 * math.expm1(look.noise),
    )


def _exit_code(verdict: Verdict, *, is_lost: bool) -> ExitCode:
    """A profile that was not in effect was checked, and the answer is no."""
    is_open = is_lost and verdict is Verdict.INCONCLUSIVE
    return ExitCode.NO if is_open else EXIT_CODES[verdict]
