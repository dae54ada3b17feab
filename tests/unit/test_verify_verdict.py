from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nccltune.block_rule import GuardAnswer
from nccltune.errors import ExitCode
from nccltune.verify.judging.cost_model import CostModel, Refusal
from nccltune.verify.judging.prediction import Prediction
from nccltune.verify.judging.verdict import (
    EXIT_CODES,
    Cause,
    Judgement,
    Metric,
    Verdict,
    is_decided,
    judge,
)
from nccltune.verify.model import Arm, Boot, Chunk, RankState, Run, Seen
from tests.support.verify_boots import (
    DEFAULT,
    FOLK,
    IN_EFFECT,
    PLAIN,
    TTFT_MS,
    a_boot,
    an_arm,
    in_order,
    steady_boots,
)

PAIR = (DEFAULT, FOLK)
FIVE = an_arm("5 steps", steps=5)
TWO = an_arm("2 steps", steps=2)


def judged(
    arms: Sequence[Arm],
    ms_per_step: Mapping[str, float],
    *,
    boots_an_arm: int = 4,
    boots_planned: int | None = None,
    noise: float | None = None,
    predictions: Mapping[str, Prediction] | None = None,
    **wishes: Mapping[str, object],
) -> Judgement:
    boots = steady_boots(arms, ms_per_step, boots_an_arm, **wishes)  # type: ignore[arg-type]
    return judge(boots, arms, noise=noise, boots_planned=boots_planned, predictions=predictions)


def causes(judgement: Judgement) -> list[Cause]:
    return [reason.cause for reason in judgement.reasons]


def text_of(judgement: Judgement, cause: Cause) -> str:
    return " | ".join(reason.text for reason in judgement.reasons if reason.cause is cause)


def seen(**changes: object) -> Seen:
    return replace(Seen(ranks=IN_EFFECT, is_nccl_on_path=True), **changes)  # type: ignore[arg-type]


def simulated(steps: int | None = None) -> Seen:
    info = {} if steps is None else {"speculative_num_steps": steps}
    return Seen(is_nccl_on_path=False, is_simulated_acceptance=True, server_info=info)


def test_judge_faster_arm_is_a_gain_with_its_interval() -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": 19.0})

    assert judgement.verdict is Verdict.GAIN
    assert judgement.exit_code is ExitCode.DONE
    (found,) = judgement.comparisons
    assert found.metric is Metric.MS_PER_VERIFY
    assert found.effect_pct == pytest.approx(5.0, abs=0.2)
    assert found.effect_ci_pct is not None
    assert 4.0 < found.effect_ci_pct[0] < 5.0 < found.effect_ci_pct[1] < 6.0
    assert found.block_count == 2
    assert found.level == pytest.approx(0.05)
    assert [guard.answer for guard in found.guards] == [GuardAnswer.ACCEPTED] * 2
    assert judgement.sentence.startswith("folk saves 5.0 % (4.")
    assert judgement.sentence.endswith("of the time per verify step of default")
    assert judgement.reasons == ()
    assert judgement.cost_model is None


def test_judge_slower_arm_is_a_regression() -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": 21.0})

    assert (judgement.verdict, judgement.exit_code) == (Verdict.REGRESSION, ExitCode.NO)
    assert judgement.sentence.startswith("folk is slower than default: it takes 5.1 % (4.8 to ")
    assert judgement.sentence.endswith("more time per verify step")


def test_judge_equal_arms_on_a_quiet_host_make_no_difference() -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": 20.0})

    assert (judgement.verdict, judgement.exit_code) == (Verdict.NO_DIFFERENCE, ExitCode.NO)
    assert judgement.sentence.startswith("no difference worth having: folk saves")


def test_judge_sure_gain_below_one_percent_is_no_gain() -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": 19.9})

    assert judgement.verdict is Verdict.NO_DIFFERENCE


def noisy(
    source: random.Random, arms: Sequence[Arm], boots_an_arm: int, noise: float, ttft: float
) -> list[Boot]:
    return [
        a_boot(
            arm,
            position,
            20.0 * math.exp(noise * source.gauss(0.0, 1.0)),
            ttft_ms=(
                TTFT_MS * math.exp(ttft * source.gauss(0.0, 1.0)),
                900.0 * math.exp(ttft * source.gauss(0.0, 1.0)),
            ),
        )
        for position, arm in enumerate(in_order(arms, boots_an_arm))
    ]


