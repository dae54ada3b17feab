"""The report of a verify as Markdown, for an issue or a wiki: what the terminal shows, whole."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from nccltune.cli.envelope import one_line
from nccltune.cli.verify_report import (
    COMPARISON_COLUMNS,
    COST_COLUMNS,
    LATENCY_COLUMNS,
    PREDICTION_COLUMNS,
    SIMULATED_NOTE,
    SPEED_COLUMNS,
    comparison_rows,
    cost_lines,
    cost_rows,
    facts,
    latency_rows,
    prediction_rows,
    reason_lines,
    speed_rows,
)
from nccltune.cli.words import format_number
from nccltune.verify.judging.cost_model import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.text import Text

    from nccltune.cli.verify_data import Verified
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.verify.judging.judgement import Comparison
    from nccltune.verify.model import Boot

RUN_COLUMNS = (
    "boot",
    "config",
    "run",
    "tokens",
    "seconds",
    "tok/s",
    "TTFT ms",
    "accept length",
    "ms per verify",
)


def format_markdown(verified: Verified) -> str:
    """Return the whole document."""
    return "\n".join(_lines(verified)) + "\n"


def _lines(verified: Verified) -> Iterator[str]:
    record, judgement = verified.record, verified.judgement
    yield f"# nccltune verify: {judgement.verdict}"
    yield ""
    yield _escaped(judgement.sentence)
    yield ""
    if verified.is_simulated:
        yield f"**{SIMULATED_NOTE}**"
        yield ""
    if record.boots:
        yield from _table(SPEED_COLUMNS, speed_rows(verified))
        yield from _section("Latency", "ms; TTFT is time to first token, ITL inter-token latency")
        yield from _table(LATENCY_COLUMNS, latency_rows(verified))
    if judgement.comparisons:
        yield from _section(f"Against {judgement.comparisons[0].baseline}", "time saved")
        yield from _table(COMPARISON_COLUMNS, comparison_rows(judgement.comparisons))
    reasons = list(reason_lines(judgement))
    if reasons:
        yield from _section("Why")
        yield from (f"- {_escaped(text)}" for text in reasons)
        yield ""
    yield from _predictions(judgement.comparisons)
    yield from _cost_model(verified)
    yield from _section("What was run")
    if record.launch:
        yield from ("```sh", shlex.join(record.launch), "```", "")
    yield from _table(("", ""), facts(verified))
    yield from _table(("host", ""), _host(record.fingerprint))
    if record.boots:
        yield from _section("Every run")
        yield from _table(RUN_COLUMNS, _run_rows(record.boots))
    yield f"Record `{record.id}`, begun {record.created_at}."


def _predictions(comparisons: Sequence[Comparison]) -> Iterator[str]:
    checks = [each.check for each in comparisons if each.check is not None]
    if checks:
        yield from _section("Predicted beside measured", "collectives of a step x time of each")
        yield from _table(PREDICTION_COLUMNS, prediction_rows(comparisons))
        yield from (f"{_escaped(one_line(check.sentence))}\n" for check in checks)


def _cost_model(verified: Verified) -> Iterator[str]:
    found = verified.judgement.cost_model
    if found is None:
        return
    yield from _section("Draft steps")
    if isinstance(found, Refusal):
        yield from (_escaped(one_line(found.reason)), "")
        return
    yield from _table(COST_COLUMNS, cost_rows(found))
    yield from (f"- {_escaped(line)}" for line in cost_lines(found))
    yield ""


def _host(fingerprint: Fingerprint | None) -> Iterator[tuple[str, str]]:
    if fingerprint is None:
        yield "GPUs", "not known"
        return
    yield "GPUs", ", ".join(fingerprint.gpu_names)
    yield "driver", fingerprint.driver_version or "not known"
    yield "NCCL", fingerprint.nccl_version or "not known"


def _run_rows(boots: Sequence[Boot]) -> Iterator[list[str]]:
    for boot in boots:
        for idx, run in enumerate(boot.runs):
            yield [
                str(boot.position + 1),
                boot.arm,
                str(idx + 1),
                str(run.tokens),
                f"{run.duration_s:.3f}",
                f"{run.tok_s:.1f}",
                f"{run.ttft_ms:.1f}",
                format_number(run.accept_length, 2),
                format_number(run.ms_per_verify, 2),
            ]


def _section(title: str, note: str = "") -> Iterator[str]:
    yield f"## {_escaped(title)}"
    yield ""
    if note:
        yield from (f"*{note}*", "")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Iterator[str]:
    """Yield a table with its first column to the left and the others to the right."""
    yield f"| {' | '.join(name.replace(chr(10), ' ') for name in columns)} |"
    yield f"| {' | '.join('---:' if idx else '---' for idx in range(len(columns)))} |"
    for row in rows:
        yield f"| {' | '.join(_escaped(str(cell)) for cell in row)} |"
    yield ""


def _escaped(text: str) -> str:
    r"""Keep what came from a server or a person from being read as Markdown.

    >>> _escaped("a|b <c> `d` *e*")
    'a\\|b &lt;c> \\`d\\` \\*e\\*'
    """
    for char in "\\`*_[]|":
        text = text.replace(char, f"\\{char}")
    return text.replace("<", "&lt;")
