from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from nccltune.block_rule import (
    Answer,
    Block,
    BlockRule,
    GuardAnswer,
    decide_guard,
    estimate_blocks,
)

RULE = BlockRule()


def block(source: random.Random, noise: float, effect: float = 0.0, drift: float = 0.0) -> Block:
    logs = [drift * idx + noise * source.gauss(0.0, 1.0) for idx in range(4)]
    return Block(logs[0], logs[1] + effect, logs[2] + effect, logs[3])


def run(rule: BlockRule, draw: Callable[[], Block], floor: float | None = None) -> Answer:
    blocks: list[Block] = []
    while True:
        blocks.append(draw())
        answer, _ = rule.decide(blocks, floor=floor)
        if answer is not Answer.CONTINUE:
            return answer


def is_claim(answer: Answer) -> bool:
    return answer in (Answer.GAIN, Answer.LOSS)


def binomial_limit(count: int, rate: float) -> float:
    """Four standard deviations above the mean."""
    return count * rate + 4.0 * math.sqrt(count * rate * (1.0 - rate))


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.04])
@pytest.mark.parametrize("floor_share", [0.0, 0.5, 1.0])
def test_decide_equal_arms_claims_at_most_at_the_stated_rate(
    noise: float, floor_share: float
) -> None:
    source = random.Random(f"{noise} {floor_share}")
    claims = sum(
        is_claim(run(RULE, lambda: block(source, noise), floor_share * noise)) for _ in range(400)
    )

    assert claims <= binomial_limit(400, RULE.total_level)


@pytest.mark.parametrize("block_count", [2, 3, 5, 7])
def test_decide_equal_arms_at_the_end_of_a_small_budget_keeps_the_rate(block_count: int) -> None:
    source = random.Random(block_count)
    rule = BlockRule(min_gain=0.0).limited_to(block_count)
    claims = sum(is_claim(run(rule, lambda: block(source, 0.03))) for _ in range(600))

    assert claims <= binomial_limit(600, RULE.total_level)


def test_decide_real_gain_is_found() -> None:
    source = random.Random(5)
    answers = [run(RULE, lambda: block(source, 0.02, math.log(0.95))) for _ in range(100)]

    assert answers.count(Answer.GAIN) >= 98


def test_decide_real_loss_is_found_where_it_is_sought() -> None:
    source = random.Random(6)
    rule = BlockRule(is_loss_sought=True)
    answers = [run(rule, lambda: block(source, 0.02, math.log(1.08))) for _ in range(50)]

    assert answers.count(Answer.LOSS) >= 48


def test_decide_real_loss_ends_a_search_for_gains() -> None:
    source = random.Random(6)
    answers = {run(RULE, lambda: block(source, 0.02, math.log(1.08))) for _ in range(50)}

    assert answers <= {Answer.LOSS, Answer.NO_GAIN_WORTH_HAVING}


def test_decide_gain_below_the_smallest_worth_having_is_not_claimed() -> None:
    source = random.Random(8)
    answers = [run(RULE, lambda: block(source, 0.0005, math.log(0.995))) for _ in range(50)]

    assert set(answers) == {Answer.NO_GAIN_WORTH_HAVING}


def test_decide_small_effect_in_much_noise_ends_inconclusive() -> None:
    source = random.Random(9)
    answers = [run(RULE, lambda: block(source, 0.10, math.log(0.98))) for _ in range(50)]

    assert answers.count(Answer.INCONCLUSIVE) >= 40


def test_decide_between_looks_never_decides() -> None:
    clear = [Block(0.0, -0.5, -0.5, 0.0)] * 5

    assert RULE.decide(clear)[0] is Answer.CONTINUE
    assert RULE.decide(clear, is_last=True)[0] is Answer.GAIN
    assert RULE.decide([*clear, clear[0]])[0] is Answer.GAIN


@pytest.mark.parametrize("count", [0, 1])
def test_decide_below_two_blocks_claims_nothing(count: int) -> None:
    answer, estimate = RULE.decide([Block(0.0, -1.0, -1.0, 0.0)] * count, is_last=True)

    assert answer is Answer.INCONCLUSIVE
    assert (estimate.ratio_low, estimate.ratio_high) == (0.0, math.inf)