@pytest.mark.parametrize("boots_an_arm", [4, 6])
@pytest.mark.parametrize("arms", [PAIR, (DEFAULT, FOLK, an_arm("found", settings={"A": "1"}))])
def test_judge_equal_arms_claim_at_most_as_often_as_stated(
    boots_an_arm: int, arms: Sequence[Arm]
) -> None:
    """Gain and regression together, guards included, with the looks that the engine takes."""
    source = random.Random(f"{boots_an_arm} {len(arms)}")
    trials, claims, a_round = 400, 0, 2 * len(arms)
    for _ in range(trials):
        boots = noisy(source, arms, boots_an_arm, noise=0.01, ttft=0.05)
        for end in range(2 * a_round, len(boots) + 1, a_round):
            if is_decided(boots[:end], arms, noise=None, boots_planned=boots_an_arm):
                boots = boots[:end]
                break
        verdict = judge(boots, arms, noise=None, boots_planned=boots_an_arm).verdict
        claims += verdict in (Verdict.GAIN, Verdict.REGRESSION)

    assert claims <= trials * 0.05


@pytest.mark.parametrize("boots_an_arm", [4, 8])
@pytest.mark.parametrize(("slower", "ttft"), [(1.3, 0.05), (1.3, 0.1), (2.0, 0.2)])
def test_judge_a_faster_step_that_costs_a_slower_first_token_is_seldom_a_gain(
    boots_an_arm: int, slower: float, ttft: float
) -> None:
    """Of the short prompt, which is too uneven to be accepted in most of these verifies."""
    source = random.Random(f"{boots_an_arm} {slower} {ttft}")
    trials, gains = 200, 0
    for _ in range(trials):
        boots = [
            a_boot(
                arm,
                position,
                (19.0 if arm is FOLK else 20.0) * math.exp(0.003 * source.gauss(0.0, 1.0)),
                ttft_ms=(
                    TTFT_MS
                    * (slower if arm is FOLK else 1.0)
                    * math.exp(ttft * source.gauss(0.0, 1.0)),
                    900.0 * math.exp(0.005 * source.gauss(0.0, 1.0)),
                ),
            )
            for position, arm in enumerate(in_order(PAIR, boots_an_arm))
        ]
        for end in range(8, len(boots) + 1, 4):
            if is_decided(boots[:end], PAIR, noise=None, boots_planned=boots_an_arm):
                boots = boots[:end]
                break
        verdict = judge(boots, PAIR, noise=None, boots_planned=boots_an_arm).verdict
        gains += verdict is Verdict.GAIN

    assert gains <= trials * 0.05


def test_judge_recorded_noise_keeps_a_lucky_agreement_from_a_claim() -> None:
    times = {"default": 20.0, "folk": 19.4}

    assert judged(PAIR, times).verdict is Verdict.GAIN
    held = judged(PAIR, times, noise=0.02)
    assert held.verdict is Verdict.INCONCLUSIVE
    assert held.exit_code is ExitCode.UNKNOWN
    assert held.sentence.startswith("undecided after 2 blocks of 4 boots: folk saves 3.0 % (-")
    assert held.sentence.endswith("more boots tell more (--boots 8)")
    assert causes(held) == [Cause.RECORDED_NOISE]
    assert "usually lie 2.0 % apart here" in text_of(held, Cause.RECORDED_NOISE)
    assert judged(PAIR, {"default": 20.0, "folk": 15.0}, noise=0.02).reasons == ()


@pytest.mark.parametrize(("boots_an_arm", "words"), [(2, "one block"), (0, "no whole block")])
def test_judge_fewer_than_two_blocks_never_decide(boots_an_arm: int, words: str) -> None:
    boots = steady_boots(PAIR, {"default": 20.0, "folk": 10.0}, 2)[: 4 if boots_an_arm else 3]
    judgement = judge(boots, PAIR, noise=None, boots_planned=4)

    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.comparisons[0].effect_ci_pct is None
    assert words in judgement.sentence
    assert Cause.FEW_BOOTS in causes(judgement)
    assert "--boots" not in text_of(judgement, Cause.FEW_BOOTS)
    assert not is_decided(boots, PAIR, noise=None, boots_planned=4)


def test_judge_two_boots_an_arm_are_told_to_be_too_few() -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": 10.0}, boots_an_arm=2)

    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert text_of(judgement, Cause.FEW_BOOTS).endswith("give --boots 4 or more")


