"""``nccltune install`` and ``nccltune uninstall``: units of systemd, and the hook for SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nccltune.cli.envelope import Answer
from nccltune.cli.options import json_option
from nccltune.cli.tables import heading, indent
from nccltune.installing import (
    Action,
    Places,
    Request,
    carry_out,
    find_interpreters,
    plan_install,
    plan_uninstall,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from nccltune.installing import Plan

NO_SGLANG = (
    "no interpreter with SGLang was found, so that launches typed by hand get no profile; "
    "name one: --python PATH"
)

_dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would be done, alone.")


def _python_option(summary: str) -> Callable[[Any], Any]:
    return click.option(
        "--python",
        "pythons",
        multiple=True,
        metavar="PATH",
        type=click.Path(path_type=Path),
        help=summary,
    )


@click.command(name="install")
@_python_option(
    "Interpreter that runs SGLang, for the hook. Repeatable. Default: those with SGLang that are "
    "found without a search."
)
@click.option(
    "--unit",
    "wrapped_units",
    multiple=True,
    metavar="NAME",
    help="A server's unit of yours, to put 'nccltune run --' before its command. Repeatable.",
)
@click.option(
    "--units/--no-units",
    "wants_units",
    default=None,
    help="Install units of systemd. Default: for root, where systemd runs.",
)
@_dry_run_option
@json_option
def install_command(
    pythons: tuple[Path, ...],
    wrapped_units: tuple[str, ...],
    wants_units: bool | None,
    dry_run: bool,
) -> Answer:
    """Install the service's units, and the hook that SGLang runs at every launch.

    Nothing is started, and systemd is not reloaded: the commands for that are shown at the end.
    """
    chosen = pythons or find_interpreters(os.environ)
    plan = plan_install(Request(chosen, wrapped_units, wants_units), Places())
    missing = () if chosen else (NO_SGLANG,)
    return _answer(plan, is_dry_run=dry_run, warnings=missing)


@click.command(name="uninstall")
@_python_option("A further interpreter to take the hook out of. Repeatable.")
@_dry_run_option
@json_option
def uninstall_command(pythons: tuple[Path, ...], dry_run: bool) -> Answer:
    """Take away everything that 'nccltune install' has put anywhere. Profiles stay."""
    plan = plan_uninstall(Request(pythons), Places())
    return _answer(plan, is_dry_run=dry_run)


def _answer(plan: Plan, *, is_dry_run: bool, warnings: tuple[str, ...] = ()) -> Answer:
    if not is_dry_run:
        carry_out(plan)
    data = {
        "is_dry_run": is_dry_run,
        "steps": [{"action": str(step.action), "path": str(step.path)} for step in plan.steps],
        "commands": list(plan.commands),
    }
    return Answer(
        data=data,
        show=lambda: _parts(plan, is_dry_run=is_dry_run),
        warnings=(*plan.warnings, *warnings),
    )


def _parts(plan: Plan, *, is_dry_run: bool) -> Iterator[RenderableType]:
    changes = [step for step in plan.steps if step.is_change]
    unchanged_count = sum(step.action is Action.UNCHANGED for step in plan.steps)
    if is_dry_run:
        yield heading("This would be done")
    elif changes:
        yield heading("Done")
    for step in changes:
        yield f"  {step.action:<8} {step.path}"
    if not changes:
        is_there = unchanged_count > 0
        yield "  Nothing: everything is there." if is_there else "  Nothing."
    elif unchanged_count:
        yield f"  {unchanged_count} more are there already."
    if plan.commands:
        yield heading("Then, by yourself")
        yield indent("\n".join(plan.commands))
