from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nccltune import entry
from nccltune.cli.run import command
from nccltune.errors import FileError
from nccltune.host.fingerprint import Fingerprint, MatchKind
from nccltune.inject import running
from nccltune.inject.resolver import Decision
from nccltune.inject.run_report import decision_data, describe, write_report
from nccltune.inject.running import (
    EXIT_CANNOT_RUN,
    EXIT_NOT_FOUND,
    EXIT_OWN_FAULT,
    Options,
    UsageFault,
    find_command,
    parse_options,
)
from nccltune.sglang.allreduce_path import AllReducePath, PathVerdict
from tests.support.fake_nvml import nvswitch_host

DEAR_CALLS = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
)
APPLIED = Decision(
    "profile kimi is applied: identical host",
    applied={"NCCL_THREAD_THRESHOLDS": "8 8 64", "NCCL_ALGO": "allreduce:Ring"},
    profile_name="kimi",
    digest="0" * 16,
    match=MatchKind.IDENTICAL,
)


def test_parse_options_takes_what_follows_the_dashes_as_it_is() -> None:
    options = parse_options(["--any-host", "--", "sglang", "--any-host", "--", "-h"])

    assert options == Options(command=("sglang", "--any-host", "--", "-h"), is_any_host=True)


def test_parse_options_needs_no_dashes_before_the_command() -> None:
    assert parse_options(["--require-profile", "sglang", "serve", "-h"]) == Options(
        command=("sglang", "serve", "-h"), is_required=True
    )


@pytest.mark.parametrize(
    "words", [["--policy", "all", "--report-file", "f"], ["--policy=all", "--report-file=f"]]
)
def test_parse_options_takes_values_in_both_spellings(words: list[str]) -> None:
    options = parse_options([*words, "--", "x"])

    assert (options.policy, options.report_path) == ("all", "f")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "no command"),
        (["--"], "no command"),
        (["--any-host"], "no command"),
        (["--json", "--", "x"], "no such option: --json"),
        (["--anyhost", "x"], "no such option: --anyhost"),
        (["--any-host=yes", "x"], "no such option"),
        (["--policy"], "needs a value"),
        (["--policy", "some", "--", "x"], "one of eagle3, speculative, all"),
        (["--report-file"], "needs a value"),
        (["-x", "--", "y"], "no such option: -x"),
    ],
)
def test_parse_options_refuses_what_makes_no_sense(words: list[str], reason: str) -> None:
    with pytest.raises(UsageFault, match=reason):
        parse_options(words)


def test_main_on_bad_usage_ends_as_env_does(capfd: pytest.CaptureFixture[str]) -> None:
    assert running.main(["--nonsense"]) == EXIT_OWN_FAULT

    assert "no such option: --nonsense; see nccltune run --help" in capfd.readouterr().err


def test_find_command_ends_as_env_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "folder").mkdir()
    environ = {"PATH": f"/nowhere:{tmp_path}"}

    assert find_command("nothing", environ) == (None, EXIT_NOT_FOUND)
    assert find_command("", environ) == (None, EXIT_NOT_FOUND)
    assert find_command("plain", environ) == (None, EXIT_CANNOT_RUN)
    assert find_command(str(tmp_path / "folder"), environ) == (None, EXIT_CANNOT_RUN)
    assert find_command("/bin/sh", environ) == ("/bin/sh", 0)
    assert find_command("sh", {})[1] == 0

    assert "nccltune: nothing: command not found" in capfd.readouterr().err


def test_describe_is_one_line_that_can_be_copied() -> None:
    assert list(describe(APPLIED, is_refused=False)) == [
        "profile kimi is applied: identical host: NCCL_ALGO=allreduce:Ring "
        "NCCL_THREAD_THRESHOLDS='8 8 64'"
    ]


def test_describe_is_loud_where_a_profile_was_meant_and_cannot_be_used() -> None:
    degraded = Decision("profile kimi cannot be used: it is empty", is_degraded=True)

    assert list(describe(degraded, is_refused=False)) == [
        "warning: the command starts WITHOUT its profile: profile kimi cannot be used: it is empty"
    ]
    assert "not started" in next(describe(degraded, is_refused=True))
    assert "no profile for this command" in next(describe(Decision("x"), is_refused=False))


def test_write_report_is_an_envelope(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    write_report(path, APPLIED, is_refused=False)

    report = json.loads(path.read_text())
    assert report["schema"] == "nccltune.cli/1"
    assert (report["command"], report["status"], report["exit_code"]) == ("run", "ok", 0)
    assert report["data"]["profile"] == "kimi"
    assert report["data"]["applied"] == dict(APPLIED.applied)
    assert (report["warnings"], report["errors"]) == ([], [])


def test_write_report_of_a_refusal_says_no(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    write_report(path, Decision("no profile is active"), is_refused=True)

    report = json.loads(path.read_text())
    assert (report["status"], report["exit_code"]) == ("no", 3)
    assert report["errors"] == [{"code": "no_profile", "message": "no profile is active"}]


def test_write_report_where_it_cannot_be_written_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        write_report(tmp_path / "no" / "folder", APPLIED, is_refused=False)


def test_decision_data_holds_the_path() -> None:
    path = PathVerdict(AllReducePath.CUSTOM, False, "why", "--fix")

    data = decision_data(Decision("x", path=path, overwritten_by_sglang=(("A", "1", "flag"),)))

    assert data["all_reduce_path"] == {
        "path": "custom",
        "is_nccl": False,
        "reason": "why",
        "fix": "--fix",
    }
    assert data["overwritten_by_sglang"] == [{"name": "A", "value": "1", "reason": "flag"}]


def test_command_hands_every_word_over_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def note(words: list[str]) -> int:
        seen.append(words)
        return 127

    monkeypatch.setattr("nccltune.cli.run.main", note)
    words = ["--any-host", "--", "sglang", "serve", "--help", "--"]

    assert CliRunner().invoke(command, words).exit_code == 127
    assert seen == [words]


def test_command_has_help() -> None:
    assert "--require-profile" in command.get_help(click.Context(command))


def test_entry_takes_the_short_way_for_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "main", lambda words: len(words))
    monkeypatch.setattr("nccltune.cli.main", lambda: 99)

    monkeypatch.setattr("sys.argv", ["nccltune", "run", "--", "x"])
    assert entry.main() == 2
    monkeypatch.setattr("sys.argv", ["nccltune", "profile", "list"])
    assert entry.main() == 99


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_driver_is_asked_no_more_than_a_fingerprint_needs(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = nvswitch_host(count)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    answer = running._ask_driver({})

    assert Fingerprint.from_json(answer["fingerprint"]).world_size == count
    assert {name: nvml.calls[name] for name in DEAR_CALLS} == {
        "nvmlInit": 1,
        "nvmlShutdown": 0,
        "nvmlDeviceGetHandleByIndex": count,
        "nvmlDeviceGetP2PStatus": count * (count - 1) // 2,
        "nvmlDeviceGetTopologyCommonAncestor": 0,
        "nvmlDeviceGetMemoryInfo": 0,
        "nvmlDeviceGetComputeRunningProcesses": 0,
    }