def test_decide_lucky_agreement_is_held_to_the_floor() -> None:
    agreeing = [Block(0.0, -0.02, -0.02, 0.0)] * 2

    assert RULE.decide(agreeing, floor=0.0)[0] is Answer.GAIN
    assert RULE.decide(agreeing, floor=0.02)[0] is Answer.CONTINUE


def test_estimate_blocks_linear_drift_leaves_no_trace() -> None:
    drifting = []
    for idx in range(4):
        start = 0.04 * idx
        drifting.append(Block(start, start - 0.09, start - 0.08, start + 0.03))

    estimate = estimate_blocks(drifting, level=0.05)

    assert estimate.mean == pytest.approx(-0.10)
    assert estimate.scale == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_estimate_blocks_common_shift_changes_nothing(seed: int) -> None:
    source = random.Random(seed)
    plain = [block(source, 0.03) for _ in range(3)]
    shifts = [source.gauss(0.0, 1.0) for _ in plain]
    shifted = [
        Block(
            b.baseline_first + s, b.candidate_first + s, b.candidate_last + s, b.baseline_last + s
        )
        for b, s in zip(plain, shifts, strict=True)
    ]

    one, two = estimate_blocks(plain, level=0.05), estimate_blocks(shifted, level=0.05)

    assert (one.low, one.high) == pytest.approx((two.low, two.high))


def test_estimate_blocks_interval_covers_the_truth_as_often_as_stated() -> None:
    source = random.Random(13)
    missed = 0
    for _ in range(800):
        estimate = estimate_blocks([block(source, 0.02, -0.05) for _ in range(4)], level=0.05)
        missed += not estimate.low <= -0.05 <= estimate.high

    assert missed <= binomial_limit(800, 0.05)


def test_levels_sum_to_the_total_at_every_budget() -> None:
    for count in range(2, 15):
        limited = RULE.limited_to(count)

        assert limited.max_block_count == count
        assert limited.total_level == pytest.approx(0.05)
        spent_before = [lv for lk, lv in zip(RULE.looks, RULE.levels, strict=True) if lk < count]
        if count <= RULE.max_block_count:
            last = RULE.level_at(count, is_last=True)
            assert math.fsum(spent_before) + last == pytest.approx(0.05)


def test_shared_by_splits_the_level_between_comparisons() -> None:
    assert RULE.shared_by(3).total_level == pytest.approx(0.05 / 3)


@pytest.mark.parametrize(
    ("looks", "levels"),
    [((), ()), ((3, 2), (0.01, 0.01)), ((1, 2), (0.01, 0.01)), ((2, 3), (0.01,)), ((2,), (0.0,))],
    ids=["none", "descending", "one-block", "missing-level", "zero-level"],
)
def test_block_rule_senseless_looks_or_levels_refuses(
    looks: tuple[int, ...], levels: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="look"):
        BlockRule(looks=looks, levels=levels)


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (0.98, 1.04, GuardAnswer.ACCEPTED),
        (0.98, 1.05, GuardAnswer.MORE),
        (1.01, 1.06, GuardAnswer.MORE),
        (1.021, 1.30, GuardAnswer.REJECTED),
        (1.03, 1.04, GuardAnswer.REJECTED),
        (0.0, math.inf, GuardAnswer.MORE),
    ],
)
def test_decide_guard_follows_both_limits(low: float, high: float, answer: GuardAnswer) -> None:
    assert decide_guard(low, high) is answer


def test_decide_guard_slow_payload_is_rarely_accepted() -> None:
    source = random.Random(17)
    accepted = 0
    for _ in range(300):
        blocks: list[Block] = []
        answer = GuardAnswer.MORE
        while answer is GuardAnswer.MORE and len(blocks) < RULE.max_block_count:
            blocks.append(block(source, 0.03, math.log(1.05)))
            answer, _ = RULE.decide_guard(blocks)
        accepted += answer is GuardAnswer.ACCEPTED

    assert accepted <= binomial_limit(300, RULE.total_level / 2)
