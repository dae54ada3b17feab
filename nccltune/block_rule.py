"""The rule that decides candidate against baseline from fresh launches in ABBA order.

Pure: it judges numbers and launches nothing. docs/statistics.md explains it, and
docs/results/decision-rule.txt holds its simulated error rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nccltune.stats import student_t_quantile

GUARD_REJECT_RATIO = 1.02
"""A guard is rejected once it is surely this much slower."""
GUARD_ACCEPT_RATIO = 1.05
"""A guard is accepted once it is surely less slow than this."""
MIN_BLOCK_COUNT = 2
"""One block says nothing of its own spread."""


@dataclass(frozen=True, slots=True)
class Block:
    """Log scores of four launches in the order they ran: baseline, candidate, candidate, baseline.

    All against one common reference, whichever it is: only differences matter.
    """

    baseline_first: float
    candidate_first: float
    candidate_last: float
    baseline_last: float


class Answer(StrEnum):
    """What the blocks so far say of the candidate."""

    GAIN = "gain"
    LOSS = "loss"
    NO_GAIN_WORTH_HAVING = "no_gain_worth_having"
    CONTINUE = "continue"
    INCONCLUSIVE = "inconclusive"


class GuardAnswer(StrEnum):
    """What the blocks so far say of a payload that must not get slower."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    MORE = "more"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Candidate over baseline in log, with the interval that may be used at this look.

    Below two blocks the interval is infinite.

    Attributes:
        level: two-sided error probability of the interval at this look.
        scale: standard deviation of one block's difference that the interval rests on.
    """

    mean: float
    low: float
    high: float
    scale: float
    df: int
    level: float
    block_count: int

    @property
    def ratio(self) -> float:
        """Candidate over baseline."""
        return math.exp(self.mean)

    @property
    def ratio_low(self) -> float:
        """Lower end of the interval; 0 where nothing is known."""
        return math.exp(self.low)

    @property
    def ratio_high(self) -> float:
        """Upper end of the interval; infinite where nothing is known."""
        return math.exp(self.high)


def estimate_blocks(blocks: Sequence[Block], *, level: float, floor: float = 0.0) -> Estimate:
    """Estimate candidate over baseline from whole blocks.

    The effect is the mean of the block differences (b1 + b2 - a1 - a2) / 2, which a linear drift
    leaves alone and whose variance is that of one launch. That variance is estimated twice, from
    independent parts of the launches: by the differences themselves (K - 1 degrees of freedom), and
    by how a2 - a1 and b2 - b1 vary from block to block (K - 1 each), where again a linear drift
    cancels and the arms may be unequally noisy. The larger of the two counts, and never less than
    ``floor`` squared; with the 3K - 3 degrees of freedom of both, which is safe for the larger one
    where it would be exact for their mean.
    """
    count = len(blocks)
    if count == 0:
        return Estimate(0.0, -math.inf, math.inf, math.inf, 0, level, 0)
    differences = [
        0.5 * (b.candidate_first + b.candidate_last - b.baseline_first - b.baseline_last)
        for b in blocks
    ]
    mean = math.fsum(differences) / count
    if count < MIN_BLOCK_COUNT:
        return Estimate(mean, -math.inf, math.inf, math.inf, 0, level, count)
    between = _squares(differences)
    within = _squares([0.5 * (b.baseline_last - b.baseline_first) for b in blocks])
    within += _squares([0.5 * (b.candidate_last - b.candidate_first) for b in blocks])
    df = _degrees_of_freedom(count)
    scale = max(math.sqrt(max(between, within) / (count - 1)), floor)
    half = student_t_quantile(1.0 - 0.5 * level, df) * scale / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, scale, df, level, count)


def _degrees_of_freedom(block_count: int) -> int:
    return 3 * (block_count - 1)


def _squares(values: Sequence[float]) -> float:
    """Sum the squared distances from the mean."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