def test_judge_stopped_early_is_held_to_the_level_of_an_early_look() -> None:
    source = random.Random(11)
    boots = [
        a_boot(arm, idx, (19.5 if arm is FOLK else 20.0) * math.exp(0.004 * source.gauss(0, 1)))
        for idx, arm in enumerate(in_order(PAIR, 4))
    ]

    assert judge(boots, PAIR, noise=None, boots_planned=4).verdict is Verdict.GAIN
    stopped = judge(boots, PAIR, noise=None, boots_planned=12)
    assert stopped.verdict is Verdict.INCONCLUSIVE
    assert stopped.comparisons[0].level == pytest.approx(0.002)
    assert stopped.sentence.endswith("; 4 of 12 boots an arm were made")


def first_tokens(
    boots: Sequence[Boot], factors: Sequence[float], *, prompt: str = "short"
) -> list[Boot]:
    """Give each boot a time to first token of its own."""
    times_ms = [(TTFT_MS * factor,) for factor in factors]
    if prompt == "short":
        return [replace(b, ttft_short_ms=ms) for b, ms in zip(boots, times_ms, strict=True)]
    return [replace(b, ttft_long_ms=ms) for b, ms in zip(boots, times_ms, strict=True)]


FASTER = {"default": 20.0, "folk": 16.0}
A_LITTLE_SLOWER = (1.0, 1.045, 1.02, 1.01, 1.0, 1.02, 1.04, 0.99)
UNEVEN = (0.72, 1.18, 1.17, 1.03, 1.12, 0.83, 1.03, 1.28)
"""Of two H200, about: docs/results/two-h200-sglang/tuned-shm."""


def test_is_decided_large_effect_ends_early_and_an_open_guard_does_not() -> None:
    boots = steady_boots(PAIR, FASTER)
    slow_start = first_tokens(boots, A_LITTLE_SLOWER)

    assert is_decided(boots, PAIR, noise=None, boots_planned=8)
    assert not is_decided(slow_start, PAIR, noise=None, boots_planned=8)
    undecided = judge(slow_start, PAIR, noise=None, boots_planned=4)
    assert undecided.verdict is Verdict.INCONCLUSIVE
    assert "whether time to first token of the short prompt gets longer is open" in (
        undecided.sentence
    )
    assert not undecided.comparisons[0].guards[0].is_too_uneven
    assert text_of(undecided, Cause.GUARD_UNDECIDED).endswith("is not decided")


def test_judge_short_prompt_too_uneven_to_tell_forbids_no_gain_and_is_told() -> None:
    uneven = first_tokens(steady_boots(PAIR, FASTER), UNEVEN)

    judgement = judge(uneven, PAIR, noise=None, boots_planned=4)

    assert judgement.verdict is Verdict.GAIN
    assert judgement.sentence.endswith(
        "; time to first token of the short prompt varies too much to compare"
    )
    assert judgement.comparisons[0].guards[0].is_too_uneven
    assert re.search(
        r"boots of the baseline alone lie about \d+ % apart in it, too far for the boots planned",
        text_of(judgement, Cause.GUARD_UNDECIDED),
    )


def test_short_prompt_too_uneven_to_tell_is_open_until_all_boots_are_made() -> None:
    uneven = first_tokens(steady_boots(PAIR, FASTER), UNEVEN)

    assert not is_decided(uneven, PAIR, noise=None, boots_planned=8)
    stopped = judge(uneven, PAIR, noise=None, boots_planned=8)
    assert stopped.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "factors",
    [
        pytest.param((0.72, 1.35, 1.4, 1.03, 1.12, 1.3, 1.35, 1.28), id="it looks slower"),
        pytest.param((1.0, 0.7, 1.2, 1.0, 1.01, 1.3, 0.75, 1.01), id="the profile is uneven"),
    ],
)
def test_judge_short_prompt_too_uneven_to_tell_excuses_no_more_than_luck(
    factors: tuple[float, ...],
) -> None:
    uneven = first_tokens(steady_boots(PAIR, FASTER), factors)

    judgement = judge(uneven, PAIR, noise=None, boots_planned=4)

    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "whether time to first token of the short prompt gets longer is open" in (
        judgement.sentence
    )


