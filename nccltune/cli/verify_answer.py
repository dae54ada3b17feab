"""From the record of a verify to its answer: judge it, keep it, choose the next command."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from nccltune.cli.envelope import Answer, Complaint, one_line, plain
from nccltune.cli.verify_data import Verified, judgement_data, verify_data
from nccltune.cli.verify_marking import mark_gains, unmarked_warnings
from nccltune.cli.verify_report import verify_parts
from nccltune.errors import ExitCode, NccltuneError, UsageProblem
from nccltune.sglang.command import parse_launch
from nccltune.store import read_active
from nccltune.store.searches import read_searches
from nccltune.verify import record as records
from nccltune.verify.expectation import predictions_for
from nccltune.verify.judging.baseline import judge_running
from nccltune.verify.judging.comparison import settings_of
from nccltune.verify.judging.judgement import Cause, Verdict
from nccltune.verify.judging.numbers import summarize_arms
from nccltune.verify.judging.stored import find_baseline
from nccltune.verify.judging.verdict import judge
from nccltune.verify.noise import keep_boot_noise, known_boot_noise
from nccltune.verify.plan import DECIDING_BOOTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nccltune.cli.invocation import Invocation
    from nccltune.verify.record import VerifyRecord

RESUME = "--resume"
_DISK_FULL = "disk_full"


def conclude(record: VerifyRecord) -> Verified:
    """Judge a verify that started its servers itself."""
    searches = [_answer(each) for each in read_searches()[0]]
    predictions = predictions_for(
        record.arms,
        batch_size=_concurrency(record),
        searches=searches,
        host=record.fingerprint,
    )
    judgement = judge(
        record.boots,
        record.arms,
        noise=known_boot_noise(record),
        boots_planned=record.boots_planned,
        problems=[problem.message for problem in record.problems],
        predictions=predictions,
        operator=_operator(record),
    )
    return Verified(record, judgement, summarize_arms(record.arms, record.boots), predictions)


def stored_verifies(wanted: str | None) -> Iterable[VerifyRecord]:
    """Return what a running server may be held against: verifies that started servers themselves.

    Args:
        wanted: the id of one of them; None for all, the newest first, each read when it is asked
            for.

    Raises:
        UsageProblem: there is no such verify.
        FileError: it is damaged, or the folder of the verifies cannot be read.
    """
    if wanted is None:
        return (each for each in records.newest_records() if not each.url and each.boots)
    named = [records.load(path) for path in records.record_paths() if path.stem == wanted]
    chosen = tuple(each for each in named if not each.url and each.boots)
    if not chosen:
        raise UsageProblem(
            f"--baseline {wanted}: no stored verify has this id; nccltune history lists them",
            code="no_such_baseline",
        )
    return chosen


def conclude_running(
    record: VerifyRecord, stored: Iterable[VerifyRecord], wanted: str | None
) -> Verified:
    """Hold a server that runs against stored verifies.

    Raises:
        UsageProblem: the one that was asked for is of another host, model or other flags.
    """
    summaries = summarize_arms(record.arms, record.boots)
    if record.problems or not record.boots:
        problems = [problem.message for problem in record.problems]
        judgement = judge(record.boots, record.arms, noise=None, problems=problems)
        return Verified(record, judgement, summaries, {})
    (arm,) = record.arms
    baseline = find_baseline(
        stored,
        argv=arm.argv,
        settings=settings_of(arm),
        fingerprint=record.fingerprint,
        load=record.load,
        environ=record.environ,
    )
    if wanted is not None and not baseline.boots:
        reason = next(iter(baseline.misses), "it holds no boot of this launch")
        raise UsageProblem(
            f"--baseline {wanted} is of no use for this server: {reason}", code="other_baseline"
        )
    judgement = judge_running(record.boots[0], arm, baseline, noise=known_boot_noise(record))
    return Verified(record, judgement, summaries, {}, baseline.verify_ids)


def answer_from_verify(
    verified: Verified, invocation: Invocation, *, is_any_host: bool = False
) -> tuple[Verified, Answer]:
    """Keep the verify with its verdict, mark what it proved, and lay everything out.

    What cannot be kept or marked is said, and costs no figure.
    """
    complaints = [
        Complaint(problem.code, one_line(problem.message)) for problem in verified.record.problems
    ]
    verdict, exit_code = verified.judgement.verdict, verified.judgement.exit_code
    if verdict is Verdict.UNUSABLE and not complaints:
        complaints.append(Complaint("cannot_be_timed", one_line(verified.judgement.sentence)))
    not_kept: list[Complaint] = []
    if verdict is Verdict.GAIN and not verified.record.is_interrupted:
        verified = mark_gains(verified, not_kept)
    verified = _keep(verified, not_kept)
    verified = replace(verified, next_command=_next(verified, invocation, is_any_host=is_any_host))
    if stopped := verified.record.stopped:
        message = f"{stopped}; finished boots are kept, {go_on_words(invocation)}"
        complaints.append(Complaint(stopped.code, one_line(message)))
        exit_code = stopped.exit_code
    if not_kept:
        exit_code = ExitCode.FILE
    if verified.record.is_interrupted:
        exit_code = ExitCode.INTERRUPTED
        message = f"interrupted; finished boots are kept, go on with: {verified.next_command}"
        complaints.append(Complaint("interrupted", message))
    return verified, Answer(
        data=verify_data(verified),
        show=lambda: verify_parts(verified),
        exit_code=exit_code,
        warnings=tuple(unmarked_warnings(verified)),
        errors=_once_full((*complaints, *not_kept)),
    )


def _once_full(complaints: Sequence[Complaint]) -> tuple[Complaint, ...]:
    """Leave one line about a full disk: it stops a verify, and then keeps it from being written."""
    full = [each for each in complaints if each.code == _DISK_FULL]
    return tuple(each for each in complaints if each.code != _DISK_FULL or each is full[0])


def go_on_words(invocation: Invocation) -> str:
    """Say how a verify that was stopped, or could not be judged, goes on."""
    return f"go on with: {invocation.format_again(RESUME)}"


def _keep(verified: Verified, not_kept: list[Complaint]) -> Verified:
    judged = plain(judgement_data(verified.judgement))
    assert isinstance(judged, dict)  # noqa: S101 - a mapping stays one
    record = replace(verified.record, judgement=judged)
    verified = replace(verified, record=record)
    try:
        path = records.save(record)
        is_usable = verified.judgement.verdict is not Verdict.UNUSABLE
        if record.is_finished and is_usable and not record.url:
            keep_boot_noise(record)
    except NccltuneError as error:
        not_kept.append(Complaint(error.code, one_line(f"{error}; the figures are above")))
        return verified
    return replace(verified, path=path)


def _operator(record: VerifyRecord) -> Mapping[str, str]:
    """Return variables that every server of a verify was started with, whatever its arm."""
    try:
        assigned = parse_launch(record.launch).environment
    except NccltuneError:
        assigned = {}
    return {**record.environ, **assigned}


def _next(verified: Verified, invocation: Invocation, *, is_any_host: bool) -> str:
    record, judgement = verified.record, verified.judgement
    if record.is_interrupted or record.stopped:
        return invocation.format_again() if record.url else invocation.format_again(RESUME)
    if any(each.cause is Cause.NOT_IN_EFFECT for each in judgement.reasons):
        return "nccltune doctor" + (f" -- {shlex.join(record.launch)}" if record.launch else "")
    active = read_active().name
    main = verified.main
    if judgement.verdict is Verdict.GAIN and main is not None:
        name = main.arm if main.arm in verified.marked else next(iter(verified.marked), None)
        if name is not None and name != active:
            return f"nccltune profile activate {name}" + (" --any-host" if is_any_host else "")
    if judgement.verdict is Verdict.REGRESSION and main is not None:
        arm = next(arm for arm in record.arms if arm.name == main.arm)
        if arm.profile is not None and arm.profile.name == active and not record.url:
            return "nccltune profile off"
    if judgement.verdict is Verdict.INCONCLUSIVE and not record.url:
        planned = record.boots_planned
        # One that is judged is not resumed: it takes a verify of its own.
        anew = invocation.without(RESUME)
        return anew.format_again(boots=max(2 * planned, DECIDING_BOOTS))
    return ""


def _concurrency(record: VerifyRecord) -> int:
    found = record.load.get("concurrency")
    return found if isinstance(found, int) else 1


def _answer(kept: Mapping[str, object]) -> Mapping[str, object]:
    found = kept.get("answer")
    return found if isinstance(found, dict) and found.get("source") == "gpus" else {}
