"""What one arm came to: every figure derived from its boots, and nothing where it cannot be told.

Boots are the independent samples. Times are averaged geometrically over boots, so that the ratio of
two arms in a table is the effect that the verdict speaks of.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.measurement import quantile
from nccltune.stats import geometric_mean

if TYPE_CHECKING:
    from nccltune.verify.model import Arm, Boot, Run, Stream


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over all its boots; None where a figure was not measured or cannot be told.

    Attributes:
        tok_s: tokens of all runs over the time of all runs, prefill included.
        tok_s_mean: mean over the runs.
        ms_per_verify: of a decode step; without speculation a step is a token.
        ms_per_token: prefill included.
        accept_length: tokens a verify step, bonus included, over all steps.
        accept_rate: share of proposed draft tokens accepted.
        accept_by_position: verify steps that accepted exactly 0, 1, 2, ... draft tokens, summed.
        itl_p50_ms: inter-token latency over the tokens of all streams.
        spread_pct: boot-to-boot standard deviation of ``ms_per_verify``.
        is_simulated: the server made acceptance up, so that tokens per second mean little.
    """

    arm: str
    boot_count: int
    run_count: int
    tokens: int
    tok_s: float | None
    tok_s_mean: float | None
    ms_per_verify: float | None
    ms_per_token: float | None
    accept_length: float | None
    accept_rate: float | None
    accept_by_position: tuple[int, ...]
    ttft_short_ms: float | None
    ttft_long_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    spread_pct: float | None
    start_s: float | None
    is_simulated: bool


def summarize_arms(arms: Sequence[Arm], boots: Sequence[Boot]) -> tuple[ArmSummary, ...]:
    """Summarize every arm, in their order; one that has no boot yet too."""
    return tuple(summarize(arm.name, boots) for arm in arms)


def summarize(arm: str, boots: Sequence[Boot]) -> ArmSummary:
    """Summarize the boots of one arm among ``boots``."""
    own = [boot for boot in boots if boot.arm == arm]
    runs = [run for boot in own for run in boot.runs]
    streams = [stream for run in runs for stream in run.streams]
    steps = [boot.ms_per_verify for boot in own]
    latencies = sorted(ms for stream in streams for ms in stream.itl_ms)
    return ArmSummary(
        arm=arm,
        boot_count=len(own),
        run_count=len(runs),
        tokens=sum(run.tokens for run in runs),
        tok_s=_overall_tok_s(runs),
        tok_s_mean=statistics.fmean(run.tok_s for run in runs) if runs else None,
        ms_per_verify=average(steps),
        ms_per_token=average([boot.ms_per_token for boot in own]),
        accept_length=_accept_length(streams),
        accept_rate=_accept_rate(streams),
        accept_by_position=accept_by_position(streams),
        ttft_short_ms=average([middle(boot.ttft_short_ms) for boot in own]),
        ttft_long_ms=average([middle(boot.ttft_long_ms) for boot in own]),
        itl_p50_ms=quantile(latencies, 0.5) if latencies else None,
        itl_p99_ms=quantile(latencies, 0.99) if latencies else None,
        spread_pct=_spread_pct(steps),
        start_s=statistics.median(boot.start_s for boot in own) if own else None,
        is_simulated=any(boot.seen.is_simulated_acceptance for boot in own),
    )


def is_time(value: float | None) -> bool:
    """Whether this is a time that can have been measured."""
    return value is not None and math.isfinite(value) and value > 0.0


def average(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean; None where one is missing or is no time at all."""
    known = [value for value in values if value is not None and is_time(value)]
    return geometric_mean(known) if known and len(known) == len(values) else None


def middle(values: Sequence[float]) -> float | None:
    """Return the median of the repetitions within one boot; None where there are none."""
    return statistics.median(values) if values else None


def accept_by_position(streams: Iterable[Stream]) -> tuple[int, ...]:
    """Add up the counts of all streams; empty where one of them does not say."""
    rows = [stream.accept_by_position for stream in streams]
    if not rows or not all(rows):
        return ()
    width = max(len(row) for row in rows)
    return tuple(sum(row[idx] for row in rows if idx < len(row)) for idx in range(width))


def _overall_tok_s(runs: Sequence[Run]) -> float | None:
    duration_s = math.fsum(run.duration_s for run in runs)
    return sum(run.tokens for run in runs) / duration_s if duration_s > 0.0 else None


def _accept_length(streams: Sequence[Stream]) -> float | None:
    """Weigh each stream by its verify steps, of which the length is a mean."""
    return _weighted([(stream.accept_length, stream.verify_count) for stream in streams])


def _accept_rate(streams: Sequence[Stream]) -> float | None:
    return _weighted([(stream.accept_rate, stream.verify_count) for stream in streams])


def _weighted(pairs: Sequence[tuple[float | None, int | None]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and weight]
    if not known or len(known) != len(pairs):
        return None
    return math.fsum(v * w for v, w in known) / math.fsum(w for _, w in known)


def _spread_pct(steps: Sequence[float | None]) -> float | None:
    known = [math.log(value) for value in steps if value is not None and is_time(value)]
    return 100.0 * statistics.stdev(known) if len(known) == len(steps) > 1 else None
