"""``nccltune doctor``: everything that would make a launch slower than believed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from nccltune.cli.envelope import Answer, one_line
from nccltune.cli.options import json_option, launch_argument
from nccltune.cli.tables import number_table
from nccltune.doctor import Check, Status, examine, own_sources, read_case
from nccltune.errors import ExitCode, UsageProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}


@click.command(name="doctor")
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The server's interpreter. Default: that of CMD, else this one if it has SGLang.",
)
@launch_argument
@json_option
def command(python: Path | None, launch: tuple[str, ...]) -> Answer:
    """Look for what makes launches slower than believed, or measurements worthless.

    A server's launch command can stand after --; its all-reduces, memory and draft are looked at
    too. Ends with 3 when something fails, with 0 otherwise. Nothing is changed, and no GPU is used.
    """
    if python is not None and not python.exists():
        raise UsageProblem(f"--python {python}: no such file", code="no_such_python")
    checks = examine(read_case(own_sources(), python=python, argv=launch))
    has_failure = any(check.status is Status.FAIL for check in checks)
    return Answer(
        data={"checks": [_row(check) for check in checks], "counts": _counts(checks)},
        show=lambda: _parts(checks),
        exit_code=ExitCode.NO if has_failure else ExitCode.DONE,
    )


def _row(check: Check) -> dict[str, str]:
    return {
        "id": check.id,
        "status": str(check.status),
        "message": one_line(check.message),
        "fix": one_line(check.fix),
    }


def _counts(checks: Sequence[Check]) -> dict[str, int]:
    found = Counter(check.status for check in checks)
    return {str(status): found[status] for status in Status}


def _parts(checks: Sequence[Check]) -> Iterator[RenderableType]:
    columns = ("check", "state", "found")
    yield number_table(columns, (_cells(check) for check in checks), words=columns)
    counts = _counts(checks)
    yield Text(", ".join(f"{count} {status}" for status, count in counts.items() if count))


def _cells(check: Check) -> list[str | Text]:
    style = _STYLES[check.status]
    found = Text(one_line(check.message), style="dim" if check.status is Status.SKIP else "")
    if check.fix:
        found.append(f"\nfix: {one_line(check.fix)}", style="cyan")
    return [check.id, Text(str(check.status), style=style), found]
