"""The view and the report of ``launch``, and what is refused before anything starts."""

from __future__ import annotations

import io
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from nccltune.cli import launch as launch_verb
from nccltune.cli import launch_tuning, main
from nccltune.cli.envelope import Complaint
from nccltune.cli.invocation import Invocation
from nccltune.cli.launch import command
from nccltune.cli.launch_report import Report
from nccltune.cli.launch_tuning import Tuned
from nccltune.cli.launch_view import PlainView, picture_of, ready_line
from nccltune.errors import FileError
from nccltune.sglang.endpoints import Endpoint
from nccltune.sglang.failures import Failure, FailureKind
from nccltune.sglang.log_stages import Stage
from nccltune.sglang.start_progress import Step, StepTime
from nccltune.supervise import Ending, EndKind, Limits, Moment, Waited

WEIGHTS = Step(Stage.WEIGHTS, "", 26.0, 5, 64)
TIMES = (
    StepTime(Step(Stage.SERVER_ARGS, "", 0.0), 24.0),
    StepTime(Step(Stage.INIT_PARALLEL, "", 24.0), 2.0),
    StepTime(WEIGHTS, 12.0),
)
KEYS = ["schema", "command", "status", "exit_code", "data", "warnings", "errors"]


def moment(step: Step = WEIGHTS, *, elapsed_s: float = 38.0, idle_s: float = 1.0) -> Moment:
    waited = Waited(step, elapsed_s, idle_s, Limits(1800.0, 300.0), "TP0: loading")
    times = (*TIMES[:-1], StepTime(step, elapsed_s - step.began_s))
    return Moment(waited, times, Endpoint(port=30123), 4711)


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    captured = capfd.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def drawn(shown: Moment, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(picture_of(shown))
    return [line.rstrip() for line in console.export_text().splitlines()]


# The views.


def test_plain_view_names_each_stage_once_with_the_time_of_the_one_before(
    capfd: pytest.CaptureFixture[str],
) -> None:
    view = PlainView()
    for elapsed_s in (38.0, 38.3, 39.0):
        view.update(moment(elapsed_s=elapsed_s))

    assert said(capfd) == ["nccltune: 0:26 loading weights (5 of 64); connecting ranks took 2 s"]


@pytest.mark.parametrize("seed", range(20))
def test_what_stages_took_adds_up_to_the_clock_beside_it(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    view, now_s = PlainView(), 0.0
    times: list[StepTime] = []
    for stage in (Stage.START, Stage.SERVER_ARGS, Stage.INIT_PARALLEL, Stage.WEIGHTS, Stage.READY):
        step, late_s = Step(stage, "", now_s), rng.random() / 4
        running = (*times, StepTime(step, late_s))
        view.update(Moment(Waited(step, now_s + late_s, late_s, Limits()), running, None, 7))
        times.append(StepTime(step, rng.uniform(0.0, 9.0)))
        now_s = step.began_s + times[-1].duration_s
    ready = Moment(Waited(step, now_s, 0.0, Limits()), tuple(times), None, 7, served_s=0.0)

    lines = said(capfd)
    clocks = [int(line.split()[1].removeprefix("0:")) for line in lines]
    took = [int(line.split()[-2]) if " took " in line else 0 for line in lines]
    assert [sum(took[: idx + 1]) for idx in range(len(lines))] == clocks
    words = ready_line(ready).split()
    parts = [int(word) for word in words[3:] if word.isdecimal()]
    assert sum(parts) == int(words[2]) == int(now_s)


def test_plain_view_repeats_a_count_that_grows_every_ten_seconds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    view = PlainView()
    for second in range(30):
        step = replace(WEIGHTS, done=5 + second)
        view.update(moment(step, elapsed_s=38.0 + second))

    lines = said(capfd)[1:]
    assert lines == [
        "nccltune: 0:48 loading weights (15 of 64), 22 s in it",
        "nccltune: 0:58 loading weights (25 of 64), 32 s in it",
    ]


def test_plain_view_says_for_how_long_nothing_has_happened(
    capfd: pytest.CaptureFixture[str],
) -> None:
    view = PlainView()
    for second in range(100):
        view.update(moment(elapsed_s=38.0 + second, idle_s=float(second)))

    lines = said(capfd)[1:]
    assert lines == [
        "nccltune: 1:08 loading weights (5 of 64), 42 s in it, no progress for 30 s (limit 300 s)",
        "nccltune: 1:38 loading weights (5 of 64), 72 s in it, no progress for 60 s (limit 300 s)",
        "nccltune: 2:08 loading weights (5 of 64), 102 s in it, no progress for 90 s (limit 300 s)",
    ]


def test_plain_view_hands_bytes_on_and_keeps_its_own_lines_apart(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    view = PlainView()

    view.write(1, b"NCCL version 2.28.9\n")
    view.write(2, b"\r 50%|##  | 1/2 [\xff")
    view.say("a word of ours")
    view.write(2, b"\r100%|####| 2/2\n")
    view.say("another")

    captured = capfdbinary.readouterr()
    assert captured.out == b"NCCL version 2.28.9\n"
    assert captured.err == (
        b"\r 50%|##  | 1/2 [\xff\nnccltune: a word of ours\n\r100%|####| 2/2\nnccltune: another\n"
    )


def test_plain_view_after_ready_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    PlainView().update(replace(moment(), served_s=3.0))

    assert said(capfd) == []


def test_picture_shows_stages_with_their_seconds_and_the_last_progress() -> None:
    lines = drawn(moment(idle_s=42.0))

    assert lines[0].startswith("nccltune launch  loading weights (5 of 64)")
    assert lines[0].endswith("0:38 of 30:00")
    assert [line.split()[-2:] for line in lines[1:4]] == [
        ["24.0", "s"],
        ["2.0", "s"],
        ["12.0", "s"],
    ]
    assert lines[4] == "last progress 42 s ago (limit 5:00)"
    assert lines[5] == "TP0: loading"


@pytest.mark.parametrize("width", [30, 80, 200])
def test_picture_never_wraps_whatever_the_server_writes(width: int) -> None:
    waited = replace(moment().waited, last_text="[bold]x[/nothing] \x1b[31m" + "y" * 500)
    shown = replace(moment(), waited=waited, aside="Compiling " + "z" * 300)

    lines = drawn(shown, width)

    assert max(map(len, lines)) <= width
    assert len(lines) == 7
    assert "\x1b" not in "".join(lines)


def test_ready_line_names_the_stages_that_took_time() -> None:
    shown = replace(moment(Step(Stage.READY, "", 38.0), elapsed_s=38.1), served_s=0.0)

    assert ready_line(shown) == (
        "ready on http://127.0.0.1:30123 after 38 s: starting rank processes 24 s, "
        "connecting ranks 2 s"
    )


# The report.


def test_report_of_a_fault_names_the_ending_beside_the_commands_own_status(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    failure = Failure(FailureKind.NCCL, "NCCL error: internal error")
    ending = Ending(EndKind.DIED, 137, "the server died", failure, is_nccl_like=True)

    Report(path, {"profile": "fast"}, ["a warning"]).write_ending(ending, moment())

    envelope = json.loads(path.read_text())
    assert list(envelope) == KEYS
    assert (envelope["status"], envelope["exit_code"]) == ("error", 137)
    assert envelope["errors"] == [{"code": "server_died", "message": "the server died"}]
    assert envelope["warnings"] == ["a warning"]
    data = envelope["data"]
    assert (data["profile"], data["ending"], data["is_nccl_like"]) == ("fast", "server_died", True)
    assert data["failure"] == {"kind": "nccl", "line": "NCCL error: internal error"}
    assert (data["stage"], data["is_ready"], data["ready_s"]) == ("weights", False, None)
    assert data["stages"][-1] == {
        "stage": "weights",
        "subject": "",
        "done": 5,
        "total": 64,
        "duration_s": 12.0,
    }


def test_report_of_a_ready_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    Report(path).write_moment(replace(moment(), served_s=0.5))

    envelope = json.loads(path.read_text())
    assert (envelope["status"], envelope["data"]["ending"]) == ("ok", None)
    assert (envelope["data"]["ready_s"], envelope["data"]["pid"]) == (37.5, 4711)
    assert envelope["data"]["url"] == "http://127.0.0.1:30123"


def test_report_that_nobody_wants_is_not_written() -> None:
    Report(None).write_failure(Complaint("x", "y"), 2)


def test_report_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        Report(tmp_path / "no" / "report.json").write_failure(Complaint("x", "y"), 2)


# The command line.


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    def tune(*_: object, **__: object) -> Tuned:
        decision = {"profile": None, "is_applied": False, "reason": "no profile is active"}
        return Tuned(dict(os.environ), decision, ("no profile",), None, is_applied=False)

    monkeypatch.setattr(launch_verb, "tune", tune)


def run(*words: str, obj: Any = None) -> tuple[int, str]:
    result = CliRunner().invoke(command, list(words), obj=obj)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "Missing argument"),
        (("--ready-timeout-s", "0", "--", "true"), "ready-timeout-s"),
        (("--stall-timeout-s", "-1", "--", "true"), "stall-timeout-s"),
        (("--stall-timeout-s", "nan", "--", "true"), "stall-timeout-s"),
        (("--ready-timeout-s", "soon", "--", "true"), "ready-timeout-s"),
        (("--no-such-option", "--", "true"), "No such option"),
        (("--policy", "some", "--", "true"), "policy"),
    ],
)
def test_launch_with_options_that_make_no_sense_says_so_in_the_report_too(
    words: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"

    code, output = run("--report-file", str(path), *words)

    assert code == 2
    assert problem in output
    envelope = json.loads(path.read_text())
    assert (envelope["status"], envelope["exit_code"]) == ("error", 2)
    assert envelope["errors"][0]["code"] == "usage"


@pytest.mark.parametrize("words", [("--policy",), ("--policy", "some"), ("--no-such-option",)])
def test_report_of_options_that_make_no_sense_points_to_the_help_of_launch(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"

    main(["launch", "--report-file", str(path), *words])

    [error] = json.loads(path.read_text())["errors"]
    assert error["message"].endswith("; see nccltune launch --help")
    assert error["message"] in capsys.readouterr().err


def test_launch_leaves_the_options_of_the_command_alone(
    monkeypatch: pytest.MonkeyPatch, untuned: None
) -> None:
    seen: list[tuple[str, ...]] = []

    def supervise(argv: tuple[str, ...], *_: object) -> Ending:
        seen.append(argv)
        return Ending(EndKind.EXITED, 7, "")

    monkeypatch.setattr(launch_verb, "_supervise", supervise)

    assert run("sglang", "serve", "--report-file", "x", "--", "--tp")[0] == 7
    assert seen == [("sglang", "serve", "--report-file", "x", "--", "--tp")]


def test_launch_that_requires_a_profile_starts_nothing_without_one(
    tmp_path: Path, untuned: None
) -> None:
    path, proof = tmp_path / "report.json", tmp_path / "started"

    code, _ = run("--require-profile", "--report-file", str(path), "--", "touch", str(proof))

    assert code == 3
    assert not proof.exists()
    envelope = json.loads(path.read_text())
    assert (envelope["status"], envelope["errors"][0]["code"]) == ("no", "no_profile")


def test_launch_does_not_speak_json_on_the_servers_stdout(untuned: None) -> None:
    code, output = run("--", "true", obj=Invocation.from_arguments(["--json", "launch"]))

    assert code == 2
    assert "--report-file" in output


def tune(*, is_required: bool = False) -> Tuned:
    words = ["sglang", "serve"]
    return launch_tuning.tune(words, policy=None, is_any_host=False, is_required=is_required)


def test_tuning_that_breaks_costs_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> dict[str, object]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(launch_tuning, "_look_up", broken)

    tuned = tune()

    assert tuned.environ == dict(os.environ)
    assert not tuned.is_applied
    assert "no such luck" in tuned.lines[0]
    assert "WITHOUT a profile" in tuned.lines[0]
    assert "not started" in tune(is_required=True).lines[0]


def test_tuning_that_hangs_costs_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, _write_end = os.pipe()
    monkeypatch.setattr(launch_tuning, "LOOK_UP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(launch_tuning, "_look_up", lambda *_, **__: {"x": os.read(read_end, 1)})

    tuned = tune()

    assert "no answer within 0.05 s" in tuned.lines[0]
    os.close(read_end)
    os.close(_write_end)
