"""One arm against the baseline, block by block: the rule, the guards, and what may be claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.block_rule import (
    MIN_BLOCK_COUNT,
    Answer,
    Block,
    BlockRule,
    Estimate,
    GuardAnswer,
)
from nccltune.verify.judging.judgement import GuardReport, Metric, Verdict
from nccltune.verify.judging.numbers import is_time, middle
from nccltune.verify.plan import BOOTS_A_ROUND, blocks_of

if TYPE_CHECKING:
    from nccltune.verify.model import Arm, Boot

GUARD_PROMPTS: Mapping[str, str] = {"ttft_short": "short", "ttft_long": "long"}
"""Guard -> the prompt whose time to first token it watches."""

Reading = Callable[["Boot"], float | None]


def rule_for(boots_planned: int, comparison_count: int) -> BlockRule:
    """Return the rule for so many boots an arm; several candidates share its error level."""
    block_count = max(MIN_BLOCK_COUNT, boots_planned // BOOTS_A_ROUND)
    rule = BlockRule(is_loss_sought=True).limited_to(block_count)
    return rule.shared_by(max(1, comparison_count))


def settings_of(arm: Arm) -> Mapping[str, str]:
    """Return what is put into the arm's environment."""
    return {} if arm.profile is None else arm.profile.settings


def steps_of(arm: Arm, boots: Sequence[Boot]) -> int | None:
    """Return draft steps, 0 without speculation; None where neither arm nor server says."""
    if not arm.is_speculative:
        return 0
    if arm.num_steps is not None:
        return arm.num_steps
    return _number_seen(arm, boots, "speculative_num_steps")


def topk_of(arm: Arm, boots: Sequence[Boot]) -> int:
    """Return how many branches the draft has at each step; 1 where nobody says."""
    return _number_seen(arm, boots, "speculative_eagle_topk") or 1


def is_simulated(boots: Sequence[Boot], *arms: Arm) -> bool:
    """Whether a server of these arms made acceptance up."""
    names = {arm.name for arm in arms}
    return any(boot.seen.is_simulated_acceptance for boot in boots if boot.arm in names)


def _number_seen(arm: Arm, boots: Sequence[Boot], key: str) -> int | None:
    found = (boot.seen.server_info.get(key) for boot in boots if boot.arm == arm.name)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


@dataclass(frozen=True, slots=True)
class Look:
    """What the rule makes of two arms at this moment.

    Attributes:
        is_about_settings: the two differ in NCCL settings and in nothing else.
    """

    baseline: Arm
    candidate: Arm
    metric: Metric
    answer: Answer
    estimate: Estimate
    guards: tuple[GuardReport, ...]
    is_about_settings: bool

    def guards_that(self, answer: GuardAnswer) -> tuple[GuardReport, ...]:
        """Return the guards that decide, and gave this answer."""
        return tuple(one for one in self.guards if one.is_deciding and one.answer is answer)

    @property
    def is_final(self) -> bool:
        """Whether more blocks would change nothing."""
        if self.guards_that(GuardAnswer.REJECTED):
            return True
        is_open = self.answer is Answer.GAIN and self.guards_that(GuardAnswer.MORE)
        return self.answer not in (Answer.CONTINUE, Answer.INCONCLUSIVE) and not is_open

    def verdict(self, *, is_claimable: bool) -> Verdict:
        """Return the answer.

        Args:
            is_claimable: the settings can have made the difference; else none is claimed.
        """
        is_rejected = bool(self.guards_that(GuardAnswer.REJECTED))
        if self.answer is Answer.NO_GAIN_WORTH_HAVING and not is_rejected:
            return Verdict.NO_DIFFERENCE
        if not is_claimable:
            return Verdict.INCONCLUSIVE
        if is_rejected or self.answer is Answer.LOSS:
            return Verdict.REGRESSION
        if self.answer is Answer.GAIN and not self.guards_that(GuardAnswer.MORE):
            return Verdict.GAIN
        return Verdict.INCONCLUSIVE


def look_at(
    boots: Sequence[Boot], baseline: Arm, candidate: Arm, rule: BlockRule, noise: float | None
) -> Look:
    """Judge a candidate by the whole blocks so far."""
    metric = _metric(boots, baseline, candidate)
    is_about_settings = (
        settings_of(baseline) != settings_of(candidate)
        and baseline.is_speculative == candidate.is_speculative
        and steps_of(baseline, boots) == steps_of(candidate, boots)
    )
    found = blocks_of(boots, baseline.name, candidate.name)
    readings = {Metric.MS_PER_VERIFY: _ms_per_verify, Metric.MS_PER_TOKEN: _ms_per_token}
    answer, estimate = rule.decide(list(_logs(found, readings[metric], baseline)), floor=noise)
    guards = tuple(
        _guard(name, prompt, found, rule, baseline, is_deciding=is_about_settings)
        for name, prompt in GUARD_PROMPTS.items()
    )
    return Look(baseline, candidate, metric, answer, estimate, guards, is_about_settings)


def effect_of(
    estimate: Estimate,
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the effect in percent, above 0 a gain, and its interval where there is one."""
    if not estimate.block_count:
        return None, None
    effect_pct = 100.0 * (1.0 - estimate.ratio)
    if not math.isfinite(estimate.ratio_high):
        return effect_pct, None
    return effect_pct, (100.0 * (1.0 - estimate.ratio_high), 100.0 * (1.0 - estimate.ratio_low))


def _metric(boots: Sequence[Boot], baseline: Arm, candidate: Arm) -> Metric:
    """Choose what is comparable: a step of fewer tokens is always quicker, and brings fewer."""
    if baseline.is_speculative != candidate.is_speculative:
        return Metric.MS_PER_TOKEN
    if steps_of(baseline, boots) == steps_of(candidate, boots):
        return Metric.MS_PER_VERIFY
    # Tokens a step are what the server was told to make up: only the step is measured.
    is_made_up = is_simulated(boots, baseline, candidate)
    return Metric.MS_PER_VERIFY if is_made_up else Metric.MS_PER_TOKEN


def _guard(
    name: str,
    prompt: str,
    found: Sequence[tuple[Boot, Boot, Boot, Boot]],
    rule: BlockRule,
    baseline: Arm,
    *,
    is_deciding: bool,
) -> GuardReport:
    """Judge one prompt's time to first token; one that was not measured stays undecided."""

    def read(boot: Boot) -> float | None:
        return middle(boot.ttft_short_ms if prompt == "short" else boot.ttft_long_ms)

    blocks = list(_logs(found, read, baseline))
    answer, estimate = rule.decide_guard(blocks)
    effect_pct, interval = effect_of(estimate)
    return GuardReport(name, answer, effect_pct, interval, is_deciding)


def _logs(
    found: Sequence[tuple[Boot, Boot, Boot, Boot]], read: Reading, baseline: Arm
) -> Iterator[Block]:
    """Yield the blocks in logarithms; one that lacks a reading is no block."""
    for boots in found:
        values = [value for boot in boots if is_time(value := read(boot)) and value is not None]
        if len(values) == len(boots) and boots[0].arm == baseline.name:
            yield Block(*(math.log(value) for value in values))


def _ms_per_verify(boot: Boot) -> float | None:
    return boot.ms_per_verify


def _ms_per_token(boot: Boot) -> float | None:
    return boot.ms_per_token
