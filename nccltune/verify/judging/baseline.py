"""Whether a running server is still what it was when it was verified.

One running server is one boot. It is held against stored boots by how far boots of one arm lie
apart: an interval for one more boot, which a few stored boots make wide and honest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nccltune.block_rule import GUARD_ACCEPT_RATIO
from nccltune.errors import ExitCode
from nccltune.stats import MIN_NOISE_LAUNCH_COUNT, student_t_quantile
from nccltune.verify.judging.comparison import is_simulated, settings_of
from nccltune.verify.judging.evidence import Evidence, gather_evidence
from nccltune.verify.judging.judgement import (
    EXIT_CODES,
    Cause,
    Comparison,
    Judgement,
    Metric,
    Reason,
    Verdict,
)
from nccltune.verify.judging.numbers import is_time
from nccltune.verify.judging.reasons import noise_text
from nccltune.verify.judging.stored import find_baseline as find_baseline
from nccltune.verify.judging.verdict import untimed, unusable
from nccltune.verify.judging.wording import as_cost, in_figures

if TYPE_CHECKING:
    from nccltune.verify.judging.stored import Baseline
    from nccltune.verify.model import Arm, Boot

_LEVEL = 0.05
_MIN_DRIFT_PCT = 1.0
"""A smaller change is not worth a word: the smallest gain worth having."""


def judge_running(
    boot: Boot, arm: Arm, baseline: Baseline, *, noise: float | None = None
) -> Judgement:
    """Say whether a running server is still what it was.

    A profile that is not in effect is an answer by itself: the server is not what was verified.

    Args:
        boot: of the running server.
        arm: its command, and the profile that it should have.
        baseline: what is stored.
        noise: recorded boot-to-boot noise, as in ``verdict.judge``.
    """
    troubles = tuple(untimed((boot,), (arm,)))
    if troubles:
        return unusable(troubles)
    proof = gather_evidence((arm,), (boot,)) if settings_of(arm) else Evidence()
    compared = _compare(boot, baseline, noise)
    verdict, sentence = compared.answer, compared.sentence
    if proof.is_lost:
        verdict = Verdict.DRIFT
        sentence = f"not what it should be: {proof.reasons[0].text}; {sentence}"
    reasons = [*proof.reasons, *_reasons(boot, arm, baseline)]
    if compared.noise_pct is not None:
        reasons.append(Reason(Cause.RECORDED_NOISE, noise_text(compared.noise_pct)))
    exit_code = ExitCode.NO if proof.is_lost else EXIT_CODES[verdict]
    comparisons = (compared,) if baseline.boots else ()
    return Judgement(verdict, exit_code, sentence, comparisons, tuple(reasons))


def _compare(boot: Boot, baseline: Baseline, noise: float | None) -> Comparison:
    """Hold one boot against the interval that stored boots give for one more."""
    logs = [math.log(ms) for b in baseline.boots if is_time(ms := b.ms_per_verify) and ms]
    effect_pct, interval = None, None
    spread = 0.0
    if logs and boot.ms_per_verify:
        change = math.log(boot.ms_per_verify) - statistics.fmean(logs)
        effect_pct = 100.0 * -math.expm1(change)
        if len(logs) >= MIN_NOISE_LAUNCH_COUNT:
            spread = statistics.stdev(logs)
            interval = _interval(change, max(spread, noise or 0.0), len(logs))
    answer = _answer(effect_pct, interval)
    is_open = answer is Verdict.INCONCLUSIVE and interval is not None
    return Comparison(
        arm=boot.arm,
        baseline=" ".join(baseline.verify_ids) or "nothing stored",
        metric=Metric.MS_PER_VERIFY,
        answer=answer,
        effect_pct=effect_pct,
        effect_ci_pct=interval,
        level=_LEVEL,
        block_count=0,
        sentence=_sentence(answer, effect_pct, interval, len(logs), baseline),
        noise_pct=100.0 * math.expm1(noise) if is_open and noise and noise > spread else None,
    )


def _interval(change: float, spread: float, count: int) -> tuple[float, float]:
    """Return the interval of the effect in percent of one more boot, ``change`` in log."""
    half = student_t_quantile(1.0 - 0.5 * _LEVEL, count - 1) * spread
    half *= math.sqrt(1.0 + 1.0 / count)
    return 100.0 * -math.expm1(change + half), 100.0 * -math.expm1(change - half)


def _answer(effect_pct: float | None, interval: tuple[float, float] | None) -> Verdict:
    if effect_pct is None or interval is None:
        return Verdict.INCONCLUSIVE
    low, high = interval
    if (low > 0.0 or high < 0.0) and abs(effect_pct) > _MIN_DRIFT_PCT:
        return Verdict.DRIFT
    limit_pct = 100.0 * (GUARD_ACCEPT_RATIO - 1.0)
    is_narrow = -limit_pct < low and high < limit_pct
    return Verdict.NO_DIFFERENCE if is_narrow else Verdict.INCONCLUSIVE


def _sentence(
    answer: Verdict,
    effect_pct: float | None,
    interval: tuple[float, float] | None,
    count: int,
    baseline: Baseline,
) -> str:
    if effect_pct is None:
        return (
            "nothing stored to compare with: no verify of this host, model, flags, settings and "
            "load; 'nccltune verify -- CMD' makes one"
        )
    stored = f"{count} stored boot{'s' if count > 1 else ''} of {', '.join(baseline.verify_ids)}"
    figures = in_figures(effect_pct, interval)
    if answer is Verdict.DRIFT and effect_pct < 0.0:
        more = as_cost(effect_pct, interval)
        return f"the server drifted: it is slower than {stored}, a verify step takes {more} more"
    if answer is Verdict.DRIFT:
        return f"the server drifted: it is faster than {stored}, by {figures} of a verify step"
    if answer is Verdict.NO_DIFFERENCE:
        return f"the server is as it was: against {stored} it saves {figures} of a verify step"
    if interval is None:
        need = f"it takes {MIN_NOISE_LAUNCH_COUNT} to know their spread"
        return f"undecided: against {stored} it saves {figures} of a verify step; {need}"
    return f"undecided: against {stored} it saves {figures} of a verify step"


def _reasons(boot: Boot, arm: Arm, baseline: Baseline) -> Iterator[Reason]:
    if baseline.differing:
        text = f"changed on this host since: {', '.join(baseline.differing)}"
        yield Reason(Cause.HOST_CHANGED, text)
    if not baseline.boots:
        for miss in baseline.misses:
            yield Reason(Cause.NO_BASELINE, miss)
    if is_simulated((boot, *baseline.boots), arm):
        text = "the server makes acceptance up: times of a step are real, tokens per second are not"
        yield Reason(Cause.SIMULATED, text)