def test_judge_long_prompt_too_uneven_to_tell_forbids_a_gain() -> None:
    uneven = first_tokens(steady_boots(PAIR, FASTER), UNEVEN, prompt="long")

    judgement = judge(uneven, PAIR, noise=None, boots_planned=4)

    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "whether time to first token of the long prompt gets longer is open" in (
        judgement.sentence
    )


def test_judge_short_prompt_much_slower_is_a_regression_however_uneven() -> None:
    factors = [
        f * (3.5 if arm is FOLK else 1.0) for f, arm in zip(UNEVEN, in_order(PAIR, 4), strict=True)
    ]

    judgement = judge(
        first_tokens(steady_boots(PAIR, FASTER), factors), PAIR, noise=None, boots_planned=4
    )

    assert judgement.verdict is Verdict.REGRESSION
    assert Cause.GUARD_REJECTED in causes(judgement)


def test_judge_decode_bought_with_prefill_is_a_regression() -> None:
    judgement = judged(
        PAIR,
        {"default": 20.0, "folk": 18.0},
        ttft_ms={"folk": (TTFT_MS, 1100.0)},
    )

    assert judgement.verdict is Verdict.REGRESSION
    assert judgement.sentence.startswith(
        "folk makes time to first token of the long prompt longer than default does; "
        "of the time per verify step it saves 10.0 %"
    )
    assert judgement.comparisons[0].guards[1].answer is GuardAnswer.REJECTED


def test_judge_gain_without_first_token_times_is_not_claimed() -> None:
    judgement = judged(
        PAIR, {"default": 20.0, "folk": 18.0}, ttft_ms={"folk": None, "default": None}
    )

    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "the short and the long prompt gets longer is open" in judgement.sentence


def test_judge_nothing_is_claimed_where_nccl_is_not_on_the_path() -> None:
    off = seen(is_nccl_on_path=False, path_reason="tensor parallel size 1 makes no all-reduce")
    both = {"default": off, "folk": off}

    faster = judged(PAIR, {"default": 20.0, "folk": 18.0}, seen=both)
    assert (faster.verdict, faster.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.UNKNOWN)
    assert faster.sentence == (
        "nothing is claimed for folk: NCCL is not on the path: tensor parallel size 1 makes no "
        "all-reduce"
    )
    slower = judged(PAIR, {"default": 20.0, "folk": 22.0}, seen=both)
    assert slower.verdict is Verdict.INCONCLUSIVE
    equal = judged(PAIR, {"default": 20.0, "folk": 20.0}, seen=both)
    assert equal.verdict is Verdict.NO_DIFFERENCE
    assert causes(equal) == [Cause.NOT_ON_PATH]


@pytest.mark.parametrize("ms", [18.0, 20.0, 22.0])
def test_judge_lost_key_names_rank_and_key_and_claims_nothing(ms: float) -> None:
    lost = {"TP0": {"NCCL_PROTO": RankState.IN_EFFECT}, "TP1": {"NCCL_PROTO": RankState.LOST}}
    judgement = judged(PAIR, {"default": 20.0, "folk": ms}, seen={"folk": seen(ranks=lost)})

    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.exit_code is ExitCode.NO
    assert judgement.sentence.startswith("nothing is claimed for folk: ")
    assert text_of(judgement, Cause.NOT_IN_EFFECT) == (
        "profile folk is not wholly in effect in rank TP1: NCCL_PROTO lost"
    )


def test_judge_lost_key_of_settings_that_both_arms_share_is_told_and_blocks_no_claim() -> None:
    arms = (replace(FOLK, name="5 steps", num_steps=5), replace(FOLK, name="2 steps"))
    lost = {"TP1": {"NCCL_PROTO": RankState.LOST}}
    both = {arm.name: seen(ranks=lost, is_simulated_acceptance=True) for arm in arms}
    judgement = judged(arms, {"5 steps": 11.2, "2 steps": 10.1}, seen=both)

    assert judgement.verdict is Verdict.GAIN
    assert "in rank TP1: NCCL_PROTO lost" in text_of(judgement, Cause.NOT_IN_EFFECT)


