"""The command line: one module a verb, loaded only when that verb is called."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING

import click

import nccltune
from nccltune.cli import render
from nccltune.cli.envelope import DEBUG_VARIABLE, Answer, Complaint, Envelope, Failure, failure_from
from nccltune.cli.invocation import Invocation
from nccltune.cli.lazy import LazyGroup, Verb
from nccltune.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["main"]

HELP_WIDTH = 100
VERBS: Mapping[str, Verb] = {
    "search": Verb(
        "nccltune.cli.search", "Find the NCCL settings that make all-reduces fastest here."
    ),
    "bench": Verb("nccltune.cli.bench", "Measure candidates beside the baseline."),
    "payloads": Verb("nccltune.cli.payloads", "Show what a model and a launch reduce."),
    "recording": Verb("nccltune.cli.recording", "List, show and make recordings of real GPUs."),
    "profile": Verb("nccltune.cli.profile", "Choose, look at, import and export profiles."),
    "run": Verb("nccltune.cli.run", "Become a command, under the active profile."),
    "launch": Verb("nccltune.cli.launch", "Start a server under the active profile, and watch it."),
    "verify": Verb("nccltune.cli.verify", "Prove on a real server whether tokens come faster."),
    "history": Verb("nccltune.cli.history", "List verifies and searches, and how this host moved."),
    "status": Verb("nccltune.cli.status", "Show whether running servers have the active profile."),
    "doctor": Verb("nccltune.cli.doctor", "Look for what makes launches slower than believed."),
    "install": Verb("nccltune.cli.install", "Put units and hook in place.", "install_command"),
    "uninstall": Verb("nccltune.cli.install", "Take them away again.", "uninstall_command"),
}


def _print_version(ctx: click.Context, _param: click.Parameter, value: object) -> None:
    if not value or ctx.resilient_parsing:
        return
    click.echo(f"nccltune {nccltune.__version__}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Find, prove and keep the NCCL settings that make tensor-parallel decoding fastest.

    Start with: nccltune search. Every command but run and launch takes --json for
    scripts.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. No exception but a bug in here leaves it."""
    if "_NCCLTUNE_COMPLETE" in os.environ:
        cli.main(prog_name="nccltune")
    given = list(sys.argv[1:] if arguments is None else arguments)
    invocation = Invocation.from_arguments(given)
    render.prepare_streams()
    try:
        return _run(given or ["--help"], invocation)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary to the user
        if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            render.print_traceback(error)
        return _fail(error, invocation)


def _run(arguments: list[str], invocation: Invocation) -> int:
    # stdout belongs to the envelope: nothing else that is printed may break a script's parser
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed) if invocation.wants_json else contextlib.nullcontext():
        try:
            with cli.make_context("nccltune", arguments, obj=invocation) as context:
                answer = cli.invoke(context)
        except click.exceptions.Exit as end:
            answer = end
    if isinstance(answer, Answer):
        return _deliver(answer, invocation)
    exit_code = answer.exit_code if isinstance(answer, click.exceptions.Exit) else ExitCode.DONE
    if invocation.wants_json:  # --help or --version beside --json
        text = {"text": printed.getvalue()}
        render.print_envelope(Envelope(invocation.command, exit_code, text))
    return exit_code


def _deliver(answer: Answer, invocation: Invocation) -> int:
    if invocation.wants_json:
        found = (answer.data, answer.warnings, answer.errors)
        render.print_envelope(Envelope(invocation.command, answer.exit_code, *found))
        return int(answer.exit_code)
    render.print_report(answer.show())
    render.print_warnings(answer.warnings)
    for complaint in answer.errors:
        render.print_failure(complaint.message)
    return int(answer.exit_code)


def _fail(error: BaseException, invocation: Invocation) -> int:
    failure = failure_from(error, invocation.command)
    if isinstance(error, click.NoSuchOption) and invocation.has_stray_launch:
        hint = f"{failure.complaint.message}; a server's launch command stands after --"
        failure = Failure(failure.exit_code, Complaint(failure.complaint.code, hint))
    is_told = False
    if invocation.wants_json and not isinstance(error, render.OutputError):
        envelope = Envelope(invocation.command, failure.exit_code, errors=(failure.complaint,))
        with contextlib.suppress(render.OutputError):
            render.print_envelope(envelope)
            is_told = True
    if not is_told:
        render.print_failure(failure.complaint.message)
    return int(failure.exit_code)
