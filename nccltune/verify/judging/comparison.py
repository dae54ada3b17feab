"""One arm against the baseline, block by block: the rule, the guards, and what may be claimed."""

from __future__ import annotations

import math
import statistics
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
from nccltune.verify.load.believing import says_speculation
from nccltune.verify.plan import BOOTS_A_ROUND, blocks_of

if TYPE_CHECKING:
    from nccltune.verify.model import Arm, Boot

GUARD_PROMPTS: Mapping[str, str] = {"ttft_short": "short", "ttft_long": "long"}
"""Guard -> the prompt whose time to first token it watches."""
_MAIN_GUARD = "ttft_long"
"""The one whose time holds much communication; without it no gain is claimed. A short prompt's time
to first token is the host's more than NCCL's: on two H200 its boots lie 6 to 25 % apart, those of
the long one about 1 % (docs/results/two-h200-sglang)."""

Reading = Callable[["Boot"], float | None]

_LUCK = math.log(1.03)
"""How far accept lengths of equal servers may lie apart: rounding turns some tokens."""
_MIN_SHOWN = 0.5
"""Of what is saved of a step, what has to show in the time of a token."""


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


def counts_verifies(arm: Arm, boot: Boot) -> bool | None:
    """Return whether answers of this boot must count verify steps; None where nobody knows.

    A launch that asks for speculation is not believed to have none.
    """
    if not arm.argv:
        return None
    return arm.is_speculative or says_speculation(boot.seen.server_info)


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
        is_shown: what a step took more or less, tokens took more or less too. True where arms are
            compared by tokens, or draft different numbers of steps.
        is_last: all boots that were planned are made.
        noise: the recorded spread, in log, where it and not these boots leaves the answer open.
    """

    baseline: Arm
    candidate: Arm
    metric: Metric
    answer: Answer
    estimate: Estimate
    guards: tuple[GuardReport, ...]
    is_about_settings: bool
    is_shown: bool = True
    is_last: bool = False
    noise: float | None = None

    def guards_that(self, answer: GuardAnswer) -> tuple[GuardReport, ...]:
        """Return the guards that decide, and gave this answer."""
        return tuple(one for one in self.guards if one.is_deciding and one.answer is answer)

    @property
    def open_guards(self) -> tuple[GuardReport, ...]:
        """Guards that keep a gain from being claimed: undecided, but not as they always would be.

        A guard that no number of these boots could accept would forbid every gain of the host, the
        true ones too. Once all boots are made it does not, unless it looks worse than by luck.
        """
        undecided = self.guards_that(GuardAnswer.MORE)
        if not self.is_last:
            return undecided
        return tuple(
            one
            for one in undecided
            if one.name == _MAIN_GUARD or not one.is_too_uneven or one.is_suspect
        )

    @property
    def is_final(self) -> bool:
        """Whether more blocks would change nothing."""
        if self.guards_that(GuardAnswer.REJECTED):
            return True
        is_open = self.answer is Answer.GAIN and self.open_guards
        return self.answer not in (Answer.CONTINUE, Answer.INCONCLUSIVE) and not is_open

    @property
    def is_contradicted(self) -> bool:
        """Whether steps say what tokens do not show."""
        return self.answer in (Answer.GAIN, Answer.LOSS) and not self.is_shown

    def verdict(self, *, is_claimable: bool, is_tried: bool = True) -> Verdict:
        """Return the answer.

        Args:
            is_claimable: the settings can have made the difference; else none is claimed.
            is_tried: the settings were in effect; else that nothing changed is no answer.
        """
        is_rejected = bool(self.guards_that(GuardAnswer.REJECTED))
        if self.answer is Answer.NO_GAIN_WORTH_HAVING and not is_rejected:
            return Verdict.NO_DIFFERENCE if is_tried else Verdict.INCONCLUSIVE
        if not is_claimable or (self.is_contradicted and not is_rejected):
            return Verdict.INCONCLUSIVE
        if is_rejected or self.answer is Answer.LOSS:
            return Verdict.REGRESSION
        if self.answer is Answer.GAIN and not self.open_guards:
            return Verdict.GAIN
        return Verdict.INCONCLUSIVE


def look_at(
    boots: Sequence[Boot], baseline: Arm, candidate: Arm, rule: BlockRule, noise: float | None
) -> Look:
    """Judge a candidate by the whole blocks so far."""
    metric = _metric(boots, baseline, candidate)
    is_alike = baseline.is_speculative == candidate.is_speculative and (
        steps_of(baseline, boots) == steps_of(candidate, boots)
    )
    is_about_settings = is_alike and settings_of(baseline) != settings_of(candidate)
    found = blocks_of(boots, baseline.name, candidate.name)
    readings = {Metric.MS_PER_VERIFY: _ms_per_verify, Metric.MS_PER_TOKEN: _ms_per_token}
    blocks = list(_logs(found, readings[metric], baseline))
    answer, estimate = rule.decide(blocks, floor=noise)
    is_open = answer in (Answer.CONTINUE, Answer.INCONCLUSIVE) and estimate.scale == noise
    guards = tuple(
        _guard(name, prompt, found, rule, baseline, is_deciding=is_about_settings)
        for name, prompt in GUARD_PROMPTS.items()
    )
    is_shown = not is_alike or _is_shown(found, rule, baseline, estimate)
    is_last = len(found) >= rule.max_block_count
    return Look(
        baseline,
        candidate,
        metric,
        answer,
        estimate,
        guards,
        is_about_settings,
        is_shown,
        is_last,
        noise if is_open else None,
    )


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


def _is_shown(
    found: Sequence[tuple[Boot, Boot, Boot, Boot]],
    rule: BlockRule,
    baseline: Arm,
    of_step: Estimate,
) -> bool:
    """Tell whether the time of a token moved as that of a step did, as far as decode goes.

    Accept length may differ by luck, and is allowed for; by more than luck it is none, and then
    the token itself has to show the change.
    """
    shares = [share for boots in found for boot in boots if (share := boot.decode_share)]
    if not shares or not of_step.block_count:
        return True

    def change(read: Reading) -> float:
        return rule.decide(list(_logs(found, read, baseline)))[1].mean

    luck = max(-_LUCK, min(_LUCK, change(_accept_length)))
    expected = math.log1p(max(shares) * math.expm1(of_step.mean))
    shown = change(_ms_per_token) + luck
    return shown * expected > 0.0 and abs(shown) >= _MIN_SHOWN * abs(expected)


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
    if interval is None:
        return GuardReport(name, answer, effect_pct, interval, is_deciding)
    # By the baseline alone: a candidate that is uneven itself must not be excused by that.
    spread = statistics.stdev(
        each for block in blocks for each in (block.baseline_first, block.baseline_last)
    )
    return GuardReport(
        name,
        answer,
        effect_pct,
        interval,
        is_deciding,
        spread_pct=100.0 * math.expm1(spread),
        is_too_uneven=answer is GuardAnswer.MORE and not rule.can_accept_guard(spread),
        is_suspect=estimate.mean > estimate.scale / math.sqrt(estimate.block_count),
    )


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


def _accept_length(boot: Boot) -> float | None:
    return boot.accept_length
