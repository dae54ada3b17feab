from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from nccltune.cli import doctor as doctor_verb
from nccltune.cli.envelope import Answer
from nccltune.doctor import Check, Sources, Status
from nccltune.errors import ExitCode, UsageProblem
from tests.support.doctor_hosts import PYTHON, DoctorHost, doctor_host, launch_words, write_models

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DoctorHost:
    host = doctor_host(tmp_path / "root")
    case = host.case()
    monkeypatch.setattr(doctor_verb, "own_sources", lambda: case.sources)
    return host


def run(*words: str) -> Answer:
    """Call the command as the group does, without the group."""
    with doctor_verb.command.make_context("doctor", list(words)) as context:
        answer = doctor_verb.command.invoke(context)
    assert isinstance(answer, Answer)
    return answer


def rows(answer: Answer) -> list[dict[str, str]]:
    checks: Any = answer.data["checks"]
    assert json.loads(json.dumps(checks)) == checks
    return list(checks)


def test_doctor_of_a_healthy_host_ends_well(host: DoctorHost, tmp_path: Path) -> None:
    del host
    write_models(tmp_path)

    answer = run("--json", "--", *launch_words(tmp_path))

    assert answer.exit_code is ExitCode.DONE
    assert all(list(row) == ["id", "status", "message", "fix"] for row in rows(answer))
    assert {row["status"] for row in rows(answer)} <= {"ok", "skip"}
    counts: Any = answer.data["counts"]
    assert (counts["warn"], counts["fail"]) == (0, 0)
    assert sum(counts.values()) == len(rows(answer))


def test_doctor_with_a_failure_says_no(host: DoctorHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.nvml.init_error = 18
    monkeypatch.setattr(doctor_verb, "own_sources", lambda: host.case(has_python=False).sources)

    answer = run()

    assert answer.exit_code is ExitCode.NO
    assert {row["id"]: row["status"] for row in rows(answer)}["nvml"] == "fail"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([Status.OK, Status.WARN, Status.SKIP], ExitCode.DONE),
        ([Status.OK, Status.FAIL], ExitCode.NO),
    ],
)
def test_doctor_ends_by_its_worst_finding(
    host: DoctorHost,
    monkeypatch: pytest.MonkeyPatch,
    statuses: Sequence[Status],
    expected: ExitCode,
) -> None:
    del host
    found = tuple(Check("x", status, "a\nb\x1b[31m", "do\nit") for status in statuses)
    monkeypatch.setattr(doctor_verb, "examine", lambda _case: found)

    answer = run()

    assert answer.exit_code is expected
    assert rows(answer)[0]["message"] == "a b[31m"
    assert list(answer.show())


def test_doctor_takes_the_interpreter_that_is_named(
    host: DoctorHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("")
    asked: list[Path | None] = []

    def read_case(sources: Sources, *, python: Path | None, argv: tuple[str, ...]) -> object:
        del sources, argv
        asked.append(python)
        return host.case()

    monkeypatch.setattr(doctor_verb, "read_case", read_case)

    run("--python", str(python))
    run()

    assert asked == [python, None]


def test_doctor_of_a_missing_interpreter_is_refused(host: DoctorHost) -> None:
    del host

    with pytest.raises(UsageProblem, match=str(PYTHON)):
        run("--python", str(PYTHON))


def test_doctor_of_another_programs_launch_is_refused(host: DoctorHost) -> None:
    del host

    with pytest.raises(UsageProblem, match="not an SGLang launch"):
        run("--", "vllm", "serve")


def test_doctor_explains_itself() -> None:
    with pytest.raises(click.exceptions.Exit), doctor_verb.command.make_context("d", ["--help"]):
        pass
