"""``nccltune verify``: real requests to real servers, arm against arm."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from nccltune.atomic import write_output
from nccltune.cli import render
from nccltune.cli.envelope import Answer, Complaint, one_line
from nccltune.cli.interrupts import polite_signals
from nccltune.cli.options import json_option, launch_argument
from nccltune.cli.verify_answer import (
    answer_from_verify,
    conclude,
    conclude_running,
    go_on_words,
    stored_verifies,
)
from nccltune.cli.verify_markdown import format_markdown
from nccltune.cli.verify_options import (
    VerifyOptions,
    api_key,
    check_markdown,
    check_url_options,
    default_arms,
    expected_profile,
    find_arm_profile,
    verify_options,
)
from nccltune.cli.verify_view import follow
from nccltune.cli.words import format_clock
from nccltune.errors import ExitCode, NccltuneError, UsageProblem
from nccltune.inject.running import inherited_environ
from nccltune.verify.arms import make_arms
from nccltune.verify.engine import run_verify, stored_boot_s
from nccltune.verify.judging.verdict import is_decided
from nccltune.verify.noise import known_boot_noise
from nccltune.verify.running import RUNNING_ARM, measure_running
from nccltune.verify.spec import VerifyProgress, VerifySpec, VerifyStage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nccltune.cli.invocation import Invocation
    from nccltune.cli.verify_data import Verified
    from nccltune.verify.record import VerifyRecord
    from nccltune.verify.spec import VerifyObserver


@click.command(name="verify")
@verify_options
@launch_argument
@json_option
@click.pass_context
def command(context: click.Context, /, launch: tuple[str, ...], **options: object) -> Answer:
    """Start the server of a launch command under each arm in turn, and compare what comes out.

    Real requests, tokens by the server's own count, starts in mirrored order. Says with its
    uncertainty whether the candidate is faster, and if not, where to look. Activates nothing.
    Ctrl-C keeps every finished start, and --resume goes on.
    """
    invocation: Invocation = context.obj
    asked = VerifyOptions(**options)  # type: ignore[arg-type]
    check_markdown(asked.markdown)
    if asked.url is not None:
        check_url_options(context, launch)
        return _answer(_measure_running(asked, asked.url, invocation), asked, invocation)
    record = _start_and_measure(asked, launch, invocation)
    try:
        return _answer(_concluded(record, invocation), asked, invocation)
    except KeyboardInterrupt:  # once more, from somebody in a hurry
        if record.is_finished:
            raise
        message = f"interrupted; finished boots are kept, {go_on_words(invocation)}"
        complaint = Complaint("interrupted", message)
        return Answer({}, lambda: (), ExitCode.INTERRUPTED, errors=(complaint,))


def _concluded(record: VerifyRecord, invocation: Invocation) -> Verified:
    """Judge a verify; where that fails, no start of a server is lost, and it is judged again."""
    try:
        return conclude(record)
    except Exception:
        render.print_note(f"finished boots are kept, {go_on_words(invocation)}")
        raise


def _answer(verified: Verified, asked: VerifyOptions, invocation: Invocation) -> Answer:
    verified, answer = answer_from_verify(verified, invocation, is_any_host=asked.any_host)
    return _with_markdown(answer, verified, asked.markdown)


def _start_and_measure(
    asked: VerifyOptions, launch: tuple[str, ...], invocation: Invocation
) -> VerifyRecord:
    if not launch:
        raise UsageProblem(
            "nothing to verify: give the server's launch command after --, or --url",
            code="no_launch",
        )
    if asked.baseline is not None:
        raise UsageProblem(
            "--baseline belongs to --url; servers that are started here have a baseline arm",
            code="conflicting_options",
        )
    steps = asked.step_counts
    boot_s = stored_boot_s(launch)
    words = asked.arm_words or (() if steps else default_arms())
    spec = VerifySpec(
        launch=launch,
        arms=make_arms(launch, arms=words, num_steps=steps, find=find_arm_profile),
        environ=inherited_environ(),
        load=asked.load,
        boots=asked.boots,
        limits=asked.limits,
        is_any_host=asked.any_host,
        is_resume=asked.resume,
        boot_s=boot_s,
        is_decided=_is_decided,
        on_begin=lambda record: render.print_note(_announcement(record, boot_s)),
    )
    with polite_signals(), follow(wants_json=invocation.wants_json) as observer:
        return run_verify(spec, observer)


def _measure_running(asked: VerifyOptions, url: str, invocation: Invocation) -> Verified:
    profile, key = expected_profile(asked.arm_words), api_key()
    stored = stored_verifies(asked.baseline)
    with polite_signals(), follow(wants_json=invocation.wants_json) as observer:
        record = measure_running(
            url, asked.load, profile=profile, api_key=key, on_progress=_progress_to(observer)
        )
    return conclude_running(record, stored, asked.baseline)


def _is_decided(record: VerifyRecord) -> bool:
    noise = known_boot_noise(record)
    return is_decided(record.boots, record.arms, noise=noise, boots_planned=record.boots_planned)


def _progress_to(observer: VerifyObserver) -> Callable[[str], None]:
    began_s = time.monotonic()

    def tell(note: str) -> None:
        elapsed_s = time.monotonic() - began_s
        observer.update(
            VerifyProgress(VerifyStage.MEASURE, RUNNING_ARM, 0, 1, elapsed_s, note=note)
        )

    return tell


def _announcement(record: VerifyRecord, boot_s: float | None) -> str:
    """Say beforehand what is going to happen, and how long it takes."""
    names = ", ".join(arm.name for arm in record.arms)
    made = len(record.boots)
    count = record.boot_total - made
    time_words = (
        "how long a start takes is not known yet"
        if boot_s is None
        else f"about {format_clock(count * boot_s)} at most, by earlier starts of this command"
    )
    of_each = f"{record.boots_planned} of each" + (f", {made} made already" if made else "")
    return f"{names}: up to {count} starts, {of_each}; {time_words}"


def _with_markdown(answer: Answer, verified: Verified, path: Path | None) -> Answer:
    if path is None:
        return answer
    try:
        write_output(path, format_markdown(verified))
    except NccltuneError as error:
        complaint = Complaint(error.code, one_line(f"{error}; the report is above"))
        errors = (*answer.errors, complaint)
        return replace(answer, errors=errors, exit_code=error.exit_code)
    return answer