@pytest.mark.parametrize(
    ("other", "verdict"),
    [(RankState.IN_EFFECT, Verdict.GAIN), (RankState.SET_BY_OPERATOR, Verdict.INCONCLUSIVE)],
)
def test_judge_withheld_keys_are_told_and_count_if_none_is_left(
    other: RankState, verdict: Verdict
) -> None:
    ranks = {"TP0": {"NCCL_ALGO": RankState.OVERRIDDEN_BY_SGLANG, "NCCL_PROTO": other}}
    judgement = judged(PAIR, {"default": 20.0, "folk": 18.0}, seen={"folk": seen(ranks=ranks)})

    assert judgement.verdict is verdict
    assert "NCCL_ALGO overridden by SGLang" in text_of(judgement, Cause.NOT_IN_EFFECT)


UNREAD = {"NCCL_PROTO": RankState.UNREADABLE}


@pytest.mark.parametrize("ranks", [{}, {"TP0": UNREAD, "TP1": UNREAD}, {"TP0": {}}], ids=str)
@pytest.mark.parametrize("ms", [18.0, 20.0, 22.0])
def test_judge_environment_of_which_nothing_was_read_claims_nothing(
    ranks: dict[str, dict[str, RankState]], ms: float
) -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": ms}, seen={"folk": seen(ranks=ranks)})

    assert (judgement.verdict, judgement.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.UNKNOWN)
    assert causes(judgement) == [Cause.ENVIRONMENT_UNSEEN]
    assert "SPT_NOENV=1" in judgement.sentence


@pytest.mark.parametrize(
    ("changes", "is_whole"),
    [
        ({}, True),
        ({"ranks": {**IN_EFFECT, "TP1": UNREAD}}, False),
        ({"ranks": {**IN_EFFECT, "TP1": {}}}, False),
        ({"server_info": {"tp_size": 2}}, False),
        ({"server_info": {"tp_size": 1}}, True),
    ],
    ids=["all", "one rank unread", "one rank untold", "one rank unseen", "all of one"],
)
def test_judge_says_whether_the_whole_profile_was_seen_in_effect(
    changes: dict[str, object], is_whole: bool
) -> None:
    times = {"default": 20.0, "folk": 18.0}
    judgement = judged(PAIR, times, seen={"folk": seen(**changes)})

    assert judgement.verdict is Verdict.GAIN
    assert judgement.comparisons[0].is_wholly_in_effect is is_whole
    assert (Cause.ENVIRONMENT_UNSEEN in causes(judgement)) is not is_whole


def test_judge_one_boot_in_which_a_key_was_withheld_is_not_the_whole_profile() -> None:
    boots = steady_boots(PAIR, {"default": 20.0, "folk": 18.0})
    overridden = {"TP0": {"NCCL_PROTO": RankState.OVERRIDDEN_BY_SGLANG}}
    boots[6] = replace(boots[6], seen=seen(ranks=overridden))

    judgement = judge(boots, PAIR, noise=None)

    assert boots[6].arm == "folk"
    assert judgement.verdict is Verdict.GAIN
    assert not judgement.comparisons[0].is_wholly_in_effect


@pytest.mark.parametrize("ms", [18.0, 20.0])
def test_judge_settings_of_the_operator_are_told_to_be_in_both_arms(ms: float) -> None:
    boots = steady_boots(PAIR, {"default": 20.0, "folk": ms})

    judgement = judge(boots, PAIR, noise=None, operator={"NCCL_PROTO": "LL", "NCCL_DEBUG": "WARN"})

    assert judgement.verdict is (Verdict.INCONCLUSIVE if ms < 20.0 else Verdict.NO_DIFFERENCE)
    told = text_of(judgement, Cause.SHARED_SETTINGS)
    assert told.startswith("both arms had the settings NCCL_PROTO=LL: ")
    assert not judgement.comparisons[0].is_wholly_in_effect


def told_steps(boots: Sequence[Boot], arm: Arm, factor: float) -> list[Boot]:
    """Let the server of one arm count more verify steps than it made."""
    changed: list[Boot] = []
    for boot in boots:
        stream = boot.runs[0].streams[0]
        if boot.arm == arm.name and stream.verify_count is not None:
            count = round(stream.verify_count * factor)
            length = stream.tokens / count
            stream = replace(stream, verify_count=count, accept_length=length)
        changed.append(replace(boot, runs=(Run((stream,), stream.duration_s),)))
    return changed


