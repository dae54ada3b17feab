"""The sentences of a verdict: what was found, how sure it is, and what would make it surer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nccltune.block_rule import MIN_BLOCK_COUNT, Answer, GuardAnswer
from nccltune.verify.judging.comparison import GUARD_PROMPTS, effect_of
from nccltune.verify.judging.judgement import Comparison, Metric, Verdict
from nccltune.verify.plan import BOOTS_A_ROUND

if TYPE_CHECKING:
    from nccltune.verify.judging.comparison import Look
    from nccltune.verify.judging.evidence import Evidence
    from nccltune.verify.judging.judgement import GuardReport

_METRIC_WORDS: Mapping[Metric, str] = {
    Metric.MS_PER_VERIFY: "time per verify step",
    Metric.MS_PER_TOKEN: "time per token",
}


def comparison_sentence(look: Look, answer: Verdict, proof: Evidence, planned: int) -> str:
    """Say what one comparison came to.

    Args:
        look: what the rule made of it.
        answer: the verdict drawn from that.
        proof: whether its settings can have made the difference.
        planned: boots an arm that were to be made.
    """
    arm, baseline = look.candidate.name, look.baseline.name
    what = _metric_words(look)
    figures = in_figures(*effect_of(look.estimate))
    count = look.estimate.block_count
    rejected = look.guards_that(GuardAnswer.REJECTED)
    if answer is Verdict.GAIN:
        text = f"{arm} saves {figures} of the {what} of {baseline}"
        untold = look.guards_that(GuardAnswer.MORE)
        return text + (f"; {_in_words(untold)} varies too much to compare" if untold else "")
    if answer is Verdict.REGRESSION and look.answer is Answer.LOSS:
        more = as_cost(*effect_of(look.estimate))
        return f"{arm} is slower than {baseline}: it takes {more} more {what}"
    if answer is Verdict.REGRESSION:
        return (
            f"{arm} makes {_in_words(rejected)} longer than {baseline} does; of the {what} it "
            f"saves {figures}"
        )
    if answer is Verdict.NO_DIFFERENCE:
        return f"no difference worth having: {arm} saves {figures} of the {what} of {baseline}"
    if not proof.is_claimable:
        return f"nothing is claimed for {arm}: {proof.reasons[0].text}"
    if count < MIN_BLOCK_COUNT:
        blocks = "no whole block" if not count else "one block"
        return f"undecided: {blocks} of 4 boots of {arm} against {baseline}"
    if look.answer is Answer.GAIN:
        undecided = _in_words(look.open_guards)
        return (
            f"undecided: {arm} saves {figures} of the {what} of {baseline}, and whether "
            f"{undecided} gets longer is open"
        )
    more = f"more boots tell more (--boots {2 * planned})"
    if BOOTS_A_ROUND * count < planned:
        more = f"{count * BOOTS_A_ROUND} of {planned} boots an arm were made"
    return (
        f"undecided after {count} blocks of 4 boots: {arm} saves {figures} of the {what} of "
        f"{baseline}; {more}"
    )


def overall_sentence(
    verdict: Verdict, comparisons: Sequence[Comparison], *, is_simulated: bool
) -> str:
    """Join what the comparisons that made the verdict say; the largest effect first."""
    chosen = [each for each in comparisons if each.answer is verdict]
    chosen.sort(key=lambda each: -abs(each.effect_pct or 0.0))
    text = "; ".join(each.sentence for each in chosen) or "undecided: nothing was compared"
    slower = [each.arm for each in comparisons if each.answer is Verdict.REGRESSION]
    if verdict is Verdict.GAIN and slower:
        text += f"; slower: {', '.join(slower)}"
    return f"{text} (acceptance is simulated)" if is_simulated else text


def in_figures(effect_pct: float | None, interval: tuple[float, float] | None) -> str:
    """Write ``4.8 % (2.1 to 7.4 %)``; what rounds to nothing has no sign."""
    if effect_pct is None:
        return "an unknown share"
    if interval is None:
        return f"{effect_pct:z.1f} % (no interval)"
    low, high = interval
    return f"{effect_pct:z.1f} % ({low:z.1f} to {high:z.1f} %)"


def as_cost(effect_pct: float | None, interval: tuple[float, float] | None) -> str:
    """Write a loss as what it costs."""
    turned = None if interval is None else (-interval[1], -interval[0])
    return in_figures(-(effect_pct or 0.0), turned)


def _metric_words(look: Look) -> str:
    if look.candidate.is_speculative or look.metric is Metric.MS_PER_TOKEN:
        return _METRIC_WORDS[look.metric]
    return "time per decode step"


def _in_words(guards: Sequence[GuardReport]) -> str:
    prompts = " and the ".join(GUARD_PROMPTS[guard.name] for guard in guards)
    return f"time to first token of the {prompts} prompt"
