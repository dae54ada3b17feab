"""Results that are not measured: one of everything that a report can show."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nccltune.bench.report import BenchReport, BenchRow, Spread
from nccltune.cli.invocation import Invocation
from nccltune.cli.search_answer import answer_from_result
from nccltune.cli.workload import Demand, WorkloadOptions
from nccltune.measurement import Launch, Outcome
from nccltune.payloads.derive import default_workload
from nccltune.search.result import (
    AblationStep,
    Comparison,
    DuelReport,
    Failure,
    Interval,
    PayloadRow,
    SearchResult,
    Verdict,
)

if TYPE_CHECKING:
    from nccltune.cli.envelope import Answer
    from nccltune.cli.sources import Source

TUNED = {
    "NCCL_MIN_CTAS": "8",
    "NCCL_PROTO": "allreduce:LL",
    "NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2",
}
FOLK = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}
USED = "ring LL, 4 channels"


def payload_row(size_bytes: int, weight: float, baseline_us: float, ratio: float) -> PayloadRow:
    """Return a row with an interval of 0.01 on both sides; without weight it is a guard."""
    return PayloadRow(
        size_bytes=size_bytes,
        weight=weight,
        is_guard=weight == 0.0,
        baseline_us=baseline_us,
        tuned_us=baseline_us * ratio,
        ratio=ratio,
        ratio_low=ratio - 0.01,
        ratio_high=ratio + 0.01,
        used=USED,
    )


PAYLOADS = (
    payload_row(43008, 0.5, 10.0, 0.8),
    payload_row(344064, 0.5, 20.0, 0.9),
    payload_row(14336, 0.0, 9.0, 1.0),
    payload_row(67108864, 0.0, 2000.0, 1.01),
)

IMPROVED = SearchResult(
    verdict=Verdict.IMPROVED,
    sentence="Improved: made up for a test.",
    settings=TUNED,
    score_ratio=0.85,
    score_interval=Interval(0.83, 0.87, "made up for a test"),
    payloads=PAYLOADS,
    trial_count=40,
    duration_s=131.0,
    source="gpus",
    outcome_counts={Outcome.OK: 36, Outcome.CRASHED: 2, Outcome.TIMEOUT: 1, Outcome.REJECTED: 1},
    failures=(
        Failure(9, {"NCCL_BUFFSIZE": "1000"}, Outcome.CRASHED, "rank 1 died of signal 8"),
        Failure(11, {"NCCL_BUFFSIZE": "1001"}, Outcome.CRASHED, "rank 0 died of signal 8"),
        Failure(14, {"NCCL_P2P_LEVEL": "SYS"}, Outcome.TIMEOUT, "no answer within 30 s"),
        Failure(15, {"NCCL_PROTO": "bogus"}, Outcome.REJECTED, "ncclInvalidUsage (5)"),
    ),
    comparisons=(
        Comparison("folk-ll-ring", FOLK, Outcome.OK, 1.003, {43008: 1.0, 67108864: 3.4}),
        Comparison("try-1", {"NCCL_PROTO": "bogus"}, Outcome.REJECTED, None, {}, "refused"),
    ),
    duel=DuelReport(
        settings=TUNED,
        block_count=6,
        launch_count=24,
        score_ratio=0.85,
        interval=Interval(0.83, 0.87, "made up for a test"),
        verdict=Verdict.IMPROVED,
        guards={14336: Interval(0.99, 1.01, "made up for a test")},
    ),
    ablation=(
        AblationStep("NCCL_MIN_CTAS", 1.05, is_dropped=False),
        AblationStep("NCCL_PROTO", 1.02, is_dropped=False),
        AblationStep("NCCL_THREAD_THRESHOLDS", 1.08, is_dropped=False),
        AblationStep("NCCL_NTHREADS", 1.0, is_dropped=True),
    ),
    collectives=Launch(TUNED, Outcome.OK),
    memory_bytes_per_gpu=400 << 20,
    study_path="/state/studies/x.journal",
)

KEEP_DEFAULT = replace(
    IMPROVED,
    verdict=Verdict.KEEP_DEFAULT,
    sentence="The defaults are already best here: made up for a test.",
    settings={},
)
INCONCLUSIVE = replace(
    IMPROVED,
    verdict=Verdict.INCONCLUSIVE,
    sentence="Inconclusive: made up for a test.",
    settings={},
    score_interval=Interval(0.0, float("inf"), "not enough launches"),
    duel=None,
    ablation=None,
    collectives=None,
    memory_bytes_per_gpu=None,
    not_run="duel and ablation were not run: time was over",
)


def answer_of(
    result: SearchResult, source: Source, *words: str, timeout_s: float = 600.0
) -> Answer:
    """Return what ``nccltune search`` answers, called with these words, on such a result."""
    return answer_from_result(
        result,
        demand=Demand(default_workload(), 2),
        source=source,
        name="mine",
        asked=WorkloadOptions(),
        invocation=Invocation.from_arguments(["search", *words]),
        path=None,
        notice="",
        timeout_s=timeout_s,
    )


def bench_report(**changes: Any) -> BenchReport:
    """Return a comparison of two payloads, the first faster and the second three times slower."""
    rows = tuple(
        BenchRow(
            size_bytes=size_bytes,
            baseline=Spread(base_us, base_us * 0.97, base_us * 1.05),
            candidate=Spread(base_us * ratio, base_us * ratio * 0.97, base_us * ratio * 1.05),
            ratio=ratio,
            ratio_low=ratio - 0.01,
            ratio_high=ratio + 0.01,
            baseline_busbw_gb_s=size_bytes / base_us / 1000.0,
            busbw_gb_s=size_bytes / base_us / ratio / 1000.0,
            is_data_ok=True,
            used=USED,
            baseline_used="ring LL, 1 channel",
        )
        for size_bytes, base_us, ratio in ((43008, 10.0, 0.8), (67108864, 2000.0, 3.4))
    )
    report = BenchReport(
        name="folk-ll-ring",
        settings=FOLK,
        outcome=Outcome.OK,
        rows=rows,
        launch_count=8,
        world_size=2,
        source="gpus",
        duration_s=44.0,
        interval_method="made up for a test",
    )
    return replace(report, **changes)
