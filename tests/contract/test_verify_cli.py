"""``nccltune verify`` from the command line: stand-in servers of every kind, and bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.cli import main, verify_answer
from nccltune.cli import verify as verify_verb
from nccltune.cli.verify_options import check_markdown
from nccltune.errors import BusyError, FileError
from nccltune.inject.marker import MARKER, format_marker, settings_digest
from nccltune.paths import state_dir
from nccltune.profile import Profile, format_profile
from nccltune.store import (
    activate,
    find_profile,
    read_active,
    read_evidence,
    save_candidate,
)
from nccltune.verify import record as records
from nccltune.verify.model import Boot, RankState, Seen
from nccltune.verify.record import VerifyRecord, newest_records, save
from nccltune.verify.sameness import hidden
from nccltune.verify.spec import DEFAULT_BOOTS
from tests.support.boots import DEFAULT_ARM, FAST, HOST, ON_PATH, mirrored, record_of
from tests.support.command_line import envelope_of
from tests.support.launching import WAIT_S, is_alive, wait_for, with_repository
from tests.support.standin_sglang.program import (
    free_port,
    read_records,
    running_server,
    standin_environ,
)
from tests.support.verifying import verify_command, without_flag

if TYPE_CHECKING:
    from nccltune.verify.spec import VerifyObserver, VerifySpec

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
QUICK = ("--runs", "1", "--tokens", "20", "--boots", "2")
SAME = ("--arms", "default,again")
STALL_S = "2"
"""Above the time that spawning takes on a busy machine."""


class Host:
    """A host whose servers are stand-ins, and write themselves down."""

    def __init__(self, folder: Path, monkeypatch: Patch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self.wish(record=str(folder / "processes.jsonl"))

    def wish(self, **wishes: str | float) -> None:
        """Let servers that are started from now on behave in some way."""
        for name, value in standin_environ(**wishes).items():
            self._monkeypatch.setenv(name, value)

    def command(self, *flags: str, port: int | None = None, tp: int = 2) -> tuple[str, ...]:
        """Return a launch command."""
        return verify_command(self.folder, *flags, port=port or free_port(), tp=tp)

    def processes(self) -> list[dict[str, Any]]:
        """Return what every process of every server wrote down."""
        path = self.folder / "processes.jsonl"
        return [dict(entry) for entry in read_records(path)] if path.exists() else []

    def is_empty(self) -> bool:
        """Whether no process of any server is left."""
        return not any(is_alive(int(entry["pid"])) for entry in self.processes())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: Patch) -> Host:
    return Host(tmp_path, monkeypatch)


def verify(capsys: Capture, host: Host, *options: str) -> dict[str, Any]:
    """Verify the same arm twice, as fast as it goes, and return the envelope."""
    words = [*QUICK, *SAME, *options]
    return envelope_of(capsys, "verify", *words, "--json", "--", *host.command(tp=1))


def runs_of(envelope: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for arm in envelope["data"]["arms"] for run in arm["runs"]]


# Servers that are slow, and fine.


@pytest.mark.parametrize(
    "wishes",
    [{"silence_s": 0.7}, {"starting_s": 0.7}, {"health_s": 1.0}, {"stage_s": 0.2}],
    ids=["long silence", "503 then 200", "slow health", "slow but alive"],
)
def test_a_server_that_is_slow_is_measured(
    capsys: Capture, host: Host, wishes: dict[str, Any]
) -> None:
    host.wish(**wishes)

    envelope = verify(capsys, host)

    # One block of boots never decides, however fast or slow this machine is.
    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (4, "inconclusive")
    assert [(arm["name"], arm["boots"]) for arm in envelope["data"]["arms"]] == [
        ("default", 2),
        ("again", 2),
    ]
    assert [run["tokens"] for run in runs_of(envelope)] == [20] * 4
    waited_s = sum(value for name, value in wishes.items() if name != "stage_s")
    assert all(boot["start_s"] >= waited_s for boot in envelope["data"]["boots"])
    assert envelope["errors"] == []
    assert host.is_empty()


# Servers that cannot be measured.


@pytest.mark.parametrize(
    ("wishes", "code", "said"),
    [
        ({"fail": "stall_capture"}, "stalled", "stalled in graph capture (target verify"),
        ({"fail": "die_loading"}, "server_died", "There is no safetensors file"),
        ({"fail": "oom_capture"}, "server_died", "out of memory"),
        ({"answer": "error_200"}, "error_in_stream", "status 200, and then an error"),
        ({"answer": "http_500"}, "bad_status", "status 500"),
        ({"answer": "fewer_tokens"}, "fewer_tokens", "after 10 tokens where 20 were asked for"),
        ({"answer": "zero_tokens"}, "zero_tokens", "after 0 tokens where 20 were asked for"),
        ({"answer": "no_usage"}, "no_usage", "does not say how many tokens came"),
        ({"answer": "nan_stop"}, "nan_stop", "computes nonsense"),
        ({"answer": "drop"}, "dropped", "dropped the connection"),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else " ".join(map(str, value.values())),
)
def test_a_server_that_misbehaves_is_unusable_and_gives_no_number(
    capsys: Capture, host: Host, wishes: dict[str, Any], code: str, said: str
) -> None:
    host.wish(**wishes)

    envelope = verify(capsys, host, "--stall-timeout-s", STALL_S)

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (8, "unusable")
    (error,) = envelope["errors"]
    assert error["code"] == code
    assert said in error["message"]
    assert "boot 1 of 4 (arm default)" in error["message"]
    assert runs_of(envelope) == []
    assert envelope["data"]["effect_pct"] is None
    (problem,) = envelope["data"]["problems"]
    assert Path(problem["log_path"]).exists()
    assert host.is_empty()


def test_an_answer_in_one_piece_ends_the_verify_at_its_first_boot(
    capsys: Capture, host: Host
) -> None:
    host.wish(answer="one_chunk")

    envelope = verify(capsys, host)

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (8, "unusable")
    (error,) = envelope["errors"]
    assert error["code"] == "cannot_be_timed"
    assert "boot 1 of 4 (arm default)" in error["message"]
    assert runs_of(envelope) == []
    assert (
        len({entry["pid"] for entry in host.processes() if entry["role"].startswith("rank")}) == 1
    )


def test_people_read_once_what_a_server_answered(capsys: Capture, host: Host) -> None:
    host.wish(answer="error_200")

    code = main(["verify", *QUICK, *SAME, "--", *host.command(tp=1)])

    shown = capsys.readouterr()
    assert code == 8
    assert shown.out.startswith("unusable: boot 1 of 4 (arm default): /generate: status 200, and")
    assert "the request was aborted" not in shown.out
    assert shown.err.count("the request was aborted") == 1


def test_a_server_that_dies_in_a_later_boot_keeps_the_boots_before(
    capsys: Capture, host: Host
) -> None:
    host.wish(fail="die_loading", fail_if="NCCL_PROTO=allreduce:LL")
    save_candidate(Profile("fast", {"NCCL_PROTO": "allreduce:LL"}))
    words = (*QUICK, "--arms", "default,fast", "--any-host", "--json")

    envelope = envelope_of(capsys, "verify", *words, "--", *host.command())

    assert envelope["data"]["verdict"] == "unusable"
    assert "boot 2 of 4 (arm fast)" in envelope["errors"][0]["message"]
    assert [arm["boots"] for arm in envelope["data"]["arms"]] == [1, 0]
    (record,) = newest_records()
    assert record.judgement["verdict"] == "unusable"


# A whole verify.


def test_num_steps_starts_servers_that_differ_in_draft_steps_alone(
    capsys: Capture, host: Host
) -> None:
    words = (*QUICK, "--num-steps", "2,5", "--json")

    data = envelope_of(capsys, "verify", *words, "--", *host.command())["data"]

    two, five = (
        dict(zip(arm["command"], arm["command"][1:], strict=False)) for arm in data["arms"]
    )
    assert [arm["name"] for arm in data["arms"]] == ["2 steps", "5 steps"]
    assert (two["--speculative-num-steps"], two["--speculative-num-draft-tokens"]) == ("2", "3")
    assert (five["--speculative-num-steps"], five["--speculative-num-draft-tokens"]) == ("5", "6")
    assert [boot["arm"] for boot in data["boots"]] == ["2 steps", "5 steps", "5 steps", "2 steps"]


def test_people_see_the_plan_each_run_and_the_report(
    capsys: Capture, host: Host, tmp_path: Path
) -> None:
    command = host.command()
    report = tmp_path / "report.md"

    code = main(["verify", *QUICK, *SAME, "--markdown", str(report), "--", *command])

    shown = capsys.readouterr()
    assert code == 4
    first = shown.err.splitlines()[0]
    assert first == (
        "nccltune: default, again: up to 4 starts, 2 of each; how long a start takes is not known "
        "yet"
    )
    assert "boot 1/4  default: run 1 of 1" in shown.err
    assert shown.out.splitlines()[0] == report.read_text().splitlines()[2]
    assert report.read_text().startswith("# nccltune verify: inconclusive\n")


def test_a_verify_that_is_stopped_leaves_nothing_running_and_resumes(
    capsys: Capture, host: Host
) -> None:
    command = host.command()
    words = ["verify", *QUICK, *SAME, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nccltune", *words, "--", *command],
        env=with_repository({**os.environ, "STANDIN_SGLANG_STAGE_S": "0.2"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: [each for each in newest_records() if each.boots])
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    stopped = json.loads(out)

    assert (process.returncode, stopped["exit_code"]) == (130, 130)
    assert stopped["errors"][-1]["code"] == "interrupted"
    assert "--resume" in stopped["data"]["next_command"]
    assert len(stopped["data"]["boots"]) in (1, 2)
    assert host.is_empty()

    resumed = envelope_of(capsys, *words, "--resume", "--", *command)

    assert resumed["data"]["id"] == stopped["data"]["id"]
    assert [boot["position"] for boot in resumed["data"]["boots"]] == [0, 1, 2, 3]
    for kept, boot in zip(stopped["data"]["boots"], resumed["data"]["boots"], strict=False):
        assert boot["started_at"] == kept["started_at"]


@pytest.fixture
def hurried(monkeypatch: Patch) -> None:
    """Let Ctrl-C come while a verify is being concluded."""

    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_verb, "answer_from_verify", press)


@pytest.mark.usefixtures("hurried")
def test_a_second_interruption_keeps_the_words_how_to_go_on(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    measured(
        *mirrored(("default", 9.8), ("again", 9.8))[:3], is_finished=False, is_interrupted=True
    )

    envelope = judged(capsys, host, arms="default,again")

    (error,) = envelope["errors"]
    assert (envelope["exit_code"], error["code"]) == (130, "interrupted")
    assert "finished boots are kept, go on with: nccltune verify" in error["message"]
    assert "--resume" in error["message"]


@pytest.mark.parametrize("signals", [2, 5])
def test_interruptions_one_after_the_other_leave_the_words_how_to_go_on(
    host: Host, signals: int
) -> None:
    host.wish(ignore_term="1", step_ms=30)
    words = ["verify", *QUICK, *SAME, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nccltune", *words, "--", *host.command()],
        env=with_repository(dict(os.environ)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        wait_for(lambda: b"run 1 of 1" in process.stderr.readline())  # type: ignore[union-attr]
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        out, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    stopped = json.loads(out)

    assert stopped["exit_code"] == 130
    assert "--resume" in stopped["errors"][-1]["message"]
    assert host.is_empty()


def test_what_stands_in_the_way_of_the_next_boot_is_said_beside_what_is_known(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    stop = BusyError("port 30000 is in use", code="port_in_use")
    boots = mirrored(("default", 9.8), ("again", 9.8))
    measured(*boots, stopped=stop, is_finished=False)

    envelope = judged(capsys, host, "--boots", "8", arms="default,again")

    (error,) = envelope["errors"]
    assert (envelope["exit_code"], error["code"]) == (9, "port_in_use")
    assert error["message"].startswith("port 30000 is in use; finished boots are kept, go on with")
    assert "--resume" in envelope["data"]["next_command"]
    assert envelope["data"]["verdict"] in ("inconclusive", "no_difference")
    assert sum(arm["boots"] for arm in envelope["data"]["arms"]) == len(boots)


def test_a_full_disk_is_told_once(
    capsys: Capture, host: Host, measured: Callable[..., None], monkeypatch: Patch
) -> None:
    def full(path: Path, _text: str) -> None:
        raise FileError(path, "cannot be written (No space left on device)", code="disk_full")

    boots = mirrored(("default", 9.8), ("again", 9.8))
    stop = FileError("/x/y.json", "cannot be written", code="disk_full")
    monkeypatch.setattr(records, "write_atomic", full)

    for stopped, words in ((stop, "--resume"), (None, "the figures are above")):
        measured(*boots, stopped=stopped, is_finished=stopped is None)
        envelope = judged(capsys, host, "--boots", "8", arms="default,again")

        (error,) = envelope["errors"]
        assert (envelope["exit_code"], error["code"]) == (6, "disk_full")
        assert words in error["message"]


def test_a_key_of_the_launch_is_printed_nowhere(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    boots = mirrored(("default", 9.8), ("again", 9.8))[:3]
    measured(*boots, is_finished=False, is_interrupted=True)
    command = host.command("--api-key", "sesame")

    for words in (["--json"], []):
        assert main(["verify", *SAME, *words, "--", *command]) == 130
        shown = capsys.readouterr()
        assert "--resume" in shown.out + shown.err
        assert "sesame" not in shown.out + shown.err


# What is concluded, with boots that nobody measured.


@pytest.fixture
def measured(monkeypatch: Patch) -> Callable[..., None]:
    """Let a verify come to chosen boots instead of starting anything."""

    def choose(*boots: Boot, **changes: Any) -> None:
        def run(spec: VerifySpec, _observer: VerifyObserver) -> VerifyRecord:
            arms = tuple(replace(arm, argv=hidden(arm.argv)) for arm in spec.arms)
            record = record_of(tuple(boots), arms=arms, launch=hidden(spec.launch), **changes)
            if spec.on_begin is not None:
                boot_total = len(spec.arms) * (spec.boots or DEFAULT_BOOTS)
                spec.on_begin(replace(record, boots=(), boot_total=boot_total))
            return record

        monkeypatch.setattr(verify_verb, "run_verify", run)

    return choose


def judged(capsys: Capture, host: Host, *options: str, arms: str = "default,fast") -> Any:
    words = ("verify", "--arms", arms, *options, "--json")
    return envelope_of(capsys, *words, "--", *host.command())


def test_people_are_told_beforehand_how_long_it_takes(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    command = host.command()
    boots = mirrored(("default", 9.8), ("again", 9.8))
    save(record_of(boots, launch=command, arms=(DEFAULT_ARM, replace(DEFAULT_ARM, name="again"))))
    measured(*boots)

    main(["verify", *SAME, "--boots", "6", "--", *command])

    # 12 x (60 s to start, 0.93 s of load)
    assert capsys.readouterr().err.splitlines()[0] == (
        "nccltune: default, again: up to 12 starts, 6 of each; about 12:11 at most, by earlier "
        "starts of this command"
    )


def test_a_gain_marks_the_profile_verified_and_activates_nothing(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    save_candidate(FAST)
    measured(*mirrored(("default", 9.8), ("fast", 8.9)))

    envelope = judged(capsys, host)

    data = envelope["data"]
    assert (envelope["exit_code"], data["verdict"]) == (0, "gain")
    assert data["verified_profiles"] == ["fast"]
    assert data["next_command"] == "nccltune profile activate fast"
    evidence: Any = read_evidence(find_profile("fast").profile)
    assert evidence["verify"] == data["id"]
    assert evidence["comparison"]["effect_pct"] == data["effect_pct"]
    assert read_active().name is None


def test_a_gain_of_a_profile_that_is_no_longer_the_stored_one_marks_nothing(
    capsys: Capture, host: Host, measured: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "fast.json"
    settings = {"NCCL_PROTO": "allreduce:LL"}
    path.write_text(
        json.dumps({"schema": "nccltune.profile/1", "name": "fast"} | {"settings": settings})
    )
    path.chmod(0o600)
    save_candidate(FAST)
    measured(*mirrored(("default", 9.8), ("fast", 8.9)))

    envelope = judged(capsys, host, arms=f"default,{path}")

    assert envelope["data"]["verdict"] == "gain"
    assert envelope["data"]["verified_profiles"] == []
    assert "nccltune profile import" in envelope["warnings"][0]
    assert read_evidence(FAST) is None


IN_EFFECT = ON_PATH.ranks["TP0"]


@pytest.mark.parametrize(
    ("rank", "exit_code", "verdict"),
    [
        ({**IN_EFFECT, "NCCL_PROTO": RankState.OVERRIDDEN_BY_SGLANG}, 0, "gain"),
        ({**IN_EFFECT, "NCCL_PROTO": RankState.SET_BY_OPERATOR}, 0, "gain"),
        ({**IN_EFFECT, "NCCL_PROTO": RankState.UNREADABLE}, 0, "gain"),
        ({"NCCL_PROTO": RankState.IN_EFFECT}, 0, "gain"),
        ({**IN_EFFECT, "NCCL_PROTO": RankState.LOST}, 3, "inconclusive"),
        (dict.fromkeys(IN_EFFECT, RankState.SET_BY_OPERATOR), 4, "inconclusive"),
        (dict.fromkeys(IN_EFFECT, RankState.OVERRIDDEN_BY_SGLANG), 4, "inconclusive"),
        (dict.fromkeys(IN_EFFECT, RankState.UNREADABLE), 4, "inconclusive"),
    ],
)
def test_a_profile_that_was_not_wholly_in_effect_is_not_marked(
    capsys: Capture,
    host: Host,
    measured: Callable[..., None],
    rank: dict[str, RankState],
    exit_code: int,
    verdict: str,
) -> None:
    save_candidate(FAST)
    is_part = verdict == "gain"
    # One rank of one boot is enough where a claim is left; none is left if it was so in all.
    odd = replace(ON_PATH, ranks={**(ON_PATH.ranks if is_part else {}), "TP1": rank})
    boots = mirrored(("default", 9.8), ("fast", 8.9))
    changed = [
        replace(boot, seen=odd) if boot.position == 6 or not is_part else boot for boot in boots
    ]
    measured(*changed)

    envelope = judged(capsys, host)

    data = envelope["data"]
    assert (envelope["exit_code"], data["verdict"]) == (exit_code, verdict)
    assert data["verified_profiles"] == []
    assert read_evidence(FAST) is None
    assert "activate" not in data["next_command"]
    told = " ".join(envelope["warnings"])
    assert ("was not marked as verified: not all of its settings" in told) is is_part


def test_a_gain_while_the_operator_has_the_same_settings_is_claimed_for_nobody(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    save_candidate(FAST)
    measured(*mirrored(("default", 9.8), ("fast", 8.9)), environ=dict(FAST.settings))

    envelope = judged(capsys, host)

    data = envelope["data"]
    assert (envelope["exit_code"], data["verdict"]) == (4, "inconclusive")
    assert "both arms had the settings NCCL_MIN_CTAS=8, NCCL_PROTO=allreduce:LL" in data["sentence"]
    assert data["verified_profiles"] == []


def test_a_gain_of_fewer_steps_says_nothing_of_a_profile(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    save_candidate(FAST)
    activate("fast", reason="manual")
    measured(*mirrored(("5 steps", 9.8), ("2 steps", 8.9)))

    words = ("verify", "--arms", "active", "--num-steps", "5,2", "--json")
    data = envelope_of(capsys, *words, "--", *host.command())["data"]

    assert data["verdict"] == "gain"
    assert data["verified_profiles"] == []


def test_a_regression_of_the_active_profile_ends_with_3_and_how_to_switch_it_off(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    save_candidate(FAST)
    activate("fast", reason="manual")
    measured(*mirrored(("default", 8.9), ("active", 9.8)))

    envelope = judged(capsys, host, arms="default,active")

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (3, "regression")
    assert envelope["data"]["effect_pct"] < 0.0
    assert envelope["data"]["next_command"] == "nccltune profile off"
    assert read_active().name == "fast"
    assert read_evidence(FAST) is None


def test_default_against_default_claims_nothing(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    measured(*mirrored(("default", 9.8), ("again", 9.8)))

    envelope = judged(capsys, host, arms="default,again")

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (3, "no_difference")


def test_no_all_reduce_is_the_reason_why_nothing_is_claimed(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    save_candidate(FAST)
    reason = "tensor parallel size 1 makes no all-reduce"
    seen = Seen(is_nccl_on_path=False, path_reason=reason)
    measured(*mirrored(("default", 9.8), ("fast", 8.9), seen=seen))

    envelope = judged(capsys, host)

    assert envelope["data"]["verdict"] != "gain"
    assert reason in " ".join(each["text"] for each in envelope["data"]["reasons"])
    assert read_evidence(FAST) is None


def test_a_profile_that_did_not_reach_a_rank_is_named_key_by_key(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    save_candidate(FAST)
    lost = {"TP0": {"NCCL_PROTO": RankState.IN_EFFECT}, "TP1": {"NCCL_PROTO": RankState.LOST}}
    seen = replace(ON_PATH, ranks=lost)
    measured(*mirrored(("default", 9.8), ("fast", 9.8), seen=seen))

    envelope = judged(capsys, host)

    assert envelope["exit_code"] == 3
    (reason,) = [
        each["text"]
        for each in envelope["data"]["reasons"]
        if each["cause"] == "profile_not_in_effect"
    ]
    assert "TP1" in reason
    assert "NCCL_PROTO" in reason
    assert envelope["data"]["next_command"].startswith("nccltune doctor -- ")


def test_an_undecided_verify_advises_more_boots(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    measured(*mirrored(("default", 9.8), ("again", 9.7), round_count=1))

    envelope = judged(capsys, host, "--boots", "2", arms="default,again")

    assert envelope["exit_code"] == 4
    assert "--boots 4" in envelope["data"]["next_command"]


def test_an_undecided_verify_that_was_resumed_advises_a_new_one(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    measured(*mirrored(("default", 9.8), ("again", 9.7), round_count=1))
    command = (*host.command(), "--resume")  # a word of the launch is none of ours

    words = ("verify", "--resume", *SAME, "--boots", "2", "--json")
    advice = envelope_of(capsys, *words, "--", *command)["data"]["next_command"]

    own, _, launch = advice.partition(" -- ")
    assert "--resume" not in own
    assert "--boots 4" in own
    assert launch.endswith(" --resume")


DAMAGED_SEARCH = {
    "schema": "nccltune.search/1",
    "name": "x",
    "ended_at": "2026-01-01T00:00:00+00:00",
    "answer": {"source": "gpus", "comparisons": [None]},
}


def test_a_damaged_search_costs_no_verdict(
    capsys: Capture, host: Host, measured: Callable[..., None]
) -> None:
    save_candidate(FAST)
    folder = state_dir() / "searches"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text(json.dumps(DAMAGED_SEARCH))
    measured(*mirrored(("default", 9.8), ("fast", 8.9)))

    envelope = judged(capsys, host)

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (0, "gain")
    assert envelope["data"]["predictions"] == {}


def test_a_fault_in_judging_loses_no_boot(capsys: Capture, host: Host, monkeypatch: Patch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    words = ["verify", *QUICK, *SAME, "--json"]
    command = host.command(tp=1)
    with monkeypatch.context() as patch:
        patch.setattr(verify_answer, "predictions_for", fail)
        assert main([*words, "--", *command]) == 1
        shown = capsys.readouterr()
    (kept,) = newest_records()
    processes = len(host.processes())
    assert "finished boots are kept, go on with: nccltune verify" in shown.err
    assert "--resume -- " in shown.err

    envelope = envelope_of(capsys, *words, "--resume", "--", *command)

    assert envelope["data"]["id"] == kept.id
    assert envelope["data"]["boots_made"] == len(kept.boots) == 4
    assert envelope["data"]["verdict"] in ("inconclusive", "no_difference")
    assert len(host.processes()) == processes


def test_a_markdown_file_that_cannot_be_written_costs_no_figure(
    capsys: Capture, host: Host, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()

    def run_and_lose_folder(spec: VerifySpec, _observer: VerifyObserver) -> VerifyRecord:
        folder.rmdir()
        return record_of(mirrored(("default", 9.8), ("again", 9.8)), arms=spec.arms)

    monkeypatch.setattr(verify_verb, "run_verify", run_and_lose_folder)

    envelope = judged(capsys, host, "--markdown", str(folder / "x.md"), arms="default,again")

    assert envelope["exit_code"] == 6
    assert envelope["data"]["verdict"] == "no_difference"
    assert envelope["errors"][0]["code"] == "cannot_write"


# A server that runs.


def test_url_names_rank_and_key_where_the_profile_is_lost(
    capsys: Capture, host: Host, tmp_path: Path
) -> None:
    settings = {"NCCL_PROTO": "allreduce:LL", "NCCL_NTHREADS": "128"}
    save_candidate(Profile("fast", settings))
    activate("fast", reason="manual")
    marker = format_marker(settings_digest(settings), settings)  # as nccltune run leaves it
    given = {**os.environ, **settings, MARKER: marker, "SPT_NOENV": "1"}
    flags = ("--disable-custom-all-reduce",)
    with running_server(tmp_path, *flags, environ=given, lose="NCCL_PROTO", lose_rank=1) as server:
        envelope = envelope_of(capsys, "verify", *QUICK[:4], "--url", server.url, "--json")

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (3, "drift")
    assert [arm["boots"] for arm in envelope["data"]["arms"]] == [1]
    ranks = envelope["data"]["boots"][0]["ranks"]
    assert ranks["TP1"]["NCCL_PROTO"] == "lost"
    assert ranks["TP0"]["NCCL_PROTO"] == ranks["TP1"]["NCCL_NTHREADS"] == "in_effect"
    reasons = [each["text"] for each in envelope["data"]["reasons"]]
    assert any("TP1" in text and "NCCL_PROTO" in text for text in reasons)


def test_url_without_anything_stored_is_measured_and_claims_nothing(
    capsys: Capture, host: Host, tmp_path: Path
) -> None:
    with running_server(tmp_path) as server:
        envelope = envelope_of(capsys, "verify", *QUICK[:4], "--url", server.url, "--json")
        assert server.process.poll() is None

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (4, "inconclusive")
    assert [run["tokens"] for run in runs_of(envelope)] == [20]
    assert envelope["data"]["url"] == server.url


def test_url_can_be_told_that_no_profile_is_expected(
    capsys: Capture, host: Host, tmp_path: Path
) -> None:
    save_candidate(FAST)
    activate("fast", reason="manual")
    words = (*QUICK[:4], "--arms", "default", "--json")
    with running_server(tmp_path) as server:
        envelope = envelope_of(capsys, "verify", *words, "--url", server.url)

    assert envelope["data"]["verdict"] == "inconclusive"
    (arm,) = envelope["data"]["arms"]
    assert arm["settings"] == {}


def test_url_of_a_server_that_misbehaves_is_unusable(
    capsys: Capture, host: Host, tmp_path: Path
) -> None:
    with running_server(tmp_path, answer="fewer_tokens") as server:
        envelope = envelope_of(capsys, "verify", *QUICK[:4], "--url", server.url, "--json")

    assert (envelope["exit_code"], envelope["data"]["verdict"]) == (8, "unusable")
    assert envelope["errors"][0]["code"] == "fewer_tokens"
    assert runs_of(envelope) == []


def test_a_baseline_of_another_host_is_refused(capsys: Capture, host: Host, tmp_path: Path) -> None:
    other = record_of(mirrored(("default", 9.8), ("fast", 8.9)), fingerprint=HOST)
    save(other)
    with running_server(tmp_path) as server:
        words = ("--url", server.url, "--baseline", other.id)
        envelope = envelope_of(capsys, "verify", *QUICK[:4], *words, "--json")

    (error,) = envelope["errors"]
    assert (envelope["exit_code"], error["code"]) == (2, "other_baseline")
    assert error["message"].startswith(f"--baseline {other.id} is of no use for this server: ")


# Input that makes no sense.


def refused(capsys: Capture, *words: str) -> tuple[int, str, str]:
    envelope = envelope_of(capsys, "verify", *words)
    (error,) = envelope["errors"]
    return envelope["exit_code"], error["code"], error["message"]


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        ((), 2, "no_launch"),
        (("--arms", "default,"), 2, "bad_value"),
        (("--num-steps", "2,x"), 2, "bad_value"),
        (("--num-steps", "0"), 2, "bad_value"),
        (("--boots", "3", "--num-steps", "2,5"), 2, "bad_boots"),
        (("--boots", "0"), 2, "usage"),
        (("--tokens", "1"), 2, "usage"),
        (("--runs", "0"), 2, "usage"),
        (("--ready-timeout-s", "nan"), 2, "usage"),
        (("--arms", "default,default"), 2, "same_arms"),
        (("--arms", "default"), 2, "one_arm"),
        (("--arms", "default,nosuch"), 2, "no_such_profile"),
        (("--arms", "default,folk-ll-ring", "--num-steps", "2,5"), 2, "two_differences"),
        (("--num-steps", "2,2"), 2, "same_arms"),
        (("--arms", "default,active"), 2, "no_active_profile"),
        (("--baseline", "x"), 2, "conflicting_options"),
        (("--num-steps", "2,5", "--resume"), 6, "no_verify"),
        (("--markdown", "/nowhere/x.md"), 6, "cannot_write"),
        (("--markdown", "/"), 6, "not_a_file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_make_no_sense_are_refused(
    capsys: Capture, host: Host, words: tuple[str, ...], exit_code: int, code: str
) -> None:
    launch = ("--", *host.command()) if words else ()

    found = refused(capsys, *words, "--json", *launch)

    assert found[:2] == (exit_code, code), found
    assert host.processes() == []


@pytest.mark.parametrize(
    "option",
    [
        ("--boots", "4"),
        ("--num-steps", "2,5"),
        ("--resume",),
        ("--any-host",),
        ("--ready-timeout-s", "60"),
        ("--stall-timeout-s", "60"),
        ("--", "sglang", "serve"),
        ("--arms", "default,fast"),
    ],
    ids=" ".join,
)
def test_url_takes_no_option_that_is_about_starting(
    capsys: Capture, option: tuple[str, ...]
) -> None:
    found = refused(capsys, "--json", "--url", "http://127.0.0.1:9", *option)

    assert found[:2] == (2, "conflicting_options")
    assert (option[0] if option[0] != "--" else "-- CMD") in found[2]


@pytest.mark.parametrize(
    ("url", "exit_code", "code"),
    [("nonsense", 2, "bad_url"), ("http://127.0.0.1:{port}", 8, "no_answer")],
)
def test_a_url_where_no_server_answers_is_refused(
    capsys: Capture, url: str, exit_code: int, code: str
) -> None:
    found = refused(capsys, "--url", url.format(port=free_port()), "--json")

    assert found[:2] == (exit_code, code)


def test_a_baseline_that_does_not_exist_is_refused(capsys: Capture) -> None:
    found = refused(capsys, "--url", "http://127.0.0.1:9", "--baseline", "x", "--json")

    assert found[:2] == (2, "no_such_baseline")


def test_a_baseline_that_is_damaged_is_refused(capsys: Capture) -> None:
    path = save(record_of(mirrored(("default", 9.8), ("fast", 8.9))))
    path.write_text("{", encoding="utf-8")
    words = ("--url", "http://127.0.0.1:9", "--baseline", path.stem)
    code, name, message = refused(capsys, *words, "--json")

    assert (code, name) == (6, "bad_json")
    assert str(path) in message


def test_a_command_that_is_no_sglang_launch_is_refused(capsys: Capture, host: Host) -> None:
    found = refused(capsys, *SAME, "--json", "--", "sleep", "60")

    assert found[:2] == (2, "not_sglang")


def test_a_launch_without_speculation_has_no_steps_to_compare(capsys: Capture, host: Host) -> None:
    command = host.command()
    plain = tuple(
        word
        for flag in ("--speculative-algorithm", "--speculative-draft-model-path")
        for word in without_flag(command, flag)
    )[: len(command) - 2]

    exit_code, _, message = refused(capsys, "--num-steps", "2,5", "--json", "--", *plain)

    assert exit_code == 2
    assert "speculat" in message


def test_flags_that_contradict_each_other_are_refused(capsys: Capture, host: Host) -> None:
    command = host.command("--speculative-num-draft-tokens", "9")

    exit_code, _, message = refused(capsys, *SAME, "--json", "--", *command)

    assert exit_code == 2
    assert "--speculative-num-draft-tokens 9" in message


def test_a_model_that_is_not_there_is_refused_before_anything_starts(
    capsys: Capture, host: Host
) -> None:
    command = host.command()
    missing = tuple(word.replace("/target", "/nosuch") for word in command)

    exit_code, _, message = refused(capsys, *SAME, "--json", "--", *missing)

    assert exit_code == 6
    assert "/nosuch" in message
    assert host.processes() == []


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("long name", "cannot_write"),
        ("circle", "cannot_write"),
        ("link to nowhere", "cannot_write"),
        ("link to a folder", "not_a_file"),
        ("pipe", "not_a_file"),
        ("below a file", "cannot_write"),
    ],
)
def test_a_report_that_could_not_be_written_is_refused_before_anything_starts(
    capsys: Capture, host: Host, tmp_path: Path, kind: str, code: str
) -> None:
    path = tmp_path / ("x" * 300 if kind == "long name" else "report.md")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "below a file":
        path.write_text("")
        path = path / "report.md"
    elif kind != "long name":
        targets = {"circle": path, "link to nowhere": tmp_path / "no" / "x"}
        path.symlink_to(targets.get(kind, tmp_path))

    found = refused(capsys, *SAME, "--markdown", str(path), "--json", "--", *host.command())

    assert found[:2] == (6, code)
    assert host.processes() == []


@pytest.mark.parametrize("kind", ["new", "there", "link"])
def test_a_report_that_can_be_written_is_left_alone_until_then(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "report.md"
    if kind == "there":
        path.write_text("old")
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere.md")
    before = sorted(tmp_path.iterdir())

    check_markdown(path)

    assert sorted(tmp_path.iterdir()) == before
    assert kind != "there" or path.read_text() == "old"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("--num-steps", "2"), "default,again"),
        (("--num-steps", "2,2"), "default,again"),
        (("--num-steps", "2", "--arms", "active"), "active,again"),
        (("--arms", "active,active"), "active,again"),
    ],
)
def test_words_that_are_offered_are_accepted(
    capsys: Capture,
    host: Host,
    measured: Callable[..., None],
    words: tuple[str, ...],
    offered: str,
) -> None:
    save_candidate(FAST)
    activate("fast", reason="manual")
    command = host.command()

    found = refused(capsys, *words, "--json", "--", *command)

    assert found[1] == "same_arms"
    assert found[2].endswith(f"give --arms {offered}")
    measured(*mirrored((offered.split(",")[0], 9.8), ("again", 9.8)))
    envelope = envelope_of(capsys, "verify", "--arms", offered, "--json", "--", *command)
    assert envelope["errors"] == []


@pytest.mark.parametrize("options", [(), ("--num-steps", "2,5")], ids=" ".join)
@pytest.mark.parametrize("is_file", [False, True])
def test_a_refusal_names_the_arm_as_it_was_typed(
    capsys: Capture, host: Host, tmp_path: Path, options: tuple[str, ...], is_file: bool
) -> None:
    word = "fast"
    save_candidate(FAST)
    if is_file:
        word = str(tmp_path / "other.json")
        Path(word).write_text(format_profile(FAST))
        Path(word).chmod(0o600)
    arms = word if options else f"default,{word}"

    found = refused(capsys, "--arms", arms, *options, "--json", "--", *host.command(tp=1))

    assert found[1] == "profile_not_used"
    assert found[2].startswith(f"arm {word}: ")


@pytest.mark.parametrize("key", ["ses\u00e4me", "two\nlines"])
def test_a_key_that_is_none_is_refused(capsys: Capture, monkeypatch: Patch, key: str) -> None:
    monkeypatch.setenv("NCCLTUNE_API_KEY", key)

    found = refused(capsys, "--url", "http://127.0.0.1:9", "--json")

    assert found[:2] == (2, "bad_value")
    assert key not in found[2]


def test_url_takes_the_key_from_the_environment(
    capsys: Capture, host: Host, tmp_path: Path, monkeypatch: Patch
) -> None:
    with running_server(tmp_path, "--api-key", "sesame") as server:
        words = (*QUICK[:4], "--url", server.url, "--json")
        without = refused(capsys, *words)
        monkeypatch.setenv("NCCLTUNE_API_KEY", "sesame\n")
        envelope = envelope_of(capsys, "verify", *words)

    assert without[:2] == (8, "wants_key")
    assert "NCCLTUNE_API_KEY" in without[2]
    assert [run["tokens"] for run in runs_of(envelope)] == [20]
    assert "sesame" not in json.dumps(envelope)


def test_a_port_in_use_is_refused_before_anything_starts(capsys: Capture, host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = refused(capsys, *SAME, "--json", "--", *host.command(port=port))

    assert found[:2] == (9, "port_in_use")
    assert str(port) in found[2]
    assert host.processes() == []