@pytest.mark.parametrize("factor", [1.08, 1.5, 1.9, 0.9, 0.5])
def test_judge_steps_that_only_the_counts_made_quicker_claim_nothing(factor: float) -> None:
    boots = told_steps(steady_boots(PAIR, {"default": 20.0, "folk": 20.0}), FOLK, factor)

    judgement = judge(boots, PAIR, noise=None)

    assert (judgement.verdict, judgement.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.UNKNOWN)
    assert causes(judgement)[0] is Cause.NOT_SHOWN
    assert "its time per token did not move with it" in judgement.sentence
    assert is_decided(boots, PAIR, noise=None, boots_planned=8)


def test_judge_steps_that_only_the_moments_made_quicker_claim_nothing() -> None:
    boots = [
        boot
        if boot.arm == "default"
        else replace(boot, runs=tuple(_hurried(run) for run in boot.runs))
        for boot in steady_boots(PAIR, {"default": 20.0, "folk": 20.0})
    ]

    judgement = judge(boots, PAIR, noise=None)

    assert judgement.comparisons[0].effect_pct == pytest.approx(30.0, abs=0.5)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert causes(judgement) == [Cause.NOT_SHOWN]


def _hurried(run: Run) -> Run:
    """Let tokens be counted before they were there."""
    first, last = run.streams[0].chunks
    early = replace(last, at_s=first.at_s + 0.7 * (last.at_s - first.at_s))
    return replace(run, streams=(replace(run.streams[0], chunks=(first, early)),))


@pytest.mark.parametrize("length", [1.92, 2.0, 2.08])
@pytest.mark.parametrize("ms", [19.0, 21.0])
def test_judge_luck_of_acceptance_neither_makes_a_claim_nor_keeps_one(
    length: float, ms: float
) -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": ms}, accept_length={"folk": length})

    assert judgement.verdict is (Verdict.GAIN if ms < 20.0 else Verdict.REGRESSION)


UNCOUNTED = {"verify_count": None, "accept_length": None}


@pytest.mark.parametrize(
    ("arms", "changes", "words"),
    [
        (PAIR, UNCOUNTED, "count no verify steps"),
        (
            (PLAIN, replace(PLAIN, name="folk")),
            {"verify_count": 250, "accept_length": 2.0},
            "started without speculation",
        ),
    ],
    ids=["speculates and does not count", "counts and does not speculate"],
)
def test_judge_arms_of_which_one_counts_verify_steps_are_not_compared(
    arms: tuple[Arm, Arm], changes: dict[str, Any], words: str
) -> None:
    boots = [
        boot
        if boot.arm != "folk"
        else replace(boot, runs=(Run((replace(boot.runs[0].streams[0], **changes),), 5.0),))
        for boot in steady_boots(arms, {arm.name: 20.0 for arm in arms})
    ]

    judgement = judge(boots, arms, noise=None)

    assert (judgement.verdict, judgement.exit_code) == (Verdict.UNUSABLE, ExitCode.SERVER)
    assert judgement.comparisons == ()
    assert "boot 2 (folk) cannot be timed" in judgement.sentence
    assert words in judgement.sentence


def test_judge_quotes_what_a_server_said_in_the_reason_alone() -> None:
    said = (
        "boot 1 of 4 (arm default): /generate: status 200, and then an error: 'boo'; its output: x"
    )
    judgement = judge([], PAIR, noise=None, problems=[said])

    assert judgement.sentence.endswith("status 200, and then an error")
    assert text_of(judgement, Cause.PROBLEM) == said


def test_judge_nothing_saved_has_no_sign() -> None:
    judgement = judged(PAIR, {"default": 20.0, "folk": 19.995})

    assert judgement.comparisons[0].effect_pct is not None
    assert -0.05 < judgement.comparisons[0].effect_pct < 0.0
    assert "saves 0.0 % (" in judgement.sentence
    assert "-0.0 " not in judgement.sentence


def test_judge_answers_in_one_piece_are_unusable_and_give_no_effect() -> None:
    boots = steady_boots(PAIR, {"default": 20.0, "folk": 18.0})
    stream = replace(boots[1].runs[0].streams[0], chunks=(Chunk(5.0, 500),))
    boots[1] = replace(boots[1], runs=(Run((stream,), 5.0),))

    judgement = judge(boots, PAIR, noise=None)

    assert (judgement.verdict, judgement.exit_code) == (Verdict.UNUSABLE, ExitCode.SERVER)
    assert judgement.comparisons == ()
    assert "boot 2 (folk) cannot be timed" in judgement.sentence
    assert is_decided(boots, PAIR, noise=None, boots_planned=4)  # more boots would not mend it


