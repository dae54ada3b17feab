"""How a comparison of candidates with the baseline reads, for scripts and for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from nccltune.bench.compare import MIN_INTERVAL_PAIRS
from nccltune.cli.envelope import one_line
from nccltune.cli.tables import fact_grid, heading, indent, number_table, settings_block
from nccltune.cli.words import (
    MIB,
    OUTCOME_MEANING,
    SHARED_NOTE,
    describe_source,
    format_duration,
    format_interval,
    format_ratio,
    format_us,
    style_ratio,
)
from nccltune.measurement import Outcome
from nccltune.profile import SHARED_SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from nccltune.bench.report import BenchReport, BenchRow, Spread


def bench_data(reports: Sequence[BenchReport], *, workload: str) -> dict[str, object]:
    """Lay out reports for the envelope; payloads and outcome of the first stand at the top too."""
    candidates = [_candidate(report) for report in reports]
    first = candidates[0]
    return {
        "payloads": first["payloads"],
        "outcome": first["outcome"],
        "candidates": candidates,
        "source": reports[0].source,
        "world_size": reports[0].world_size,
        "workload": workload,
    }


def bench_parts(reports: Sequence[BenchReport]) -> Iterator[RenderableType]:
    """Yield the report of every candidate from top to bottom."""
    for report in reports:
        yield Text(_sentence(report), style="bold" if report.outcome is Outcome.OK else "bold red")
        yield fact_grid(_facts(report))
        yield heading("Settings", report.name)
        yield indent(settings_block(report.settings))
        if report.rows:
            note = "one all-reduce, over every replay of every launch"
            yield heading("Times", SHARED_NOTE if report.source == SHARED_SOURCE else note)
            yield indent(_times_table(report.rows))
        if any(row.ratio is not None or not row.is_data_ok for row in report.rows):
            yield heading("Candidate over baseline", "below 1 is faster")
            yield indent(_ratio_table(report.rows))
        if report is not reports[-1]:
            yield ""


def _sentence(report: BenchReport) -> str:
    if report.outcome is not Outcome.OK:
        said = one_line(report.message) or OUTCOME_MEANING[report.outcome]
        return f"{report.name}: {report.outcome}: {said}"
    if all(row.ratio_low is None for row in report.rows):
        return f"{report.name}: measured; too few launches to tell a difference from noise."
    faster = [row.size_bytes for row in report.rows if _is_below(row.ratio_high, 1.0)]
    slower = [row.size_bytes for row in report.rows if _is_above(row.ratio_low, 1.0)]
    count = len(report.rows)
    where = f" ({', '.join(f'{size_bytes} B' for size_bytes in slower)})" if slower else ""
    return (
        f"{report.name}: faster at {len(faster)} of {count} payloads, slower at {len(slower)}"
        f"{where}, no clear difference at {count - len(faster) - len(slower)}."
    )


def _is_below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def _is_above(value: float | None, limit: float) -> bool:
    return value is not None and value > limit


def _facts(report: BenchReport) -> Iterator[tuple[str, str]]:
    yield (
        "launches",
        f"{report.launch_count} of {report.world_size} ranks each, "
        f"in {format_duration(report.duration_s)}",
    )
    yield "source", describe_source(report.source)
    if report.interval_method:
        yield "interval", report.interval_method
    elif report.rows:
        yield "interval", f"none: it takes {MIN_INTERVAL_PAIRS} launches an arm"
    if report.memory_bytes_per_gpu is not None:
        yield "memory", f"{report.memory_bytes_per_gpu / MIB:.0f} MiB a GPU for one communicator"


def _times_table(rows: Sequence[BenchRow]) -> RenderableType:
    columns = (
        "bytes",
        "baseline\nmedian us",
        "p10 us",
        "p90 us",
        "candidate\nmedian us",
        "p10 us ",
        "p90 us ",
        "bus bw\nGB/s",
    )
    return number_table(
        columns,
        (
            [
                str(row.size_bytes),
                *_spread_cells(row.baseline),
                *_spread_cells(row.candidate),
                "-" if row.busbw_gb_s is None else f"{row.busbw_gb_s:.2f}",
            ]
            for row in rows
        ),
    )


def _spread_cells(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return "-", "-", "-"
    return format_us(spread.median_us), format_us(spread.p10_us), format_us(spread.p90_us)


def _ratio_table(rows: Sequence[BenchRow]) -> RenderableType:
    columns = ["bytes", "ratio", "95 %\ninterval", "data"]
    has_used = any(row.used or row.baseline_used for row in rows)
    columns += ["baseline used", "candidate used"] if has_used else []
    cells = []
    for row in rows:
        data = Text("right") if row.is_data_ok else Text("WRONG", style="bold red")
        line: list[str | Text] = [
            str(row.size_bytes),
            Text(format_ratio(row.ratio), style=style_ratio(row.ratio)),
            format_interval(row.ratio_low, row.ratio_high),
            data,
        ]
        cells.append(line + ([row.baseline_used, row.used] if has_used else []))
    return number_table(columns, cells, words=("baseline used", "candidate used"))


def _candidate(report: BenchReport) -> Mapping[str, object]:
    return {
        "name": report.name,
        "settings": dict(report.settings),
        "outcome": str(report.outcome),
        "message": report.message,
        "launch_count": report.launch_count,
        "duration_s": report.duration_s,
        "interval_method": report.interval_method,
        "memory_bytes_per_gpu": report.memory_bytes_per_gpu,
        "phases_s": dict(report.phases_s),
        "payloads": [_row(row) for row in report.rows],
    }


def _row(row: BenchRow) -> Mapping[str, object]:
    return {
        "bytes": row.size_bytes,
        "baseline": _spread(row.baseline),
        "candidate": None if row.candidate is None else _spread(row.candidate),
        "ratio": row.ratio,
        "ratio_ci": [row.ratio_low, row.ratio_high],
        "baseline_busbw_gb_s": row.baseline_busbw_gb_s,
        "busbw_gb_s": row.busbw_gb_s,
        "is_data_ok": row.is_data_ok,
        "baseline_used": row.baseline_used,
        "used": row.used,
    }


def _spread(spread: Spread) -> Mapping[str, object]:
    return {"median_us": spread.median_us, "p10_us": spread.p10_us, "p90_us": spread.p90_us}
