"""What scripts may rely on when things go wrong: still one envelope, and the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nccltune.cli import main
from nccltune.cli import payloads as payloads_verb
from nccltune.cli.workload import workload_from_options
from nccltune.errors import (
    BusyError,
    DeadlineError,
    FileError,
    HostError,
    NccltuneError,
    RankError,
    ServerError,
    UsageProblem,
)
from tests.support.command_line import envelope_of

REPOSITORY = Path(__file__).resolve().parents[2]

# Early failures.

EARLY = {
    "no_verb": ([], "", 2),
    "unknown_verb": (["serch"], "serch", 2),
    "unknown_option": (["search", "--trails", "3"], "search", 2),
    "missing_value": (["payloads", "--tp"], "payloads", 2),
    "not_a_number": (["search", "--trials", "many"], "search", 2),
    "too_small": (["search", "--trials", "1"], "search", 2),
    "unknown_choice": (["search", "--sampler", "grid"], "search", 2),
    "unknown_subverb": (["profile", "shw"], "profile shw", 2),
    "missing_subverb": (["recording"], "recording", 2),
    "missing_argument": (["profile", "show"], "profile show", 2),
    "missing_required": (["recording", "make"], "recording make", 2),
    "suffix": (["payloads", "--payload", "4M:3"], "payloads", 2),
    "negative": (["payloads", "--payload", "-4096:3"], "payloads", 2),
    "zero_batch": (["payloads", "--batch", "0:1"], "payloads", 2),
    "one_rank": (["payloads", "--tp", "1", "--num-steps", "2"], "payloads", 2),
    "payload_and_model": (["payloads", "--payload", "4096:1", "--model", "x"], "payloads", 2),
    "no_config": (["payloads", "--model", "/nowhere"], "payloads", 6),
    "unknown_recording": (["search", "--recording", "nope"], "search", 2),
    "missing_recording_file": (["recording", "show", "/nowhere.json"], "recording show", 6),
    "unknown_profile": (["bench", "--profile", "nope"], "bench", 2),
    "missing_profile_file": (["profile", "check", "/nowhere.json"], "profile check", 6),
    "unknown_variable": (["bench", "--set", "NCCL_PROTOO=LL"], "bench", 2),
    "changed_value": (["bench", "--set", "NCCL_NTHREADS=100"], "bench", 2),
    "suffix_value": (["bench", "--set", "NCCL_BUFFSIZE=4M"], "bench", 2),
    "smuggled": (["bench", "--set", "LD_PRELOAD=/x.so"], "bench", 2),
    "no_value": (["search", "--try", "NCCL_PROTO"], "search", 2),
    "twice": (["search", "--try", "NCCL_PROTO=LL,NCCL_PROTO=Simple"], "search", 2),
    "bad_name": (["search", "--name", "../x"], "search", 2),
    "not_recorded": (
        ["search", "--recording", "h200-2x-shm", "--try", "NCCL_NTHREADS=64,NCCL_MIN_CTAS=3"],
        "search",
        2,
    ),
    "size_not_recorded": (
        ["search", "--recording", "h200-2x-shm", "--payload", "4096:1"],
        "search",
        2,
    ),
    "nothing_to_resume": (["search", "--recording", "h200-2x-shm", "--resume"], "search", 6),
}


@pytest.mark.parametrize(("arguments", "command", "exit_code"), EARLY.values(), ids=EARLY.keys())
def test_early_failure_is_an_envelope_with_one_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], command: str, exit_code: int
) -> None:
    envelope = envelope_of(capsys, *arguments)

    assert envelope["command"] == command
    assert envelope["exit_code"] == exit_code
    assert len(envelope["errors"]) == 1
    assert "bug" not in envelope["errors"][0]["code"]


@pytest.mark.parametrize("name", sorted(EARLY.keys() - {"no_verb"}))
def test_early_failure_for_people_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments, _, exit_code = EARLY[name]

    assert main(arguments) == exit_code

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nccltune: ")
    assert len(captured.err.splitlines()) == 1
    assert "ValueError" not in captured.err


def test_launch_without_the_two_dashes_is_told_about_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["payloads", "python", "-m", "sglang.launch_server"]) == 2

    assert "stands after --" in capsys.readouterr().err


def test_json_after_the_two_dashes_belongs_to_the_launch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["payloads", "--", "python", "server.py", "--json"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not an SGLang launch" in captured.err


# Every class of failure.


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageProblem("made up", code="c"), 2),
        (HostError("made up", code="c"), 5),
        (FileError("/x", "made up", code="c"), 6),
        (RankError("made up", code="c"), 7),
        (ServerError("made up", code="c"), 8),
        (BusyError("made up", code="c"), 9),
        (DeadlineError("made up", code="c"), 124),
        (OSError(28, "No space left on device", "/x"), 6),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("made up"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failure_inside_a_verb_has_its_exit_code_in_both_forms(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    exit_code: int,
) -> None:
    def fail(_options: object) -> None:
        raise error

    monkeypatch.setattr(payloads_verb, "workload_from_options", fail)

    assert envelope_of(capsys, "payloads")["exit_code"] == exit_code
    assert main(["payloads"]) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    if isinstance(error, NccltuneError):
        assert "bug" not in captured.err


def test_bug_shows_its_traceback_only_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_options: object) -> None:
        raise KeyError("score")

    monkeypatch.setattr(payloads_verb, "workload_from_options", fail)
    main(["payloads"])
    quiet = capsys.readouterr().err
    monkeypatch.setenv("NCCLTUNE_DEBUG", "1")
    main(["payloads"])
    loud = capsys.readouterr().err

    assert "Traceback" not in quiet
    assert "NCCLTUNE_DEBUG=1" in quiet
    assert "Traceback" in loud


def test_bug_in_a_report_is_reported_like_any_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads_verb, "payload_rows", None)

    assert main(["payloads"]) == 1

    assert "this is a bug in nccltune: TypeError" in capsys.readouterr().err


def test_print_on_stdout_inside_a_verb_does_not_break_the_envelope(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chatty(options: Any) -> object:
        sys.stdout.write("a library says hello\n")
        return workload_from_options(options)

    monkeypatch.setattr(payloads_verb, "workload_from_options", chatty)

    assert envelope_of(capsys, "payloads")["exit_code"] == 0


# Help, version and streams.


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["search", "--help"],
        ["bench", "-h"],
        ["payloads", "--help"],
        ["profile", "--help"],
        ["profile", "diff", "--help"],
        ["recording", "make", "--help"],
    ],
    ids=" ".join,
)
def test_help_is_text_for_people_and_an_envelope_for_scripts(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    envelope = envelope_of(capsys, *arguments)

    assert max(map(len, text.splitlines())) <= 80
    assert envelope["data"]["text"] == text


def test_no_argument_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0

    assert capsys.readouterr().out.startswith("Usage: nccltune")


def test_help_of_the_program_imports_no_verb() -> None:
    script = (
        "import sys; from nccltune.cli import main; main(['--help']); "
        "print(sorted({'rich', 'optuna', 'httpx', 'nccltune.cli.search'} & set(sys.modules)))"
    )

    assert run_python("-c", script).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["people", "json"])
def test_output_on_a_full_disk_is_one_line_and_exit_code_6(more: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = run_python("-m", "nccltune", "payloads", *more, stdout=full)

    assert ended.returncode == 6
    assert ended.stderr == "nccltune: standard output: no space left on device\n"


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["people", "json"])
def test_reader_that_has_left_is_no_failure(more: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = run_python("-m", "nccltune", "payloads", *more, stdout=writing)
    os.close(writing)

    assert ended.returncode == 0
    assert ended.stderr == ""


def test_report_on_a_terminal_without_utf8_is_still_printed() -> None:
    ended = run_python("-m", "nccltune", "payloads", environ={"PYTHONIOENCODING": "ascii"})

    assert ended.returncode == 0
    assert "43008" in ended.stdout
    assert ended.stdout.isascii()


def test_report_has_no_colour_in_a_pipe() -> None:
    assert "\x1b" not in run_python("-m", "nccltune", "payloads").stdout


def run_python(
    *arguments: str, stdout: Any = subprocess.PIPE, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that imports this checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=REPOSITORY,
        # Unbuffered output would hide what happens when a reader has left.
        env={
            **{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            "PYTHONPATH": str(REPOSITORY),
            **(environ or {}),
        },
    )
