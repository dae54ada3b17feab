"""What people see after a verify: the verdict first, then what it rests on, then what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from nccltune.block_rule import GuardAnswer
from nccltune.cli.envelope import one_line
from nccltune.cli.tables import fact_grid, heading, indent, number_table
from nccltune.cli.words import (
    format_gain,
    format_gain_interval,
    format_number,
    format_settings,
)
from nccltune.verify.judging.cost_model import Refusal
from nccltune.verify.judging.judgement import Cause, Metric, Verdict

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from rich.console import RenderableType

    from nccltune.cli.verify_data import Verified
    from nccltune.verify.judging.cost_model import CostModel
    from nccltune.verify.judging.judgement import Comparison, Judgement
    from nccltune.verify.judging.numbers import ArmSummary
    from nccltune.verify.model import Boot

MAX_MISSES = 3
SIMULATED_NOTE = "simulated acceptance: tok/s are not those of real prompts"
VERDICT_STYLE = {
    Verdict.GAIN: "bold green",
    Verdict.NO_DIFFERENCE: "bold cyan",
    Verdict.REGRESSION: "bold red",
    Verdict.DRIFT: "bold yellow",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.UNUSABLE: "bold red",
}
METRIC_WORDS = {
    Metric.MS_PER_VERIFY: "time of a verify step",
    Metric.MS_PER_TOKEN: "time of a token",
}
GUARD_NAMES = {"ttft_short": "TTFT, short prompt", "ttft_long": "TTFT, long prompt"}
GUARD_WORDS = {
    GuardAnswer.ACCEPTED: "not 5 % slower",
    GuardAnswer.REJECTED: "SLOWER",
    GuardAnswer.MORE: "not decided",
}
SPEED_COLUMNS = (
    "config",
    "tok/s",
    "against\nbaseline",
    "ms per\nverify",
    "accept\nlength",
    "boots",
)
LATENCY_COLUMNS = (
    "config",
    "TTFT\nshort",
    "TTFT\nlong",
    "ITL\np50",
    "ITL\np99",
    "boots\napart",
    "start\ns",
)
COMPARISON_COLUMNS = ("what", "saved", "interval", "blocks", "answer")
PREDICTION_COLUMNS = ("config", "predicted\nms a step", "measured\nms a step", "NCCL's\nshare")
COST_COLUMNS = ("draft\nsteps", "ms a\nstep", "accept\nlength", "tok/s", "95 %\ninterval", "")


def verify_parts(verified: Verified) -> Iterator[RenderableType]:
    """Yield the report of a verify from top to bottom."""
    judgement = verified.judgement
    yield Text(judgement.sentence, style=VERDICT_STYLE[judgement.verdict])
    yield ""
    yield fact_grid(facts(verified))
    if any(summary.boot_count for summary in verified.summaries):
        note = "medians of runs, means of boots"
        yield heading("Speed", SIMULATED_NOTE if verified.is_simulated else note)
        yield indent(number_table(SPEED_COLUMNS, speed_rows(verified), words=("config",)))
        yield heading("Latency", "time to first token (TTFT) and between tokens (ITL), in ms")
        yield indent(number_table(LATENCY_COLUMNS, latency_rows(verified), words=("config",)))
    yield from _comparisons(judgement.comparisons)
    # What a server answered is told with the errors, once.
    yield from _reasons(judgement, {problem.message for problem in verified.record.problems})
    yield from _predictions(judgement.comparisons)
    if judgement.cost_model is not None:
        yield from _cost_model(judgement.cost_model)
    yield from _runs(verified.record.boots)
    if verified.path is not None:
        yield heading("Kept as", verified.record.id)
        yield f"  {verified.path}"
    if verified.next_command:
        yield heading("Next")
        yield f"  {verified.next_command}"


def facts(verified: Verified) -> Iterator[tuple[str, str]]:
    """Yield what was compared, with how much load, and what came out of the order."""
    record = verified.record
    if record.url:
        yield "server", record.url
    for arm in record.arms:
        settings = {} if arm.profile is None else arm.profile.settings
        shown = f"profile {arm.profile.name}: {format_settings(settings)}" if arm.profile else ""
        yield f"arm {arm.name}", "; ".join(filter(None, (shown, arm.note))) or "no profile"
    load = record.load
    streams = load.get("concurrency", 1)
    plural = "stream" if streams == 1 else "streams at once"
    runs = load.get("run_count")
    rounds = f"{runs} {'run' if runs == 1 else 'runs'}"
    yield "load", f"{rounds} of {load.get('tokens')} tokens, {streams} {plural}"
    made = len(record.boots)
    if not record.url:
        order = "in mirrored order" if record.boot_total > len(record.arms) else "one of each arm"
        yield "boots", f"{made} of {record.boot_total}, {order}"
    for name in verified.marked:
        yield "verified", f"profile {name} is marked as verified on this host"
    if verified.baseline_ids:
        yield "baseline", ", ".join(verified.baseline_ids)
    for note in record.notes:
        yield "note", note


def speed_rows(verified: Verified) -> Iterator[list[str]]:
    """Yield the columns of the table that people compare: config, tok/s, against the baseline."""
    baseline = verified.summaries[0]
    for summary in verified.summaries:
        yield [
            summary.arm,
            format_number(summary.tok_s, 1),
            _against(summary, baseline),
            format_number(summary.ms_per_verify, 2),
            format_number(summary.accept_length, 2),
            str(summary.boot_count),
        ]


def _against(summary: ArmSummary, baseline: ArmSummary) -> str:
    if summary is baseline or summary.tok_s is None or not baseline.tok_s:
        return ""
    return format_gain(100.0 * (summary.tok_s / baseline.tok_s - 1.0))


def latency_rows(verified: Verified) -> Iterator[list[str]]:
    """Yield times to first token and between tokens, and how far boots are apart."""
    for summary in verified.summaries:
        spread = summary.spread_pct
        yield [
            summary.arm,
            format_number(summary.ttft_short_ms, 1),
            format_number(summary.ttft_long_ms, 1),
            format_number(summary.itl_p50_ms, 2),
            format_number(summary.itl_p99_ms, 2),
            "" if spread is None else f"{spread:.2f} %",
            format_number(summary.start_s or None, 0),  # 0: started by somebody else
        ]


def comparison_rows(comparisons: Sequence[Comparison]) -> Iterator[list[str | Text]]:
    """Yield the effect of each arm with its interval, guards below it."""
    for each in comparisons:
        style = VERDICT_STYLE[each.answer].removeprefix("bold ")
        yield [
            f"{each.arm}: {METRIC_WORDS[each.metric]}",
            format_gain(each.effect_pct),
            format_gain_interval(each.effect_ci_pct),
            str(each.block_count),
            Text(str(each.answer), style=style),
        ]
        for guard in each.guards:
            is_bad = guard.answer is GuardAnswer.REJECTED
            is_untold = guard.is_too_uneven and not guard.is_suspect
            word = "too uneven to tell" if is_untold else GUARD_WORDS[guard.answer]
            yield [
                f"  {GUARD_NAMES.get(guard.name, guard.name)}",
                format_gain(guard.effect_pct),
                format_gain_interval(guard.effect_ci_pct),
                "",
                Text(word, style="red" if is_bad else ""),
            ]


def _comparisons(comparisons: Sequence[Comparison]) -> Iterator[RenderableType]:
    if all(each.effect_pct is None for each in comparisons):
        return
    yield heading(f"Against {comparisons[0].baseline}", "time saved; above 0 is a gain")
    rows = comparison_rows(comparisons)
    yield indent(number_table(COMPARISON_COLUMNS, rows, words=("what", "answer")))


def _reasons(judgement: Judgement, told: Container[str]) -> Iterator[RenderableType]:
    lines = list(reason_lines(judgement, told))
    if lines:
        yield heading("Why", "and what limits the answer")
        yield indent(fact_grid(("-", text) for text in lines))


def reason_lines(judgement: Judgement, told: Container[str] = ()) -> Iterator[str]:
    """Yield a line for each reason that the sentence does not say already.

    Of stored verifies that do not serve, only the newest few are named.

    Args:
        told: reasons that are said elsewhere.
    """
    sentence = judgement.sentence
    open_ = [one for one in judgement.reasons if one.text not in sentence and one.text not in told]
    hidden = [each for each in open_ if each.cause is Cause.NO_BASELINE][MAX_MISSES:]
    yield from (one_line(each.text) for each in open_ if each not in hidden)
    if hidden:
        yield f"{len(hidden)} older verifies do not serve either"


def prediction_rows(comparisons: Sequence[Comparison]) -> Iterator[list[str]]:
    """Yield what a step should save, and what it saved."""
    for each in comparisons:
        check = each.check
        if check is not None:
            yield [
                each.arm,
                f"{check.predicted_saved_ms:+z.3f}",
                f"{check.measured_saved_ms:+z.3f}",
                f"{100.0 * check.nccl_share:.0f} %",
            ]


def _predictions(comparisons: Sequence[Comparison]) -> Iterator[RenderableType]:
    rows = list(prediction_rows(comparisons))
    if not rows:
        return
    yield heading("Predicted beside measured", "collectives of a step x measured time of each")
    yield indent(number_table(PREDICTION_COLUMNS, rows, words=("config",)))
    for each in comparisons:
        if each.check is not None:
            yield indent(Text(f"{each.arm}: {one_line(each.check.sentence)}"))


def _cost_model(found: CostModel | Refusal) -> Iterator[RenderableType]:
    yield heading("Draft steps", "cost of a step = fixed + draft steps x cost of each")
    if isinstance(found, Refusal):
        yield indent(Text(one_line(found.reason)))
        return
    yield indent(number_table(COST_COLUMNS, cost_rows(found), words=("",)))
    for line in cost_lines(found):
        yield indent(Text(line))


def cost_rows(model: CostModel) -> Iterator[list[str]]:
    """Yield one number of draft steps a row."""
    for each in model.estimates:
        low, high = each.tok_s_low, each.tok_s_high
        words = ["measured" if each.is_measured else "", "best" if each is model.best else ""]
        yield [
            str(each.num_steps),
            f"{each.ms_per_step:.2f}",
            f"{each.accept_length:.2f}",
            f"{each.tok_s:.1f}",
            "" if low is None or high is None else f"{low:.1f}..{high:.1f}",
            ", ".join(filter(None, words)),
        ]


def cost_lines(model: CostModel) -> Iterator[str]:
    """Say the model in words, and what to keep in mind about it."""
    yield model.sentence
    line = f"{model.fixed_ms:.2f} ms fixed, {model.per_step_ms:.2f} ms for each draft step"
    if model.speculation_ms is not None:
        line += f"; plain decoding takes {model.speculation_ms:.2f} ms less than the fixed part"
    yield line
    yield from map(one_line, model.notes)


def _runs(boots: Sequence[Boot]) -> Iterator[RenderableType]:
    if not boots:
        return
    yield heading("Runs", "of each boot, in the order of the boots")
    columns = ["boot", "config", "tok/s", "ms per verify"]
    rows = [
        [
            str(boot.position + 1),
            boot.arm,
            " ".join(f"{run.tok_s:.{0 if run.tok_s >= 100.0 else 1}f}" for run in boot.runs),
            " ".join(format_number(run.ms_per_verify, 2) for run in boot.runs),
        ]
        for boot in boots
    ]
    yield indent(number_table(columns, rows, words=("config", "tok/s", "ms per verify")))
