"""The envelope, and what becomes of an exception."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import click
import pytest

from nccltune.cli.envelope import Complaint, Envelope, failure_from, one_line, plain, status_of
from nccltune.errors import (
    BusyError,
    DeadlineError,
    ExitCode,
    FileError,
    HostError,
    NccltuneError,
    RankError,
    ServerError,
    UsageProblem,
)
from nccltune.measurement import Outcome


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageProblem("m", code="c"), 2),
        (HostError("m", code="c"), 5),
        (FileError("p", "m", code="c"), 6),
        (RankError("m", code="c"), 7),
        (ServerError("m", code="c"), 8),
        (BusyError("m", code="c"), 9),
        (DeadlineError("m", code="c"), 124),
        (NccltuneError("m", code="c"), 1),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.UsageError("m"), 2),
        (click.BadParameter("m"), 2),
        (ValueError("m"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_failure_from_each_class_has_its_exit_code(error: BaseException, exit_code: int) -> None:
    failure = failure_from(error)

    assert failure.exit_code == exit_code
    assert failure.complaint.code
    assert "\n" not in failure.complaint.message


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        (errno.ENOSPC, "disk_full", "free some space"),
        (errno.EDQUOT, "disk_full", "quota"),
        (errno.EROFS, "os_error", "NCCLTUNE_HOME"),
        (errno.EACCES, "os_error", "NCCLTUNE_HOME"),
    ],
    ids=["full", "quota", "read_only", "forbidden"],
)
def test_failure_from_os_error_names_the_file_and_the_way_out(
    number: int, code: str, advice: str
) -> None:
    failure = failure_from(OSError(number, "Some Reason", "/state/profiles/x.json"))

    assert failure.exit_code is ExitCode.FILE
    assert failure.complaint.code == code
    assert failure.complaint.message.startswith("/state/profiles/x.json: some reason: ")
    assert advice in failure.complaint.message


def test_failure_from_disk_full_without_a_name_is_still_a_file_failure() -> None:
    failure = failure_from(OSError(errno.ENOSPC, "No space left on device"))

    assert failure.exit_code is ExitCode.FILE
    assert failure.complaint.message.startswith("no space left on device")


def test_failure_from_lost_pipe_inside_a_verb_is_a_bug() -> None:
    assert failure_from(BrokenPipeError(errno.EPIPE, "Broken pipe")).exit_code is ExitCode.BUG


def test_failure_from_bug_names_type_message_and_how_to_get_the_traceback() -> None:
    message = failure_from(KeyError("score")).complaint.message

    assert message.startswith("this is a bug in nccltune: KeyError: 'score'")
    assert "NCCLTUNE_DEBUG=1" in message


def test_failure_from_usage_names_the_help_of_the_command() -> None:
    command = click.Command("search")
    context = click.Context(command, info_name="nccltune search")

    message = failure_from(click.UsageError("no such thing.", context)).complaint.message

    assert message == "no such thing; see nccltune search --help"


def test_envelope_has_exactly_the_promised_keys() -> None:
    envelope = json.loads(Envelope("search", 0).format())

    assert envelope == {
        "schema": "nccltune.cli/1",
        "command": "search",
        "status": "ok",
        "exit_code": 0,
        "data": {},
        "warnings": [],
        "errors": [],
    }


def test_envelope_carries_errors_as_code_and_message() -> None:
    text = Envelope("bench", 5, errors=(Complaint("no_gpu", "no GPU"),)).format()

    assert json.loads(text)["errors"] == [{"code": "no_gpu", "message": "no GPU"}]
    assert "\n" not in text


def test_envelope_with_numbers_that_are_not_finite_is_strict_json() -> None:
    data = {"ratio": float("nan"), "ends": [float("inf"), -float("inf"), 1.0]}

    envelope = json.loads(Envelope("bench", 0, data).format(), parse_constant=pytest.fail)

    assert envelope["data"] == {"ratio": None, "ends": [None, None, 1.0]}


def test_envelope_with_text_that_is_not_utf8_is_ascii() -> None:
    undecodable = b"model-\xff".decode("utf-8", "surrogateescape")

    assert Envelope("payloads", 0, {"model": undecodable}).format().isascii()


def test_plain_turns_enums_paths_and_keys_into_text() -> None:
    value = {Outcome.OK: Path("/x"), 43008: (1, True, None)}

    assert plain(value) == {"ok": "/x", "43008": [1, True, None]}


@pytest.mark.parametrize("exit_code", [code for code in ExitCode if code not in (0, 3, 4)])
def test_status_of_every_other_exit_code_is_error(exit_code: ExitCode) -> None:
    assert status_of(exit_code) == "error"


@pytest.mark.parametrize("exit_code", [-9, 17, 126, 137, 255])
def test_status_of_a_servers_own_exit_code_is_error(exit_code: int) -> None:
    assert json.loads(Envelope("launch", exit_code).format())["status"] == "error"


def test_status_of_answers() -> None:
    assert [status_of(code) for code in (0, 3, 4)] == ["ok", "no", "unknown"]


def test_one_line_takes_out_what_could_repaint_a_terminal() -> None:
    assert one_line("rank 0:\r\n\tbad \x1b[2J\x07value") == "rank 0: bad [2Jvalue"
