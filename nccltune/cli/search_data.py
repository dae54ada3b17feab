"""What ``nccltune search --json`` tells scripts: every field of a result under a stable name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.search.result import (
    Comparison,
    DuelReport,
    Failure,
    GatherRow,
    Interval,
    PayloadRow,
    SearchResult,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nccltune.measurement import Launch, Settings


@dataclass(frozen=True, slots=True)
class SavedProfile:
    """Where the winner was kept; both None where there is none."""

    name: str | None = None
    path: Path | None = None


def search_data(
    result: SearchResult, saved: SavedProfile, *, workload: str, next_command: str
) -> dict[str, object]:
    """Lay out a result for the envelope; numbers are not rounded."""
    return {
        "verdict": str(result.verdict),
        "sentence": result.sentence,
        "profile": {
            "name": saved.name,
            "settings": dict(result.settings) if result.verdict is Verdict.IMPROVED else {},
            "path": None if saved.path is None else str(saved.path),
        },
        "best_settings": dict(best_settings(result)),
        "payloads": [_payload(row) for row in result.payloads],
        "gathers": [_gather(row) for row in result.gathers],
        "score_ratio": result.score_ratio,
        "score_ci": _interval(result.score_interval),
        "score_ci_method": result.score_interval.method,
        "trial_count": result.trial_count,
        "duration_s": result.duration_s,
        "source": result.source,
        "workload": workload,
        "trial_limit": result.trial_limit,
        "trials_end": str(result.trials_end),
        "pruned_count": result.pruned_count,
        "outcome_counts": {str(name): count for name, count in result.outcome_counts.items()},
        "failures": [_failure(each) for each in result.failures],
        "comparisons": [_comparison(each) for each in result.comparisons],
        "duel": None if result.duel is None else _duel(result.duel),
        "ablation": _ablation(result),
        "collectives": None if result.collectives is None else _launch(result.collectives),
        "memory_bytes_per_gpu": result.memory_bytes_per_gpu,
        "memory_baseline_bytes_per_gpu": result.memory_baseline_bytes_per_gpu,
        "not_run": result.not_run,
        "is_interrupted": result.is_interrupted,
        "study_path": result.study_path,
        "phases_s": dict(result.phases_s),
        "next_command": next_command,
    }


def best_settings(result: SearchResult) -> Settings:
    """Return the settings that the payload table shows: the winner's, or the best that failed."""
    if result.settings or result.duel is None:
        return result.settings
    return result.duel.settings


def _payload(row: PayloadRow) -> Mapping[str, object]:
    return {
        "bytes": row.size_bytes,
        "weight": row.weight,
        "is_guard": row.is_guard,
        "baseline_us": row.baseline_us,
        "tuned_us": row.tuned_us,
        "ratio": row.ratio,
        "ratio_ci": [row.ratio_low, row.ratio_high],
        "used": row.used,
    }


def _gather(row: GatherRow) -> Mapping[str, object]:
    return {
        "bytes": row.size_bytes,
        "baseline_us": row.baseline_us,
        "tuned_us": row.tuned_us,
    }


def _failure(failure: Failure) -> Mapping[str, object]:
    return {
        "trial": failure.trial_idx,
        "settings": dict(failure.settings),
        "outcome": str(failure.outcome),
        "message": failure.message,
    }


def _comparison(comparison: Comparison) -> Mapping[str, object]:
    return {
        "name": comparison.name,
        "settings": dict(comparison.settings),
        "outcome": str(comparison.outcome),
        "score_ratio": comparison.score_ratio,
        "ratios": dict(comparison.ratios),
        "message": comparison.message,
    }


def _duel(duel: DuelReport) -> Mapping[str, object]:
    return {
        "settings": dict(duel.settings),
        "block_count": duel.block_count,
        "launch_count": duel.launch_count,
        "score_ratio": duel.score_ratio,
        "score_ci": _interval(duel.interval),
        "score_ci_method": duel.interval.method,
        "verdict": str(duel.verdict),
        "guards": {size: _interval(interval) for size, interval in duel.guards.items()},
        "rejected_guards": list(duel.rejected_guards),
        "message": duel.message,
    }


def _interval(interval: Interval) -> list[float | None]:
    """Return both ends; an interval that is not known is open above, and tells nothing."""
    if not math.isfinite(interval.high):
        return [None, None]
    return [interval.low, interval.high]


def _ablation(result: SearchResult) -> list[Mapping[str, object]] | None:
    if result.ablation is None:
        return None
    return [
        {
            "variable": step.variable,
            "score_ratio_without": step.score_ratio_without,
            "is_dropped": step.is_dropped,
        }
        for step in result.ablation
    ]


def _launch(launch: Launch) -> Mapping[str, object]:
    return {"outcome": str(launch.outcome), "message": launch.message}
