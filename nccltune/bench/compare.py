"""One candidate beside the baseline, on fresh launches in ABBA order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nccltune.bench.nccl_log import NcclReport
from nccltune.bench.report import BenchReport, BenchRow, Spread
from nccltune.measurement import Launch, Outcome, PayloadRequest, Settings, quantile
from nccltune.stats import t_interval
from nccltune.units import busbw_gb_s

if TYPE_CHECKING:
    from nccltune.bench.launcher import GpuBench

MIN_INTERVAL_PAIRS = 3
CONFIDENCE = 0.95
"""Of the intervals of all payloads together (Bonferroni)."""

OnLaunch = Callable[[int, int, Launch], None]
"""Called after every launch with its number, the number of launches in all, and the launch."""


def compare(
    bench: GpuBench,
    name: str,
    settings: Settings,
    requests: Sequence[PayloadRequest],
    *,
    launches_per_arm: int,
    world_size: int,
    baseline_report: NcclReport,
    on_launch: OnLaunch = lambda idx, total, launch: None,
) -> BenchReport:
    """Launch both arms in turns and put them side by side, payload by payload.

    The interval of a ratio comes from pairs of launches that are neighbours in time. Whoever looks
    at many payloads finds one that differs by luck, so all intervals together hold at 95 %. A
    candidate that fails ends the comparison; what was measured is kept.
    """
    began = time.monotonic()
    arms: dict[bool, list[Launch]] = {False: [], True: []}
    failed: Launch | None = None
    order = list(_abba(launches_per_arm))
    for idx, is_candidate in enumerate(order):
        launch = bench.launch(settings if is_candidate else {}, requests)
        on_launch(idx, len(order), launch)
        if launch.is_complete:
            arms[is_candidate].append(launch)
            continue
        who = "" if is_candidate else "the baseline itself: "
        failed = replace(launch, message=f"{who}{launch.message}")
        break
    report = bench.inspect(settings, requests) if failed is None else NcclReport()
    confidence = 1.0 - (1.0 - CONFIDENCE) / len(requests)
    rows = [
        _row(size_bytes, arms, failed, world_size, report.used, baseline_report.used, confidence)
        for size_bytes in sorted(request.size_bytes for request in requests)
        if arms[False]
    ]
    return BenchReport(
        name=name,
        settings=dict(settings),
        outcome=failed.outcome if failed else Outcome.OK,
        message=failed.message if failed else "",
        rows=tuple(rows),
        launch_count=len(arms[False]) + len(arms[True]),
        world_size=world_size,
        source=bench.source,
        duration_s=time.monotonic() - began,
        interval_method=_interval_method(rows),
        phases_s=_mean_phases(arms[True] or arms[False]),
    )


def _interval_method(rows: Sequence[BenchRow]) -> str:
    if all(row.ratio_low is None for row in rows):
        return ""
    return (
        f"{100 * CONFIDENCE:.0f} % t interval over pairs of launches that are neighbours in "
        f"time, for all {len(rows)} payloads together"
    )


def _abba(launches_per_arm: int) -> Iterator[bool]:
    """Yield, launch by launch, whether it is the candidate's: A B B A A B B A ..."""
    for pair in range(launches_per_arm):
        first = pair % 2 == 1
        yield first
        yield not first


def _row(
    size_bytes: int,
    arms: Mapping[bool, Sequence[Launch]],
    failed: Launch | None,
    world_size: int,
    used: Mapping[int, str],
    baseline_used: Mapping[int, str],
    confidence: float,
) -> BenchRow:
    baseline = _spread(arms[False], size_bytes)
    candidate = _spread(arms[True], size_bytes) if arms[True] else None
    logs = [
        math.log(ours.median_us[size_bytes] / theirs.median_us[size_bytes])
        for ours, theirs in zip(arms[True], arms[False], strict=False)
    ]
    low = high = None
    if len(logs) >= MIN_INTERVAL_PAIRS:
        low, high = map(math.exp, t_interval(logs, confidence=confidence))
    bad_sizes = {p.size_bytes for p in failed.payloads if not p.is_data_ok} if failed else set()
    return BenchRow(
        size_bytes=size_bytes,
        baseline=baseline,
        candidate=candidate,
        ratio=math.exp(sum(logs) / len(logs)) if logs else None,
        ratio_low=low,
        ratio_high=high,
        baseline_busbw_gb_s=busbw_gb_s(size_bytes, baseline.median_us, world_size),
        busbw_gb_s=busbw_gb_s(size_bytes, candidate.median_us, world_size) if candidate else None,
        is_data_ok=size_bytes not in bad_sizes,
        used=used.get(size_bytes, ""),
        baseline_used=baseline_used.get(size_bytes, ""),
    )


def _spread(launches: Sequence[Launch], size_bytes: int) -> Spread:
    samples = sorted(
        sample
        for launch in launches
        for payload in launch.payloads
        if payload.size_bytes == size_bytes
        for sample in payload.samples_us
    )
    return Spread(quantile(samples, 0.5), quantile(samples, 0.1), quantile(samples, 0.9))


def _mean_phases(launches: Sequence[Launch]) -> dict[str, float]:
    if not launches:
        return {}
    return {
        name: sum(one.phases_s.get(name, 0.0) for one in launches) / len(launches)
        for name in launches[0].phases_s
    }
