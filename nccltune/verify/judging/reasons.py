"""Why there is no gain, and what limits the answer: where the time of a decode step goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.block_rule import MIN_BLOCK_COUNT, GuardAnswer
from nccltune.verify.judging.comparison import GUARD_PROMPTS, is_simulated, steps_of
from nccltune.verify.judging.cost_model import CostModel, Refusal, is_rival, steps_in_words
from nccltune.verify.judging.judgement import Cause, Comparison, GuardReport, Reason, Verdict
from nccltune.verify.plan import DECIDING_BOOTS

if TYPE_CHECKING:
    from nccltune.verify.judging.evidence import Evidence
    from nccltune.verify.judging.numbers import ArmSummary
    from nccltune.verify.model import Arm, Boot

LOW_ACCEPTED_SHARE = 0.30
"""Accepted of the first proposed draft tokens. One draft model accepted 19 % of its tokens while it
was wired to the wrong layers, and 47 % once it was right."""
_JUDGED_STEPS = 5
"""Later draft tokens are seldom reached, also in a good draft."""
SMALL_SHARE = 0.10
"""Below this share of a step, all-reduces are not where the time goes."""


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was found, to be explained.

    Attributes:
        summaries: of each arm, in their order.
        evidence: by candidate.
        planned: boots an arm that were to be made.
    """

    arms: Sequence[Arm]
    boots: Sequence[Boot]
    summaries: Sequence[ArmSummary]
    comparisons: Sequence[Comparison]
    model: CostModel | Refusal | None
    evidence: Mapping[str, Evidence]
    planned: int


def explain(found: Findings, verdict: Verdict) -> Iterator[Reason]:
    """Yield each reason once, what forbids a claim first."""
    yield from dict.fromkeys(one for proof in found.evidence.values() for one in proof.reasons)
    yield from _losses(found)
    if verdict is not Verdict.GAIN:
        yield from _low_acceptance(found)
        yield from _small_share(found.comparisons)
    for each in found.comparisons:
        yield from _guards(each)
        if each.noise_pct is not None:
            yield Reason(Cause.RECORDED_NOISE, noise_text(each.noise_pct))
    if any(each.block_count < MIN_BLOCK_COUNT for each in found.comparisons):
        yield _few_boots(found.planned)
    if is_simulated(found.boots, *found.arms):
        text = (
            "the server makes acceptance up as it was told (SGLANG_SIMULATE_ACC_LEN): times of a "
            "step are real, tokens per second are not those of real prompts"
        )
        yield Reason(Cause.SIMULATED, text)


def noise_text(noise_pct: float) -> str:
    """Say that the interval is as wide as earlier verifies make it."""
    return (
        f"boots of this launch usually lie {noise_pct:.1f} % apart here, by earlier verifies: the "
        "interval allows for that, though these boots lie closer together"
    )


def _few_boots(planned: int) -> Reason:
    text = (
        f"fewer than {MIN_BLOCK_COUNT} blocks of 4 boots say nothing of their own spread, and "
        "never decide"
    )
    if planned < DECIDING_BOOTS:
        text += f": give --boots {DECIDING_BOOTS} or more"
    return Reason(Cause.FEW_BOOTS, text)


def _guards(compared: Comparison) -> Iterator[Reason]:
    for guard in compared.guards:
        prompt = GUARD_PROMPTS[guard.name]
        if guard.answer is GuardAnswer.REJECTED:
            text = f"{compared.arm}: time to first token of the {prompt} prompt surely got longer"
            if not guard.is_deciding:
                text += "; it is told, and decides nothing where more than settings differs"
            yield Reason(Cause.GUARD_REJECTED, text)
        is_open = guard.answer is GuardAnswer.MORE and guard.is_deciding
        if is_open and compared.answer is not Verdict.NO_DIFFERENCE:
            text = (
                f"{compared.arm}: whether time to first token of the {prompt} prompt got longer is "
                "not decided"
            )
            yield Reason(Cause.GUARD_UNDECIDED, text + _unevenness(guard))