@dataclass(frozen=True, slots=True)
class BlockRule:
    """When to stop adding blocks, and what may be claimed then.

    Each look has a level of its own; they sum to the total error probability, so that the chance
    of any false claim stays below it however many looks were used (union bound). Where the budget
    ends early, the last look may use all that is left.

    Attributes:
        looks: block counts at which something may be decided; the last is the most ever run.
        levels: two-sided error probability spent at each look.
        min_gain: smallest gain worth having; a smaller estimate is never claimed.
        is_loss_sought: go on while it may still be a loss, where that is an answer of its own; a
            search only asks whether there is a gain.
    """

    looks: tuple[int, ...] = (2, 3, 4, 6, 8, 12)
    levels: tuple[float, ...] = (0.002, 0.004, 0.005, 0.007, 0.010, 0.022)
    min_gain: float = 0.01
    is_loss_sought: bool = False

    def __post_init__(self) -> None:
        """Refuse looks that are not ascending and levels that are not probabilities."""
        is_ascending = list(self.looks) == sorted(set(self.looks))
        if not self.looks or not is_ascending or self.looks[0] < MIN_BLOCK_COUNT:
            raise ValueError(f"looks must ascend from {MIN_BLOCK_COUNT} or more, not {self.looks}")
        if len(self.levels) != len(self.looks) or min(self.levels) <= 0 or self.total_level >= 1:
            raise ValueError(f"need one positive level a look, sum below 1, not {self.levels}")
        if not 0.0 <= self.min_gain < 1.0:
            raise ValueError(f"min_gain must be in [0, 1), not {self.min_gain}")

    @property
    def max_block_count(self) -> int:
        """Most blocks ever run."""
        return self.looks[-1]

    @property
    def total_level(self) -> float:
        """Bound of the false-claim rate over all looks."""
        return math.fsum(self.levels)

    def limited_to(self, block_count: int) -> BlockRule:
        """Return the rule for another budget; its last look spends what later ones would have."""
        kept = [look for look in self.looks[:-1] if look < block_count]
        levels = self.levels[: len(kept)]
        rest = self.total_level - math.fsum(levels)
        return replace(self, looks=(*kept, block_count), levels=(*levels, rest))

    def shared_by(self, comparison_count: int) -> BlockRule:
        """Return the rule for each of several comparisons of which the best is claimed."""
        return replace(self, levels=tuple(level / comparison_count for level in self.levels))

    def is_look(self, block_count: int, *, is_last: bool = False) -> bool:
        """Whether anything may be decided after so many blocks."""
        if block_count < MIN_BLOCK_COUNT:
            return False
        return is_last or block_count in self.looks or block_count >= self.max_block_count

    def level_at(self, block_count: int, *, is_last: bool = False) -> float:
        """Return the level of the interval after so many blocks; between looks, the next look's."""
        later = [lv for lk, lv in zip(self.looks, self.levels, strict=True) if lk >= block_count]
        if not later:
            return self.levels[-1]
        return math.fsum(later) if is_last else later[0]

    def decide(
        self, blocks: Sequence[Block], *, floor: float | None = None, is_last: bool = False
    ) -> tuple[Answer, Estimate]:
        """Judge the score after whole blocks.

        Args:
            blocks: every block so far.
            floor: the host's recorded A/A noise, None where there is none.
            is_last: no block will follow, for a reason that has nothing to do with the data.
        """
        level = self.level_at(len(blocks), is_last=is_last)
        estimate = estimate_blocks(blocks, level=level, floor=floor or 0.0)
        is_last = is_last or len(blocks) >= self.max_block_count
        worth_having = -math.log1p(-self.min_gain)
        if self.is_look(len(blocks), is_last=is_last):
            if estimate.high < 0.0 and estimate.mean < -worth_having:
                return Answer.GAIN, estimate
            if estimate.low > 0.0 and estimate.mean > worth_having:
                return Answer.LOSS, estimate
            is_loss_open = self.is_loss_sought and estimate.high > worth_having
            if estimate.low > -worth_having and not is_loss_open:
                return Answer.NO_GAIN_WORTH_HAVING, estimate
        return (Answer.INCONCLUSIVE if is_last else Answer.CONTINUE), estimate

    def decide_guard(
        self, blocks: Sequence[Block], *, is_last: bool = False
    ) -> tuple[GuardAnswer, Estimate]:
        """Judge one guard after whole blocks; each guard has the whole error level for itself."""
        level = self.level_at(len(blocks), is_last=is_last)
        estimate = estimate_blocks(blocks, level=level)
        if not self.is_look(len(blocks), is_last=is_last):
            return GuardAnswer.MORE, estimate
        return decide_guard(estimate.ratio_low, estimate.ratio_high), estimate

    def can_accept_guard(self, scale: float) -> bool:
        """Whether a guard that does not move at all would be accepted, with every block planned.

        Args:
            scale: spread of the guard that was seen, as in ``Estimate.scale``.
        """
        count = self.max_block_count
        factor = student_t_quantile(1.0 - 0.5 * self.total_level, _degrees_of_freedom(count))
        return factor * scale / math.sqrt(count) < math.log(GUARD_ACCEPT_RATIO)


def decide_guard(ratio_low: float, ratio_high: float) -> GuardAnswer:
    """Judge a guard by the interval of its ratio.

    Where both limits hold, as for [1.03, 1.04], the payload surely got slower and is rejected.
    """
    if ratio_low > GUARD_REJECT_RATIO:
        return GuardAnswer.REJECTED
    if ratio_high < GUARD_ACCEPT_RATIO:
        return GuardAnswer.ACCEPTED
    return GuardAnswer.MORE
