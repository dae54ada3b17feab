"""Numbers, names and files that make no sense: one line, the right exit code, nothing begun."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nccltune.bench.host_lock import LOCK_NAME
from nccltune.cli import main, search_answer, sources
from nccltune.cli import search as search_verb
from nccltune.cli.bench import answer_from_reports
from nccltune.cli.workload import Demand
from nccltune.errors import ExitCode, FileError, RankError
from nccltune.measurement import Outcome
from nccltune.payloads.derive import default_workload
from nccltune.search.journal import search_lock
from tests.support.command_line import envelope_of
from tests.support.results import IMPROVED, bench_report

if TYPE_CHECKING:
    from pathlib import Path

RECORDED = ["search", "--recording", "h200-2x-shm", "--trials", "3"]
HUGE = "9" * 30

REFUSED = {
    "nan": [*RECORDED, "--timeout-s", "nan"],
    "infinite": [*RECORDED, "--timeout-s", "inf"],
    "nan_of_a_launch": [*RECORDED, "--launch-timeout-s", "nan"],
    "nan_of_bench": ["bench", "--launch-timeout-s", "nan"],
    "nan_of_recording": ["recording", "make", "--name", "x", "--timeout-s", "nan"],
    "negative_seed": [*RECORDED, "--seed", "-1"],
    "huge_seed": [*RECORDED, "--seed", HUGE],
    "seed_of_recording": ["recording", "make", "--name", "x", "--seed", "-1"],
    "no_ranks": ["payloads", "--tp", "0"],
    "negative_ranks": [*RECORDED, "--tp", "-1"],
    "one_rank": [*RECORDED, "--tp", "1"],
    "one_rank_and_payload": ["payloads", "--payload", "4096:1", "--tp", "1"],
    "huge_ranks": ["payloads", "--tp", HUGE],
    "huge_steps": ["payloads", "--num-steps", HUGE],
    "huge_topk": ["payloads", "--eagle-topk", HUGE],
    "huge_tokens": ["payloads", "--num-draft-tokens", HUGE],
    "huge_payload": ["payloads", "--payload", "1TiB:1"],
    "huge_count": ["payloads", "--payload", f"4096:{HUGE}"],
    "huge_use": ["payloads", "--batch", "1:1e308", "--batch", "2:1e308"],
    "tiny_use": ["payloads", "--batch", "1:1e-320"],
    "no_count": ["payloads", "--payload", "4096"],
    "payload_and_steps": ["payloads", "--payload", "4096:1", "--num-steps", "2"],
    "empty_model": ["payloads", "--model", ""],
    "set_twice": ["bench", "--set", "NCCL_PROTO=LL", "--set", "NCCL_PROTO=Simple"],
    "shipped_name": [*RECORDED, "--name", "folk-ll-ring"],
    "shared_recording": [*RECORDED, "--share-gpu"],
    "many_shared_ranks": ["bench", "--share-gpu", "--tp", "4096"],
    "empty_launch": ["payloads", "--"],
    "empty_launch_of_search": [*RECORDED, "--"],
    "huge_capture": [
        "payloads", "--", "sglang", "serve", "--model-path", "x", "--tp", "2",
        "--disable-cuda-graph-padding", "--cuda-graph-max-bs", "1000000000",
    ],
}  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == ExitCode.USAGE

    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "bug" not in captured.err


@pytest.mark.parametrize(
    "content",
    [
        {"hidden_size": 10**30, "num_hidden_layers": 2},
        {"hidden_size": 64, "num_hidden_layers": 10**12},
    ],
    ids=["hidden_size", "layers"],
)
def test_model_of_a_size_that_no_model_has_is_refused_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: dict[str, int]
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **content}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=1))

    (error,) = envelope_of(capsys, "payloads", "--model", str(tmp_path))["errors"]

    assert "larger than any model's" in error["message"]
    assert "config.json:" in error["message"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"hidden_size": ' + b"9" * 6000 + b"}", "thousands of digits"),
    ],
    ids=["byte_order_mark", "digits"],
)
def test_json_that_only_python_would_explain_is_explained_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)

    (error,) = envelope_of(capsys, "payloads", "--model", str(tmp_path))["errors"]

    assert said in error["message"]
    assert "utf-8-sig" not in error["message"]
    assert "sys." not in error["message"]


def test_home_of_nobody_in_a_model_path_is_a_missing_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    envelope = envelope_of(capsys, "payloads", "--model", "~nobody-of-that-name/model")

    assert envelope["exit_code"] == ExitCode.FILE


def test_recording_of_fewer_ranks_than_asked_for_is_said_loudly(
    capsys: pytest.CaptureFixture[str],
) -> None:
    envelope = envelope_of(capsys, *RECORDED, "--tp", "8")

    assert any("measured with 2 ranks" in warning for warning in envelope["warnings"])


def test_second_search_is_refused_before_it_touches_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_verb, "open_gpus", lambda *_: pytest.fail("GPUs were opened"))

    with search_lock(sources.study_path("any").parent / LOCK_NAME):
        envelope = envelope_of(capsys, "search")

    assert envelope["exit_code"] == ExitCode.BUSY


def test_winner_that_cannot_be_saved_is_still_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_profile: object) -> None:
        raise FileError("/x/profiles/y.json", "cannot be written (No space)", code="disk_full")

    monkeypatch.setattr(search_answer, "save_candidate", fail)
    monkeypatch.setattr(search_verb, "run_search", lambda *_, **__: IMPROVED)

    envelope = envelope_of(capsys, *RECORDED)

    assert envelope["exit_code"] == ExitCode.FILE
    assert envelope["errors"][0]["code"] == "disk_full"
    assert envelope["data"]["profile"] == {
        "name": None, "path": None, "settings": dict(IMPROVED.settings),
    }  # fmt: skip


def test_search_that_lost_its_ranks_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankError("the rank server is gone", code="rank_server_gone")

    monkeypatch.setattr(search_verb, "run_search", fail)

    (error,) = envelope_of(capsys, *RECORDED)["errors"]

    assert error["message"].endswith("--trials 3 --json --resume")


def test_bench_on_a_host_that_failed_has_an_error_for_scripts() -> None:
    report = bench_report(outcome=Outcome.HOST_FAILED, message="rank 0: the GPU is lost")

    answer = answer_from_reports([report], Demand(default_workload(), 2), ())

    assert answer.exit_code is ExitCode.HOST
    assert [each.code for each in answer.errors] == ["host_failed"]


def test_closed_standard_error_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", None)

    assert envelope_of(capsys, *RECORDED)["exit_code"] in (ExitCode.DONE, ExitCode.UNKNOWN)