def test_judge_problem_of_a_boot_is_unusable_whatever_was_measured_before() -> None:
    boots = steady_boots(PAIR, {"default": 20.0, "folk": 10.0})
    judgement = judge(boots, PAIR, noise=None, problems=["folk: out of memory in graph capture"])

    assert judgement.verdict is Verdict.UNUSABLE
    assert judgement.sentence == "unusable: folk: out of memory in graph capture"


def test_judge_without_any_boot_is_inconclusive() -> None:
    assert judge([], PAIR, noise=None, boots_planned=4).verdict is Verdict.INCONCLUSIVE


def test_judge_several_candidates_share_the_error_level_and_the_best_gain_leads() -> None:
    found = an_arm("found", settings={"NCCL_ALGO": "Ring"})
    slow = an_arm("slow", settings={"NCCL_NTHREADS": "64"})
    arms = (DEFAULT, FOLK, found, slow)
    judgement = judged(arms, {"default": 20.0, "folk": 19.0, "found": 17.0, "slow": 24.0})

    assert judgement.verdict is Verdict.GAIN
    answers = [each.answer for each in judgement.comparisons]
    assert answers == [Verdict.GAIN, Verdict.GAIN, Verdict.REGRESSION]
    assert all(each.level == pytest.approx(0.05 / 3) for each in judgement.comparisons)
    assert judgement.sentence.startswith("found saves 15.0 %")
    assert judgement.sentence.endswith("; slower: slow")


def test_judge_steps_under_real_acceptance_are_compared_by_time_per_token() -> None:
    judgement = judged(
        (FIVE, TWO),
        {"5 steps": 11.2, "2 steps": 10.1},
        accept_length={"5 steps": 2.6, "2 steps": 2.0},
    )

    (found,) = judgement.comparisons
    assert found.metric is Metric.MS_PER_TOKEN
    assert judgement.verdict is Verdict.REGRESSION  # a quicker step that brings fewer tokens


def test_judge_steps_under_simulated_acceptance_are_compared_by_step_and_labelled() -> None:
    both = {"5 steps": simulated(), "2 steps": simulated()}
    judgement = judged((FIVE, TWO), {"5 steps": 11.2, "2 steps": 10.1}, seen=both)

    (found,) = judgement.comparisons
    assert found.metric is Metric.MS_PER_VERIFY
    assert judgement.verdict is Verdict.GAIN
    assert found.effect_ci_pct is not None
    assert found.effect_ci_pct[0] > 0.0
    assert judgement.sentence.endswith("(acceptance is simulated)")
    assert Cause.SIMULATED in causes(judgement)
    assert isinstance(judgement.cost_model, CostModel)
    assert "for the acceptance that was set" in judgement.cost_model.sentence


def test_judge_guards_decide_nothing_where_speculation_differs() -> None:
    judgement = judged(
        (PLAIN, TWO), {"plain": 12.0, "2 steps": 14.0}, ttft_ms={"2 steps": (70.0, 1200.0)}
    )

    assert judgement.verdict is Verdict.GAIN
    assert not any(guard.is_deciding for guard in judgement.comparisons[0].guards)
    assert "decides nothing where more than settings differs" in text_of(
        judgement, Cause.GUARD_REJECTED
    )


def test_judge_speculation_that_loses_says_where_it_would_win() -> None:
    judgement = judged(
        (PLAIN, FIVE, TWO),
        {"plain": 11.0, "5 steps": 26.0, "2 steps": 17.0},
        accept_length={"5 steps": 2.1, "2 steps": 1.75},
    )

    assert judgement.verdict is Verdict.GAIN  # 2 steps: 9.7 against 11 ms a token
    loss = text_of(judgement, Cause.SPECULATION_LOSES)
    assert loss.startswith("plain decoding beats 5 steps: there speculation itself loses")
    assert "a step costs as much as 2.36 plain ones and brings 2.10 tokens" in loss
    assert "it would win at 1, 2, 3 draft steps, most at 1: 109.1 against 90.9 tok/s" in loss
    assert loss.endswith("(by the cost model, not measured)")


