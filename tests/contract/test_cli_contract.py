"""What scripts may rely on: one envelope on stdout, early failures included, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.bench.nccl_log import NcclReport
from nccltune.cli import bench as bench_verb
from nccltune.cli import main, sources
from nccltune.cli import payloads as payloads_verb
from nccltune.cli import recording_make as make_verb
from nccltune.cli import search as search_verb
from nccltune.cli.sources import Source
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
from nccltune.fingerprint import Fingerprint
from nccltune.measurement import Launch, Outcome, PayloadMeasurement
from nccltune.search.space import HostFacts
from tests.support.results import IMPROVED, INCONCLUSIVE, KEEP_DEFAULT, TUNED, bench_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nccltune.measurement import PayloadRequest, Settings
    from nccltune.search.result import SearchResult

KEYS = ["schema", "command", "status", "exit_code", "data", "warnings", "errors"]
REPOSITORY = Path(__file__).resolve().parents[2]
FACTS = HostFacts(is_ll128_offered=False, has_clusters=False, has_full_nvlink=True, uses_shm=False)
FINGERPRINT = Fingerprint(
    gpu_names=("Stand-in", "Stand-in"),
    gpu_uuids=("GPU-0", "GPU-1"),
    driver_version="1",
    nccl_version="2.28.9",
    link_matrix=(("X", "NV18"), ("NV18", "X")),
    numa_nodes=(0, 0),
    world_size=2,
)


class FakeBench:
    """Measures the same times whatever is asked."""

    source = "gpus"

    def __init__(self) -> None:
        self.versions = {"nccl": "2.28.9", "torch": "2.11.0"}

    def launch(self, settings: Settings, requests: Sequence[PayloadRequest], **_: Any) -> Launch:
        payloads = tuple(
            PayloadMeasurement.from_samples(each.size_bytes, [5.0, 6.0, 7.0], is_data_ok=True)
            for each in requests
        )
        return Launch(settings, Outcome.OK, payloads)


@contextmanager
def fake_gpus(*_: object) -> Iterator[tuple[Source, Any]]:
    """Stand in for ``open_gpus``."""
    bench = FakeBench()
    session = SimpleNamespace(
        bench=bench,
        plan=SimpleNamespace(is_shared=False, rank_count=2),
        base={"NCCL_NVLS_ENABLE": "0"},
        baseline_report=NcclReport(),
        fingerprint=FINGERPRINT,
        has_full_nvlink=True,
    )
    yield Source(bench=bench, place="2x-Stand-in", facts=FACTS), session  # type: ignore[arg-type]


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


def envelope_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command and return its envelope, once it has kept the promises that all make."""
    exit_code = main([*arguments, "--json"] if "--" not in arguments else list(arguments))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    envelope: dict[str, Any] = json.loads(lines[0], parse_constant=pytest.fail)
    assert list(envelope) == KEYS
    assert envelope["schema"] == "nccltune.cli/1"
    assert envelope["exit_code"] == exit_code
    status = {0: "ok", 3: "no", 4: "unknown"}.get(exit_code, "error")
    assert envelope["status"] == status
    for error in envelope["errors"]:
        assert list(error) == ["code", "message"]
        assert error["code"]
        assert "\n" not in error["message"]
    return envelope


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
    more = ("--candidates", "5", "--append", path)
    appended = envelope_of(capsys, "recording", "make", "--name", "mine", *more)
    again = envelope_of(capsys, "recording", "make", "--name", "mine")

    assert made["data"]["candidate_count"] == 3
    assert made["data"]["is_complete"] is True
    assert appended["data"]["candidate_count"] >= 5
    assert again["exit_code"] == 2
    assert again["errors"][0]["code"] == "name_taken"


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
    monkeypatch.setattr(sources, "read_gpus", lambda: SimpleNamespace(gpus=("one", "two")))
    monkeypatch.setattr(search_verb, "run_search", lambda *_, **__: KEEP_DEFAULT)

    envelope = envelope_of(capsys, "search", "--fallback-recording", "h200-2x-shm")

    assert envelope["data"]["source"] == "gpus"
    assert envelope["warnings"] == []


def test_search_with_a_broken_driver_does_not_fall_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_gpus() -> None:
        raise HostError("reboot or reload the driver", code="driver_mismatch")

    monkeypatch.setattr(sources, "read_gpus", read_gpus)

    envelope = envelope_of(capsys, "search", "--fallback-recording", "h200-2x-shm")

    assert envelope["exit_code"] == 5
    assert envelope["errors"][0]["code"] == "driver_mismatch"


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
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environ or {})},
    )