def _unevenness(guard: GuardReport) -> str:
    """Say how uneven it is without the settings that are judged."""
    if not guard.is_too_uneven:
        return ""
    return (
        f": boots of the baseline alone lie about {guard.spread_pct:.0f} % apart in it, too far "
        "for the boots planned to tell"
    )


def _losses(found: Findings) -> Iterator[Reason]:
    """Yield where plain decoding was found to beat speculation, whichever is the baseline."""
    summaries = {summary.arm: summary for summary in found.summaries}
    steps = {arm.name: steps_of(arm, found.boots) for arm in found.arms}
    for each in found.comparisons:
        pair = {
            Verdict.GAIN: (each.baseline, each.arm),
            Verdict.REGRESSION: (each.arm, each.baseline),
        }.get(each.answer)
        if pair is None or steps[pair[1]] != 0 or not steps[pair[0]]:
            continue
        loser, plain = (summaries[name] for name in pair)
        yield _speculation_loses(loser, steps[loser.arm] or 0, plain, found.model)


def _small_share(comparisons: Sequence[Comparison]) -> Iterator[Reason]:
    """Say where NCCL settings cannot save much, whatever they are."""
    for each in comparisons:
        if each.check is not None and each.check.nccl_share < SMALL_SHARE:
            share = 100.0 * each.check.nccl_share
            text = (
                f"all-reduces take {share:.1f} % of a step of {each.baseline}, by their measured "
                "times: no NCCL settings can save more than that"
            )
            yield Reason(Cause.SMALL_SHARE, text)
            return


def _low_acceptance(found: Findings) -> Iterator[Reason]:
    """Point at the draft model where it is seldom right; made-up acceptance says nothing of it."""
    for arm, summary in zip(found.arms, found.summaries, strict=True):
        steps = steps_of(arm, found.boots)
        if not steps or summary.accept_length is None or is_simulated(found.boots, arm):
            continue
        first = min(steps, _JUDGED_STEPS)
        share = (summary.accept_length - 1.0) / first
        if share < LOW_ACCEPTED_SHARE:
            text = (
                f"{arm.name}: acceptance is low, {summary.accept_length:.2f} tokens a step at "
                f"{steps_in_words(steps)} ({100 * share:.0f} % of the first {first} draft tokens): "
                "look at the draft model and the layers it is fed from, not at NCCL"
            )
            yield Reason(Cause.LOW_ACCEPTANCE, text)


def _speculation_loses(
    loser: ArmSummary, loser_steps: int, plain: ArmSummary, model: CostModel | Refusal | None
) -> Reason:
    """Say why plain decoding beats an arm, and where speculation would win."""
    text = f"plain decoding beats {loser.arm}: there speculation itself loses, whatever NCCL does"
    if loser.ms_per_verify and plain.ms_per_verify and loser.accept_length:
        price = loser.ms_per_verify / plain.ms_per_verify
        text += (
            f"; a step costs as much as {price:.2f} plain ones and brings "
            f"{loser.accept_length:.2f} tokens"
        )
    return Reason(Cause.SPECULATION_LOSES, f"{text}; {_winning(model, loser_steps)}")


def _winning(model: CostModel | Refusal | None, loser_steps: int) -> str:
    if not isinstance(model, CostModel):
        why = f" ({model.reason})" if isinstance(model, Refusal) else ""
        return f"at how many steps it would win cannot be told{why}"
    plain = model.at(0)
    if plain is None:
        return "at how many steps it would win cannot be told: plain decoding is not in the model"
    faster = [one for one in model.estimates if one.num_steps and one.tok_s > plain.tok_s]
    most = model.estimates[-1].num_steps
    if not faster:
        return f"by the cost model it would win at no number of steps up to {most}"
    best = max(faster, key=lambda one: one.tok_s)
    how = "measured" if best.is_measured else "by the cost model, not measured"
    listed = ", ".join(str(one.num_steps) for one in faster)
    text = f"it would win at {listed} draft steps, most at {best.num_steps}: {best.tok_s:.1f} "
    text += f"against {plain.tok_s:.1f} tok/s while decoding ({how})"
    if is_rival(plain, best):
        text += ", too close to be sure"
    if best.num_steps == loser_steps:
        text += "; prefill takes the difference"
    return text
