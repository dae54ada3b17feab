"""What people see after a search: the verdict first, then what it rests on, then what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from nccltune.cli.envelope import one_line
from nccltune.cli.search_data import best_settings
from nccltune.cli.tables import fact_grid, heading, indent, number_table, settings_block
from nccltune.cli.words import (
    LIKELY_SLOWER_RATIO,
    MIB,
    OUTCOME_MEANING,
    SHARED_NOTE,
    UNKNOWN,
    describe_source,
    format_change,
    format_counts,
    format_duration,
    format_interval,
    format_ratio,
    format_settings,
    format_us,
    name_size,
    style_ratio,
)
from nccltune.measurement import Outcome
from nccltune.profile import SHARED_SOURCE
from nccltune.search.result import Comparison, Failure, PayloadRow, SearchResult, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from nccltune.cli.search_data import SavedProfile

VERDICT_STYLE = {
    Verdict.IMPROVED: "bold green",
    Verdict.KEEP_DEFAULT: "bold cyan",
    Verdict.INCONCLUSIVE: "bold yellow",
}
OUTCOME_WIDTH = max(map(len, Outcome))
COMPARISON_COLUMNS = 4
"""Candidates that stand side by side in 80 columns."""


def search_parts(
    result: SearchResult,
    saved: SavedProfile,
    *,
    next_command: str,
    memory_left_bytes: int | None = None,
    ended_by: str = "",
) -> Iterator[RenderableType]:
    """Yield the report of a search from top to bottom.

    ``memory_left_bytes`` is what the launch leaves on a GPU beside weights and KV cache; None where
    it does not say. ``ended_by`` is why there were no more trials, where fewer were made than asked
    for.
    """
    yield Text(result.sentence, style=VERDICT_STYLE[result.verdict])
    yield ""
    yield fact_grid(_facts(result, ended_by))
    if result.payloads:
        note = "median time of one all-reduce; ratio below 1 is faster"
        yield heading("Payloads", SHARED_NOTE if result.source == SHARED_SOURCE else note)
        yield indent(_payload_table(result.payloads))
    yield from _settings(result)
    yield from _comparisons(result)
    yield from _failures(result.failures)
    yield from _checks(result, memory_left_bytes)
    if saved.path is not None:
        yield heading("Saved as", saved.name or "")
        yield f"  {saved.path}"
    if next_command:
        yield heading("Next")
        yield f"  {next_command}"


def _facts(result: SearchResult, ended_by: str) -> Iterator[tuple[str, str]]:
    interval = result.score_interval
    ends = format_interval(interval.low, interval.high)
    yield (
        "score",
        f"{format_ratio(result.score_ratio)} of the baseline's all-reduce time"
        + (f", 95 % interval {ends}" if ends != UNKNOWN else ""),
    )
    if interval.method:
        yield "interval", interval.method
    yield "trials", _trials(result)
    if ended_by:
        yield "ended by", ended_by
    yield "source", describe_source(result.source)
    if result.duel is not None:
        duel = result.duel
        yield (
            "duel",
            f"{duel.launch_count} fresh launches in {duel.block_count} ABBA blocks: "
            f"{format_ratio(duel.score_ratio)}, {duel.verdict}"
            + (f"; {duel.message}" if duel.message else ""),
        )
    if result.not_run:
        yield "not run", result.not_run


def _payload_table(rows: tuple[PayloadRow, ...]) -> RenderableType:
    columns = ["bytes", "weight", "baseline\nus", "tuned\nus", "ratio"]
    has_interval = any(row.ratio_low is not None for row in rows)
    has_used = any(row.used for row in rows)
    columns += ["95 %\ninterval"] if has_interval else []
    columns += ["NCCL used"] if has_used else []
    return number_table(
        columns,
        (_payload_cells(row, has_interval=has_interval, has_used=has_used) for row in rows),
        words=("NCCL used",),
    )


def _payload_cells(row: PayloadRow, *, has_interval: bool, has_used: bool) -> list[str | Text]:
    cells: list[str | Text] = [
        str(row.size_bytes),
        Text("guard", style="dim") if row.is_guard else f"{row.weight:.3f}",
        format_us(row.baseline_us),
        format_us(row.tuned_us),
        _ratio_text(row.ratio, is_guard=row.is_guard),
    ]
    if has_interval:
        cells.append(format_interval(row.ratio_low, row.ratio_high))
    if has_used:
        cells.append(row.used)
    return cells


def _ratio_text(ratio: float | None, *, is_guard: bool = False) -> Text:
    return Text(format_ratio(ratio), style=style_ratio(ratio, is_guard=is_guard))


def _trials(result: SearchResult) -> str:
    of_all = f" of {result.trial_limit}" if result.trial_count < result.trial_limit else ""
    pruned = f"; {result.pruned_count} of them pruned" if result.pruned_count else ""
    return (
        f"{result.trial_count}{of_all} in {format_duration(result.duration_s)}"
        f" ({format_counts(result.outcome_counts)}{pruned})"
    )


def _settings(result: SearchResult) -> Iterator[RenderableType]:
    is_better = result.verdict is Verdict.IMPROVED
    settings = best_settings(result)
    if not settings:
        return
    yield heading("Settings") if is_better else heading("Best settings tried", "not saved")
    remarks = {}
    dropped = []
    for step in result.ablation or ():
        if step.is_dropped:
            dropped.append(step.variable)
        elif step.score_ratio_without is not None:
            remarks[step.variable] = f"without it {format_change(step.score_ratio_without)}"
    yield indent(settings_block(settings, remarks))
    if dropped:
        yield indent(Text(f"left out, as they do not pay: {', '.join(dropped)}", style="dim"))


def _comparisons(result: SearchResult) -> Iterator[RenderableType]:
    shown = [each for each in result.comparisons if each.ratios][:COMPARISON_COLUMNS]
    if not result.comparisons:
        return
    yield heading("Beside the baseline", "time ratio; below 1 is faster" if shown else "")
    if shown:
        rows: list[list[str | Text]] = []
        for payload in result.payloads:
            ratios = [_ratio_text(each.ratios.get(payload.size_bytes)) for each in shown]
            rows.append([f"{payload.size_bytes}", _ratio_text(payload.ratio), *ratios])
        scores = [_ratio_text(each.score_ratio) for each in shown]
        rows.append(["score", _ratio_text(result.score_ratio), *scores])
        yield indent(number_table(["bytes", "tuned", *(each.name for each in shown)], rows))
    for each in result.comparisons:
        yield indent(Text(_comparison_sentence(each, result.payloads)))


def _comparison_sentence(comparison: Comparison, rows: tuple[PayloadRow, ...]) -> str:
    if comparison.outcome is not Outcome.OK:
        said = comparison.message or OUTCOME_MEANING[comparison.outcome]
        return f"{comparison.name}: {comparison.outcome}: {one_line(said)}"
    parts = []
    if comparison.score_ratio is not None:
        parts.append(f"{format_change(comparison.score_ratio)} by score")
    if comparison.message:
        return f"{comparison.name}: {'; '.join([*parts, one_line(comparison.message)])}"
    sizes = {row.size_bytes for row in rows}
    known = {size: ratio for size, ratio in comparison.ratios.items() if size in sizes}
    if known:
        worst = max(known, key=lambda size: known[size])
        if known[worst] > LIKELY_SLOWER_RATIO:
            parts.append(f"{format_change(known[worst])} at {name_size(worst)}")
    return f"{comparison.name}: {'; '.join(parts) or 'measured'}"


def _failures(failures: tuple[Failure, ...]) -> Iterator[RenderableType]:
    if not failures:
        return
    yield heading("Trials that did not end ok", "one example each")
    shown: list[tuple[Text, Text]] = []
    for outcome in Outcome:
        same = [each for each in failures if each.outcome is outcome]
        if not same:
            continue
        # the fewer settings, the plainer which of them did it
        one = min(same, key=lambda each: len(each.settings))
        said = one_line(one.message) or OUTCOME_MEANING[outcome]
        example = f"trial {one.trial_idx}: {format_settings(one.settings)}\n"
        shown.append(
            (
                Text(f"{outcome:<{OUTCOME_WIDTH}} {len(same):>3}"),
                Text.assemble(example, (said, "dim")),
            )
        )
    yield indent(fact_grid(shown, name_style="red"))


def _checks(result: SearchResult, memory_left_bytes: int | None) -> Iterator[RenderableType]:
    facts = []
    if result.collectives is not None:
        launch = result.collectives
        is_right = launch.outcome is Outcome.OK
        said = "right data" if is_right else f"{launch.outcome}: {one_line(launch.message)}"
        facts.append(("all-gather, broadcast, reduce-scatter", said))
    if result.memory_bytes_per_gpu is not None:
        facts.append(("GPU memory of two communicators", _memory(result)))
    if memory_left_bytes is not None:
        left = f"{memory_left_bytes / MIB:.0f} MiB a GPU, for CUDA graphs and activations too"
        facts.append(("left by --mem-fraction-static", left))
    if facts:
        yield heading("Checked")
        yield indent(fact_grid(facts))


def _memory(result: SearchResult) -> str:
    text = f"{(result.memory_bytes_per_gpu or 0) / MIB:.0f} MiB a GPU"
    if result.memory_baseline_bytes_per_gpu is None:
        return text
    return f"{text}; the defaults take {result.memory_baseline_bytes_per_gpu / MIB:.0f} MiB"