@pytest.mark.parametrize("arms", [(PLAIN, FIVE, TWO), (FIVE, TWO, PLAIN)])
def test_judge_speculation_that_never_wins_is_told_from_either_side(arms: Sequence[Arm]) -> None:
    judgement = judged(
        arms,
        {"plain": 11.0, "5 steps": 26.0, "2 steps": 20.0},
        accept_length={"5 steps": 1.1, "2 steps": 1.08},
    )

    plain_first = arms[0] is PLAIN
    assert judgement.verdict is (Verdict.REGRESSION if plain_first else Verdict.GAIN)
    assert "it would win at no number of steps up to 5" in text_of(
        judgement, Cause.SPECULATION_LOSES
    )


def test_judge_one_number_of_steps_cannot_say_where_speculation_would_win() -> None:
    judgement = judged(
        (PLAIN, FIVE), {"plain": 11.0, "5 steps": 26.0}, accept_length={"5 steps": 1.1}
    )

    told = text_of(judgement, Cause.SPECULATION_LOSES)
    assert told.startswith("plain decoding beats 5 steps")
    assert "takes two arms that speculate" in told


def test_judge_low_acceptance_points_at_the_draft_model() -> None:
    wrong_layers = {"5 steps": 1.95, "2 steps": 1.38}
    judgement = judged((FIVE, TWO), {"5 steps": 11.0, "2 steps": 11.0}, accept_length=wrong_layers)

    told = text_of(judgement, Cause.LOW_ACCEPTANCE)
    assert "5 steps: acceptance is low, 1.95 tokens a step at 5 steps (19 % of the first 5" in told
    assert "2 steps: acceptance is low, 1.38 tokens a step" in told
    assert "not at NCCL" in told


@pytest.mark.parametrize(
    ("length", "seen_by"), [(3.35, None), (1.95, simulated())], ids=["healthy", "simulated"]
)
def test_judge_acceptance_that_is_fine_or_made_up_blames_no_draft(
    length: float, seen_by: Seen | None
) -> None:
    arms = (an_arm("default", steps=5), an_arm("again", steps=5))
    wishes = {} if seen_by is None else {arm.name: seen_by for arm in arms}
    judgement = judged(
        arms,
        {"default": 11.0, "again": 11.0},
        accept_length={arm.name: length for arm in arms},
        seen=wishes,
    )

    assert judgement.verdict is Verdict.NO_DIFFERENCE
    assert Cause.LOW_ACCEPTANCE not in causes(judgement)


def test_judge_small_share_of_all_reduces_says_that_nccl_is_not_where_the_time_goes() -> None:
    prediction = Prediction((), 129, 0, baseline_ms=0.9, tuned_ms=0.8)
    judgement = judged(PAIR, {"default": 20.0, "folk": 20.0}, predictions={"folk": prediction})

    assert "all-reduces take 4.5 % of a step of default" in text_of(judgement, Cause.SMALL_SHARE)
    check = judgement.comparisons[0].check
    assert check is not None
    assert check.predicted_saved_ms == pytest.approx(0.1)


def test_judge_tree_of_drafts_has_no_cost_model() -> None:
    tree = Seen(server_info={"speculative_eagle_topk": 4})
    judgement = judged(
        (FIVE, TWO),
        {"5 steps": 11.2, "2 steps": 10.1},
        seen={"5 steps": tree, "2 steps": tree},
    )

    assert isinstance(judgement.cost_model, Refusal)
    assert "drafts a tree" in judgement.cost_model.reason


def test_judge_settings_under_a_tree_of_drafts_are_not_asked_for_steps() -> None:
    tree = seen(server_info={"speculative_eagle_topk": 4})
    judgement = judged(PAIR, {"default": 20.0, "folk": 19.0}, seen={"default": tree, "folk": tree})

    assert judgement.cost_model is None


def test_judge_steps_that_only_the_server_knows_are_read_from_it() -> None:
    launched = an_arm("as launched", steps=None)
    told = Seen(is_nccl_on_path=True, server_info={"speculative_num_steps": 3})
    judgement = judged(
        (launched, TWO), {"as launched": 10.6, "2 steps": 10.1}, seen={"as launched": told}
    )

    assert isinstance(judgement.cost_model, CostModel)
    assert [one.num_steps for one in judgement.cost_model.estimates] == [2, 3]


def test_every_verdict_has_its_exit_code() -> None:
    assert {str(verdict): int(code) for verdict, code in EXIT_CODES.items()} == {
        "gain": 0,
        "no_difference": 3,
        "regression": 3,
        "drift": 4,
        "inconclusive": 4,
        "unusable": 8,
    }
    assert set(EXIT_CODES) == set(Verdict)
