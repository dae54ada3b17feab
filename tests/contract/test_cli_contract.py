"""What scripts may rely on: every verb answers with one envelope and an exit code."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from nccltune.cli import bench as bench_verb
from nccltune.cli import main, sources
from nccltune.cli import recording_make as make_verb
from nccltune.cli import search as search_verb
from nccltune.cli.launches import SeriesFollower
from nccltune.cli.settings_options import parse_candidate
from nccltune.errors import HostError
from nccltune.measurement import Outcome
from nccltune.recording import candidate_key
from nccltune.store import find_profile
from tests.support.command_line import envelope_of, fake_gpus
from tests.support.results import IMPROVED, INCONCLUSIVE, KEEP_DEFAULT, TUNED, bench_report
from tests.support.standin_cli import standin_hardware
from tests.support.studies import study_of

if TYPE_CHECKING:
    from nccltune.search.result import SearchResult


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_gpus() -> None:
        raise HostError("no NVIDIA driver found", code="nvml_absent")

    monkeypatch.setattr(sources, "read_gpus", read_gpus)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_verb, make_verb, search_verb):
        monkeypatch.setattr(module, "open_gpus", fake_gpus)


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    settings = {"NCCL_PROTO": "allreduce:LL"}
    document = {"schema": "nccltune.profile/1", "name": "mine", "settings": settings}
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path


def launch_words(*more: str) -> list[str]:
    """Return a launch command whose all-reduces MSCCL++ carries."""
    return ["python", "-m", "sglang.launch_server", "--tp", "8", "--enable-mscclpp", *more]


# Every verb answers.


def test_search_of_a_recording_answers_with_every_promised_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    envelope = envelope_of(capsys, "search", "--recording", "h200-2x-nvlink", "--trials", "4")

    data = envelope["data"]
    promised = {"verdict", "profile", "payloads", "score_ratio", "score_ci", "trial_count"}
    assert promised | {"duration_s", "source"} <= data.keys()
    assert {"name", "settings"} <= data["profile"].keys()
    promised = {"bytes", "weight", "is_guard", "baseline_us", "tuned_us", "ratio"}
    assert promised <= data["payloads"][0].keys()
    assert envelope["command"] == "search"
    assert data["source"] == "recording:h200-2x-nvlink"
    assert data["trial_count"] == 4


@pytest.mark.usefixtures("gpus")
def test_bench_answers_with_payloads_and_outcome(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_verb, "compare", lambda *_, **__: bench_report())

    envelope = envelope_of(capsys, "bench", "--set", "NCCL_PROTO=allreduce:LL")

    assert envelope["exit_code"] == 0
    assert envelope["data"]["outcome"] == "ok"
    assert envelope["data"]["payloads"][0]["bytes"] == 43008


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("outcome", "exit_code"),
    [
        (Outcome.CRASHED, 3),
        (Outcome.TIMEOUT, 3),
        (Outcome.WRONG_DATA, 3),
        (Outcome.REJECTED, 3),
        (Outcome.UNSUPPORTED, 3),
        (Outcome.HOST_BUSY, 9),
        (Outcome.HOST_FAILED, 5),
    ],
)
def test_bench_of_a_candidate_that_cannot_be_measured_says_no_or_blames_the_host(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    exit_code: int,
) -> None:
    failed = bench_report(outcome=outcome, message="made up", rows=())
    monkeypatch.setattr(bench_verb, "compare", lambda *_, **__: failed)

    envelope = envelope_of(capsys, "bench", "--profile", "folk-ll-ring")

    assert envelope["exit_code"] == exit_code
    assert envelope["data"]["outcome"] == outcome


def test_payloads_answers_with_batches(capsys: pytest.CaptureFixture[str]) -> None:
    envelope = envelope_of(capsys, "payloads")

    batches = envelope["data"]["batches"]
    assert [batch["size"] for batch in batches] == [1, 2, 4, 8]
    assert batches[0]["payloads"][0] == {
        "bytes": 43008,
        "count": 126,
        "graph_count": 123,
        "origin": "verify+draft_extend",
        "is_scored": True,
    }
    guards = [guard["bytes"] for guard in envelope["data"]["guards"]]
    assert guards == [14336, 1376256, 67108864]


def test_recording_list_and_show_answer(capsys: pytest.CaptureFixture[str]) -> None:
    listed = envelope_of(capsys, "recording", "list")
    shown = envelope_of(capsys, "recording", "show", "h200-2x-shm")

    names = [row["name"] for row in listed["data"]["recordings"]]
    assert {"h200-2x-nvlink", "h200-2x-shm"} <= set(names)
    assert listed["command"] == "recording list"
    assert shown["data"]["name"] == "h200-2x-shm"
    assert shown["data"]["candidate_count"] > 100


@pytest.mark.usefixtures("gpus")
def test_recording_make_keeps_every_launch_and_append_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = envelope_of(capsys, "recording", "make", "--name", "mine", "--candidates", "3")
    path = made["data"]["path"]
    own = "NCCL_MIN_CTAS=16,NCCL_THREAD_THRESHOLDS=-2 -2 -2 2 -2 -2"
    more = ("--candidates", "5", "--append", path, "--try", own)
    appended = envelope_of(capsys, "recording", "make", "--name", "mine", *more)
    again = envelope_of(capsys, "recording", "make", "--name", "mine")

    assert made["data"]["candidate_count"] == 3
    assert made["data"]["is_complete"] is True
    assert appended["data"]["candidate_count"] >= 5
    kept = [one["settings"] for one in json.loads(Path(path).read_text())["launches"]]
    assert find_profile("folk-ll-ring").profile.settings in kept
    assert parse_candidate(own) in kept
    assert again["exit_code"] == 2
    assert again["errors"][0]["code"] == "name_taken"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "tries",
    [
        ["NCCL_MIN_CTAS=8"],
        ["NCCL_MIN_CTAS=8", "NCCL_MIN_CTAS=8"],
        ["NCCL_MIN_NCHANNELS=8", "NCCL_MIN_CTAS=8"],
        ["NCCL_PROTO=LL", "NCCL_PROTO=ll", "NCCL_PROTO=allreduce:LL"],
    ],
)
def test_recording_make_is_complete_with_as_many_distinct_candidates_as_asked(
    capsys: pytest.CaptureFixture[str], tries: list[str]
) -> None:
    words = [word for text in tries for word in ("--try", text)]
    made = envelope_of(capsys, "recording", "make", "--name", "dup", "--candidates", "70", *words)

    assert (made["data"]["candidate_count"], made["data"]["is_complete"]) == (70, True)
    launches = json.loads(Path(made["data"]["path"]).read_text())["launches"]
    kept = [one["settings"] for one in launches if one["settings"]]
    assert len(kept) == len({candidate_key(one) for one in kept}) == 70
    assert kept[:2] == [parse_candidate(tries[0]), find_profile("folk-ll-ring").profile.settings]


@pytest.mark.usefixtures("gpus")
def test_recording_make_stopped_early_says_how_to_go_on_in_the_words_that_were_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "NCCL_MIN_CTAS=16,NCCL_THREAD_THRESHOLDS=-2 -2 -2 2 -2 -2"
    typed = ["recording", "make", "--name", "mine", "--candidates", "5", "--try", own]

    with monkeypatch.context() as patched:
        patched.setattr(SeriesFollower, "is_over", True)
        assert main(typed) == 0

    shown = capsys.readouterr().out
    assert "0 of 5" in shown
    command = next(line for line in shown.splitlines() if "nccltune recording make" in line)
    first, *again = shlex.split(command)
    assert (first, again[: len(typed)], again[-2]) == ("nccltune", typed, "--append")
    assert envelope_of(capsys, *again)["data"]["candidate_count"] == 5


@pytest.mark.parametrize("text", ["NCCL_MIN_NCHANNELS=4", "NCCL_MIN_CTAS=4", "NCCL_PROTO=ll"])
def test_search_finds_a_candidate_in_a_recording_that_spells_it_otherwise(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    words = ("search", "--recording", "h200-2x-nvlink", "--trials", "2", "--try", text)
    envelope = envelope_of(capsys, *words)

    assert envelope["data"]["trial_count"] == 2
    _, trial = study_of(Path(envelope["data"]["study_path"])).trials
    assert trial.user_attrs["launch"]["settings"] == dict(candidate_key(parse_candidate(text)))


def test_search_still_refuses_what_a_recording_holds_in_no_spelling(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("search", "--recording", "h200-2x-nvlink", "--try", "NCCL_MIN_NCHANNELS=5")
    envelope = envelope_of(capsys, *words)

    assert envelope["exit_code"] == 2
    assert envelope["errors"][0]["code"] == "not_recorded"


def test_profile_verbs_answer(capsys: pytest.CaptureFixture[str], profile_file: Path) -> None:
    listed = envelope_of(capsys, "profile", "list")
    shown = envelope_of(capsys, "profile", "show", "folk-ll-ring")
    compared = envelope_of(capsys, "profile", "diff", "folk-ll-ring", str(profile_file))
    checked = envelope_of(capsys, "profile", "check", str(profile_file))

    assert {"folk-ll-ring", "sglang-default"} <= {p["name"] for p in listed["data"]["profiles"]}
    assert shown["data"]["settings"]["NCCL_PROTO"] == "LL"
    assert shown["data"]["state"] == "shipped"
    assert compared["data"]["settings"]["NCCL_PROTO"] == ["LL", "allreduce:LL"]
    assert compared["data"]["is_equal"] is False
    assert checked["data"]["settings"] == {"NCCL_PROTO": "allreduce:LL"}


# How a search ends.


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("result", "exit_code"),
    [
        (IMPROVED, 0),
        (KEEP_DEFAULT, 0),
        (INCONCLUSIVE, 4),
        (replace(INCONCLUSIVE, is_interrupted=True), 130),
    ],
    ids=["improved", "keep_default", "inconclusive", "interrupted"],
)
def test_search_ends_with_the_exit_code_of_its_verdict(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    result: SearchResult,
    exit_code: int,
) -> None:
    monkeypatch.setattr(search_verb, "run_search", lambda *_, **__: result)

    envelope = envelope_of(capsys, "search")

    assert envelope["exit_code"] == exit_code
    assert envelope["data"]["verdict"] == result.verdict


@pytest.mark.usefixtures("gpus")
def test_search_that_improved_saves_a_profile_that_bench_can_find(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_verb, "run_search", lambda *_, **__: IMPROVED)

    found = envelope_of(capsys, "search", "--batch", "1:1")["data"]
    shown = envelope_of(capsys, "profile", "show", found["profile"]["name"])["data"]

    assert found["profile"]["name"] == "kimi-k2.5-2x-stand-in"
    assert found["next_command"] == "nccltune bench --profile kimi-k2.5-2x-stand-in --batch 1:1"
    assert shown["settings"] == TUNED
    assert shown["source"] == "gpus"
    assert shown["measured"]["score_ratio"] == IMPROVED.score_ratio


@pytest.mark.usefixtures("gpus")
def test_search_that_was_interrupted_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = replace(INCONCLUSIVE, is_interrupted=True)
    monkeypatch.setattr(search_verb, "run_search", lambda *_, **__: stopped)

    envelope = envelope_of(capsys, "search", "--trials", "9")

    assert envelope["errors"][0]["code"] == "interrupted"
    assert "nccltune search --trials 9 --json --resume" in envelope["errors"][0]["message"]


def test_search_of_a_launch_that_bypasses_nccl_stops_before_anything_is_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    launch = launch_words("--model-path", str(tmp_path), "--disable-custom-all-reduce")

    envelope = envelope_of(
        capsys, "search", "--recording", "h200-2x-nvlink", "--json", "--", *launch
    )

    assert envelope["exit_code"] == 3
    assert envelope["errors"][0]["code"] == "nccl_bypassed"
    assert "--enable-mscclpp" in envelope["errors"][0]["message"]
    assert envelope["data"]["all_reduce_path"]["path"] == "mscclpp"


@pytest.mark.usefixtures("no_gpu")
def test_search_without_a_gpu_falls_back_on_the_recording_and_says_so_loudly(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--fallback-recording", "h200-2x-shm", "--trials", "3")

    envelope = envelope_of(capsys, "search", *arguments)

    assert envelope["data"]["source"] == "recording:h200-2x-shm"
    assert envelope["warnings"][0].startswith("NO NVIDIA GPU ON THIS HOST")


@pytest.mark.usefixtures("gpus")
def test_search_with_a_gpu_ignores_the_fallback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "read_gpus", standin_hardware)
    monkeypatch.setattr(search_verb, "run_search", lambda *_, **__: KEEP_DEFAULT)

    envelope = envelope_of(capsys, "search", "--fallback-recording", "h200-2x-shm")

    assert envelope["data"]["source"] == "gpus"
    assert envelope["warnings"] == []


def test_search_with_a_single_gpu_falls_back_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "read_gpus", lambda: SimpleNamespace(gpus=("one",), problems=()))
    arguments = ("--fallback-recording", "h200-2x-shm", "--trials", "3")

    envelope = envelope_of(capsys, "search", *arguments)

    assert envelope["data"]["source"] == "recording:h200-2x-shm"
    assert envelope["warnings"][0].startswith("ONLY ONE NVIDIA GPU ON THIS HOST")


def test_search_with_a_broken_driver_does_not_fall_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_gpus() -> None:
        raise HostError("reboot or reload the driver", code="driver_mismatch")

    monkeypatch.setattr(sources, "read_gpus", read_gpus)

    envelope = envelope_of(capsys, "search", "--fallback-recording", "h200-2x-shm")

    assert envelope["exit_code"] == 5
    assert envelope["errors"][0]["code"] == "driver_mismatch"
