"""Whole verifies of the stand-in server: real process trees, real requests, real ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccltune import atomic
from nccltune.bench import gpu_watch
from nccltune.bench.host_lock import LOCK_NAME, SEARCH, host_lock, host_lock_path
from nccltune.cli import sources
from nccltune.errors import (
    BusyError,
    ExitCode,
    FileError,
    HostError,
    NccltuneError,
    ServerError,
    UsageProblem,
)
from nccltune.host.facts import HostFacts
from nccltune.host.fingerprint import Fingerprint
from nccltune.host.hardware import ForeignProcess, GpuProcess
from nccltune.store import activate, read_launch_records, save_candidate
from nccltune.verify import record as records
from nccltune.verify.engine import run_verify, stored_boot_s
from nccltune.verify.model import RankState, Seen
from nccltune.verify.record import VerifyRecord, load, newest_records, save, verifies_dir
from nccltune.verify.serving import boots, memory, preflight
from nccltune.verify.serving import seen as seen_module
from nccltune.verify.spec import VerifyProgress, VerifySpec, VerifyStage
from tests.support.hosts import REPOSITORY
from tests.support.launching import is_alive, wait_for
from tests.support.standin_sglang.program import free_port, running_server
from tests.support.verifying import FOLK, Watcher, make_spec, processes_of

FINGERPRINT = Fingerprint(("H200",), ("GPU-1",), "580.1", "2.28.9", (("X",),), (0,), 1)


def stored() -> VerifyRecord:
    """The one verify on disk."""
    (record,) = newest_records()
    return record


def assert_nothing_is_left(folder: Path) -> None:
    wait_for(lambda: not [one for one in processes_of(folder) if is_alive(int(str(one["pid"])))])


def ranks_of_boot(folder: Path, boot: int, *, tp: int = 2) -> list[dict[str, Any]]:
    ranks = [one for one in processes_of(folder) if one["role"] == "rank"]
    return ranks[boot * tp : (boot + 1) * tp]


# --- a whole verify


def test_every_boot_is_a_server_of_its_own_in_mirrored_order(tmp_path: Path) -> None:
    watcher = Watcher()

    record = run_verify(make_spec(tmp_path), watcher)

    assert [boot.arm for boot in record.boots] == ["default", "folk", "folk", "default"]
    assert [boot.position for boot in record.boots] == [0, 1, 2, 3]
    assert all(len(boot.runs) == 2 and boot.start_s > 0.0 for boot in record.boots)
    assert [run.tokens for boot in record.boots for run in boot.runs] == [20] * 8
    assert record.is_finished
    assert not record.problems
    assert len({one["pid"] for one in processes_of(tmp_path) if one["role"] == "parent"}) == 4
    finished = [progress for progress in watcher.told if progress.boot is not None]
    assert [progress.boot for progress in finished] == list(record.boots)
    assert {progress.stage for progress in watcher.told} == set(VerifyStage)
    assert_nothing_is_left(tmp_path)


def test_verify_is_on_disk_as_it_is_returned(tmp_path: Path) -> None:
    record = run_verify(make_spec(tmp_path), Watcher())

    kept = load(verifies_dir() / f"{record.id}.json")

    assert [boot.arm for boot in kept.boots] == [boot.arm for boot in record.boots]
    assert kept.boots[0].seen == record.boots[0].seen
    assert kept.boots[0].ms_per_verify == pytest.approx(record.boots[0].ms_per_verify, rel=1e-4)
    assert replace(kept, boots=()) == replace(record, boots=())
    assert not (verifies_dir() / f"{record.id}.logs").exists()


def test_arms_differ_in_the_profile_and_what_the_operator_has_set_stays(tmp_path: Path) -> None:
    record = run_verify(make_spec(tmp_path, environ={"NCCL_PROTO": "Simple"}), Watcher())

    default, folk = ranks_of_boot(tmp_path, 0), ranks_of_boot(tmp_path, 1)
    assert {rank["environ"].get("NCCL_ALGO") for rank in default} == {None}
    assert {rank["environ"].get("NCCL_ALGO") for rank in folk} == {"Ring"}
    assert {rank["environ"]["NCCL_PROTO"] for rank in (*default, *folk)} == {"Simple"}
    assert any("folk: NCCL_PROTO=Simple is the operator's" in note for note in record.notes)


def test_profile_is_seen_in_every_rank_and_no_active_one_in_the_default_arm(
    tmp_path: Path,
) -> None:
    environ = {"NCCL_PROTO": "LL", "NCCLTUNE_APPLIED": "0123456789abcdef:NCCL_PROTO"}

    record = run_verify(make_spec(tmp_path, environ=environ), Watcher())

    default, folk = record.boots[0].seen, record.boots[1].seen
    assert default.ranks == {"TP0": {}, "TP1": {}}
    assert {rank["environ"].get("NCCL_PROTO") for rank in ranks_of_boot(tmp_path, 0)} == {None}
    both = {"NCCL_ALGO": RankState.IN_EFFECT, "NCCL_PROTO": RankState.IN_EFFECT}
    assert folk.ranks == {"TP0": both, "TP1": both}
    assert folk.is_nccl_on_path
    assert folk.version == "0.5.15.post1"
    assert folk.server_info["speculative_num_steps"] == 2
    assert not folk.is_simulated_acceptance


def test_hook_brings_no_active_profile_into_an_arm(tmp_path: Path) -> None:
    save_candidate(FOLK)
    activate(FOLK.name, reason="manual")
    hooked = hook_site(tmp_path)
    with running_server(tmp_path, environ={**os.environ, **hooked}) as server:
        ranks = [one for one in server.records() if one["role"] == "rank"]
        assert all("NCCL_PROTO" in str(rank["environ"]) for rank in ranks)  # it does its work

    run_verify(make_spec(tmp_path, arms=["default", "again"], environ=hooked), Watcher())

    ranks = [one for one in processes_of(tmp_path) if one["role"] == "rank"]
    assert len(ranks) == 8
    assert not any("NCCL_PROTO" in str(rank["environ"]) for rank in ranks)


def hook_site(folder: Path) -> dict[str, str]:
    """Install the hook where the server's interpreter looks."""
    made = folder / "site" / "nccltune_hook-9.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: nccltune-hook\nVersion: 9\n")
    (made / "entry_points.txt").write_text("[sglang.srt.plugins]\nnccltune = nccltune_hook:load\n")
    return {"PYTHONPATH": f"{REPOSITORY / 'hook'}:{made.parent}"}


def test_setting_that_one_rank_lost_is_seen_there(tmp_path: Path) -> None:
    wishes = {"lose": "NCCL_PROTO", "lose_rank": "1"}

    record = run_verify(make_spec(tmp_path, wishes=wishes), Watcher())

    assert record.boots[1].seen.ranks["TP0"]["NCCL_PROTO"] is RankState.IN_EFFECT
    assert record.boots[1].seen.ranks["TP1"]["NCCL_PROTO"] is RankState.LOST


def test_simulated_acceptance_is_seen(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, environ={"SGLANG_SIMULATE_ACC_LEN": "2"})

    assert run_verify(spec, Watcher()).boots[0].seen.is_simulated_acceptance


def test_launches_are_on_record_under_the_servers_own_process(tmp_path: Path) -> None:
    run_verify(make_spec(tmp_path), Watcher())

    parents = [one["pid"] for one in processes_of(tmp_path) if one["role"] == "parent"]
    records = read_launch_records()
    assert [record.pid for record in records] == parents
    assert {record.route for record in records} == {"verify"}
    assert [record.profile_name for record in records] == [None, "folk", "folk", None]


def test_steps_and_plain_decoding_are_started_as_asked(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, arms=["no-speculation"], num_steps=[5, 2])

    record = run_verify(spec, Watcher())

    names = ["no speculation", "5 steps", "2 steps"]
    assert [boot.arm for boot in record.boots] == [*names, *reversed(names)]
    steps = [boot.seen.server_info["speculative_num_steps"] for boot in record.boots[:3]]
    assert steps == [None, 5, 2]
    assert record.boots[0].runs[0].streams[0].verify_count is None
    assert record.boots[1].runs[0].streams[0].verify_count


def test_verify_ends_with_the_round_that_decides(tmp_path: Path) -> None:
    asked: list[int] = []

    def decide(record: VerifyRecord) -> bool:
        asked.append(len(record.boots))
        return True

    record = run_verify(make_spec(tmp_path, boots=4, is_decided=decide), Watcher())

    assert asked == [4]
    assert len(record.boots) == 4
    assert record.is_finished


def test_time_left_is_known_from_earlier_verifies(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    assert stored_boot_s(spec.launch) is None
    run_verify(spec, Watcher())

    boot_s = stored_boot_s(spec.launch)

    assert boot_s is not None
    assert stored().boots[0].start_s * 0.2 < boot_s < 15.0
    assert stored_boot_s((*spec.launch, "--tokenizer-mode", "auto")) is None


def test_time_left_is_looked_for_among_the_newest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(tmp_path)
    run_verify(spec, Watcher())
    old = stored()
    for idx in range(25):
        save(replace(old, id=f"2027-{idx:02d}", launch=("sglang", "serve", "other")))
    loaded: list[Path] = []

    def note(path: Path) -> VerifyRecord:
        loaded.append(path)
        return load(path)

    monkeypatch.setattr(records, "load", note)

    assert stored_boot_s(spec.launch) is None
    assert len(loaded) == 20
    assert stored_boot_s(("sglang", "serve", "other")) is not None
    assert len(loaded) == 21


# --- refused before anything is started


def check_refused(folder: Path, spec: VerifySpec, error: type[NccltuneError]) -> NccltuneError:
    with pytest.raises(error) as caught:
        run_verify(spec, Watcher())
    assert processes_of(folder) == []
    assert not list(newest_records())
    return caught.value


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_port_in_use_is_refused(tmp_path: Path, host: str) -> None:
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        spec = make_spec(tmp_path, port=taken.getsockname()[1])

        error = check_refused(tmp_path, spec, BusyError)

    assert error.code == "port_in_use"
    assert f"port {spec.launch[spec.launch.index('--port') + 1]} is in use" in str(error)


def test_port_that_somebody_holds_without_answering_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        spec = make_spec(tmp_path, port=taken.getsockname()[1])

        assert check_refused(tmp_path, spec, BusyError).exit_code is ExitCode.BUSY


@pytest.mark.parametrize("flag", ["--model-path", "--speculative-draft-model-path"])
def test_model_that_is_not_there_is_refused(tmp_path: Path, flag: str) -> None:
    spec = make_spec(tmp_path)
    place = spec.launch.index(flag) + 1
    Path(spec.launch[place], "config.json").unlink()
    Path(spec.launch[place]).rmdir()

    error = check_refused(tmp_path, spec, FileError)

    assert error.code == "no_model"
    assert str(error).startswith(spec.launch[place])
    assert flag in str(error)


def test_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    launch = ("/nowhere/python", *spec.launch[1:])
    arms = tuple(replace(arm, argv=launch) for arm in spec.arms)

    error = check_refused(tmp_path, replace(spec, launch=launch, arms=arms), ServerError)

    assert error.code == "cannot_start"


def test_profile_that_would_not_be_used_is_refused(tmp_path: Path) -> None:
    error = check_refused(tmp_path, make_spec(tmp_path, tp=1), UsageProblem)

    assert error.code == "profile_not_used"
    assert str(error).startswith("arm folk: ")
    assert "--any-host" in str(error)

    record = run_verify(make_spec(tmp_path, tp=1, is_any_host=True), Watcher())
    assert record.boots[1].seen.is_nccl_on_path is False
    assert "tensor parallel size 1" in record.boots[1].seen.path_reason


def test_search_and_verify_keep_each_other_out(tmp_path: Path) -> None:
    assert host_lock_path() == sources.study_path("any").parent / LOCK_NAME
    with host_lock(host_lock_path(), SEARCH):
        error = check_refused(tmp_path, make_spec(tmp_path), BusyError)
    assert error.code == "search_running"

    def search(_progress: VerifyProgress) -> None:
        with pytest.raises(BusyError, match=r"a verify \(process \d+\) is running") as caught:
            sources.check_idle()
        assert caught.value.code == "verify_running"

    run_verify(make_spec(tmp_path), Watcher(search))


# --- a boot that fails


def test_server_that_dies_in_its_start_ends_the_verify_with_earlier_boots_kept(
    tmp_path: Path,
) -> None:
    wishes = {"fail": "nccl_init", "fail_if": "NCCL_PROTO=LL"}
    spec = make_spec(tmp_path, wishes=wishes)

    record = run_verify(spec, Watcher())

    (problem,) = record.problems
    assert problem.code == "server_died"
    assert problem.position == 1
    assert problem.message.startswith("boot 2 of 4 (arm folk): the server died")
    assert "NCCL error" in problem.message
    assert "NCCL error" in Path(problem.log_path).read_text()
    assert [boot.arm for boot in stored().boots] == ["default"]
    assert not record.is_finished
    assert_nothing_is_left(tmp_path)


def test_resume_goes_on_with_the_boot_that_failed(tmp_path: Path) -> None:
    port = free_port()
    wishes = {"fail": "nccl_init", "fail_if": "NCCL_PROTO=LL"}
    stopped = run_verify(make_spec(tmp_path, port=port, wishes=wishes), Watcher())

    record = run_verify(make_spec(tmp_path, port=port, is_resume=True), Watcher())

    assert record.id == stopped.id
    assert record.boots[0] == stored().boots[0]
    assert [boot.position for boot in record.boots] == [0, 1, 2, 3]
    assert record.is_finished
    assert not record.problems


def test_resume_with_fewer_boots_than_planned_is_refused_and_loses_none(tmp_path: Path) -> None:
    port = free_port()

    def stop(progress: VerifyProgress) -> None:
        if progress.position == 3 and progress.stage is VerifyStage.START:
            raise KeyboardInterrupt

    parts = {"port": port, "boots": 4}
    stopped = run_verify(make_spec(tmp_path, **parts), Watcher(stop))  # type: ignore[arg-type]
    resumed = make_spec(tmp_path, **parts, is_resume=True)  # type: ignore[arg-type]
    before, servers = stored(), len(processes_of(tmp_path))
    assert len(before.boots) == 3

    with pytest.raises(UsageProblem, match=r"begun with 4 boots an arm.* give --boots 4") as no:
        run_verify(replace(resumed, boots=2), Watcher())

    assert no.value.exit_code == 2
    assert stored() == before
    assert len(processes_of(tmp_path)) == servers
    assert run_verify(resumed, Watcher()).id == stopped.id


def test_resume_without_a_number_makes_as_many_boots_as_were_planned(tmp_path: Path) -> None:
    port = free_port()

    def stop(progress: VerifyProgress) -> None:
        if progress.position == 3 and progress.stage is VerifyStage.START:
            raise KeyboardInterrupt

    run_verify(make_spec(tmp_path, port=port, boots=2), Watcher(stop))
    begun: list[VerifyRecord] = []
    resumed = make_spec(tmp_path, port=port, is_resume=True)

    record = run_verify(replace(resumed, boots=None, on_begin=begun.append), Watcher())

    assert [(len(one.boots), one.boots_planned) for one in begun] == [(3, 2)]
    assert len(record.boots) == record.boot_total == 4


def test_resume_of_boots_that_nobody_judged_starts_nothing(tmp_path: Path) -> None:
    parts = {"port": free_port()}
    whole = run_verify(make_spec(tmp_path, **parts), Watcher())  # type: ignore[arg-type]
    servers = len(processes_of(tmp_path))
    resumed = make_spec(tmp_path, **parts, is_resume=True)  # type: ignore[arg-type]

    record = run_verify(resumed, Watcher())

    assert (record.id, record.boots, record.is_finished) == (whole.id, stored().boots, True)
    assert len(processes_of(tmp_path)) == servers
    save(replace(record, judgement={"verdict": "inconclusive"}))
    with pytest.raises(FileError, match="no verify to resume"):
        run_verify(resumed, Watcher())


def test_resume_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    port = free_port()
    spec = make_spec(tmp_path, port=port, is_resume=True)
    with pytest.raises(FileError, match="no verify to resume"):
        run_verify(spec, Watcher())
    run_verify(make_spec(tmp_path, port=port, wishes={"fail": "die_loading"}), Watcher())

    with pytest.raises(FileError, match=r"another verify \(load differ\)") as caught:
        run_verify(replace(spec, load=replace(spec.load, tokens=30)), Watcher())

    assert caught.value.code == "other_verify"
    others = make_spec(tmp_path, port=port, arms=["folk", "default"], is_resume=True)
    with pytest.raises(FileError, match=r"\(arms differ\)"):
        run_verify(others, Watcher())
    elsewhere = make_spec(tmp_path, port=port, environ={"NCCL_DEBUG": "INFO"}, is_resume=True)
    with pytest.raises(FileError, match=r"\(NCCL and CUDA variables in the environment differ\)"):
        run_verify(elsewhere, Watcher())


def with_config(folder: Path, text: str) -> tuple[str, ...]:
    """Flags of a launch that reads some of them from a file."""
    path = folder / "flags.yaml"
    path.write_text(text)
    return ("--config", str(path))


def test_resume_after_an_edit_of_the_config_file_is_refused(tmp_path: Path) -> None:
    port, flags = free_port(), with_config(tmp_path, "mem-fraction-static: 0.8\n")
    run_verify(make_spec(tmp_path, *flags, port=port, wishes={"fail": "die_loading"}), Watcher())
    flags = with_config(tmp_path, "mem-fraction-static: 0.7\nstream-interval: 2\n")

    with pytest.raises(FileError) as caught:
        run_verify(make_spec(tmp_path, *flags, port=port, is_resume=True), Watcher())

    assert caught.value.code == "other_verify"
    assert "--mem-fraction-static (was 0.8, is 0.7)" in str(caught.value)
    assert "--stream-interval (was not given, is 2)" in str(caught.value)


def test_resume_with_another_sglang_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    run_verify(make_spec(tmp_path, port=port, wishes={"fail": "die_loading"}), Watcher())
    assert stored().sglang_version == "0.5.15.post1"
    monkeypatch.setattr(preflight, "installed_version", lambda *_: "0.6.0")

    with pytest.raises(FileError, match=r"SGLang \(was 0.5.15.post1, is 0.6.0\) differ"):
        run_verify(make_spec(tmp_path, port=port, is_resume=True), Watcher())


def test_config_file_that_is_edited_meanwhile_ends_the_verify(tmp_path: Path) -> None:
    flags = with_config(tmp_path, "mem-fraction-static: 0.8\n")

    def edit(progress: VerifyProgress) -> None:
        if progress.boot is not None:
            with_config(tmp_path, "mem-fraction-static: 0.7\n")

    record = run_verify(make_spec(tmp_path, *flags), Watcher(edit))

    (problem,) = record.problems
    assert (problem.code, problem.position) == ("launch_changed", 1)
    assert "--mem-fraction-static (was 0.8, is 0.7)" in problem.message
    assert [boot.arm for boot in stored().boots] == ["default"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.6.0"}, "SGLang is 0.6.0, and was 0.5.15.post1"),
        ({"server_info": {"speculative_num_steps": 7}}, "speculative_num_steps 7, and said 2"),
    ],
)
def test_server_that_is_another_one_ends_the_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    looks: list[object] = []

    def look(*words: Any) -> Seen:
        seen = seen_module.look(*words)
        looks.append(seen)
        if len(looks) < 4:
            return seen
        info = {**seen.server_info, **change.get("server_info", {})}
        return replace(seen, **{**change, "server_info": info})

    monkeypatch.setattr(boots, "look", look)

    record = run_verify(make_spec(tmp_path), Watcher())

    (problem,) = record.problems
    assert (problem.code, problem.position) == ("server_changed", 3)
    assert said in problem.message
    assert len(record.boots) == len(stored().boots) == 3


# --- what stands in the way between boots


def test_port_that_is_taken_between_boots_stops_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boots, "PORT_FREE_LIMIT_S", 0.2)
    port = free_port()
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def take(progress: VerifyProgress) -> None:
            if progress.boot is not None:
                taker.bind(("127.0.0.1", port))
                taker.listen()

        record = run_verify(make_spec(tmp_path, port=port), Watcher(take))

    assert record.stopped is not None
    assert (record.stopped.code, record.problems) == ("port_in_use", ())
    assert [boot.arm for boot in record.boots] == ["default"]
    assert not stored().is_finished

    resumed = run_verify(make_spec(tmp_path, port=port, is_resume=True), Watcher())

    assert resumed.stopped is None
    assert resumed.boots[0] == stored().boots[0]
    assert resumed.is_finished


def test_disk_that_is_full_after_a_boot_stops_with_the_boots_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, text: str) -> None:
        if text.count('"started_at"') > 1:
            raise FileError(path, "cannot be written (No space left on device)", code="disk_full")
        atomic.write_atomic(path, text)

    monkeypatch.setattr(records, "write_atomic", write)

    record = run_verify(make_spec(tmp_path), Watcher())

    assert record.stopped is not None
    assert record.stopped.code == "disk_full"
    assert len(stored().boots) == 1
    assert_nothing_is_left(tmp_path)


# --- words of every kind


def test_word_that_is_no_text_is_kept_escaped_and_resume_knows_it(tmp_path: Path) -> None:
    port, flags = free_port(), ("--served-model-name", "m\udcff")
    environ = {"NCCL_DEBUG_FILE": "/tmp/\udcfe"}
    failing = make_spec(
        tmp_path, *flags, port=port, environ=environ, wishes={"fail": "die_loading"}
    )

    run_verify(failing, Watcher())

    assert stored().launch[-1] == "m\\xff"
    assert stored().environ["NCCL_DEBUG_FILE"] == "/tmp/\\xfe"
    again = make_spec(tmp_path, *flags, port=port, environ=environ, is_resume=True)
    assert run_verify(again, Watcher()).is_finished


@pytest.mark.parametrize("words", [("--api-key", "sesame"), ("--api-key=sesame",)])
def test_key_of_the_launch_is_in_nothing_that_is_kept(tmp_path: Path, words: list[str]) -> None:
    home = verifies_dir().parent
    for wishes in ({}, {"answer": "http_500"}):
        run_verify(make_spec(tmp_path, *words, wishes=wishes), Watcher())

    kept = [path.read_text() for path in home.rglob("*.json*") if path.is_file()]
    assert any("***" in text for text in kept)
    assert not any("sesame" in text for text in kept)


def test_answer_that_is_not_as_asked_gives_no_number(tmp_path: Path) -> None:
    record = run_verify(make_spec(tmp_path, wishes={"answer": "fewer_tokens"}), Watcher())

    (problem,) = record.problems
    assert problem.code == "fewer_tokens"
    assert "boot 1 of 4 (arm default)" in problem.message
    assert record.boots == ()
    assert_nothing_is_left(tmp_path)


def test_server_that_stalls_in_its_start_is_ended(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, wishes={"fail": "stall_capture"})
    limits = replace(spec.limits, stall_timeout_s=1.0)

    record = run_verify(replace(spec, limits=limits), Watcher())

    assert record.problems[0].code == "stalled"
    assert "graph capture" in record.problems[0].message
    assert_nothing_is_left(tmp_path)


# --- nothing is left


def test_server_that_ignores_signals_and_its_strays_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boots, "STOP_GRACE_S", 0.3)
    stray = tmp_path / "stray"
    spec = make_spec(tmp_path, wishes={"ignore_term": "1", "stray": str(stray)})

    record = run_verify(spec, Watcher())

    assert record.is_finished
    assert not is_alive(int(stray.read_text()))
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("stage", [VerifyStage.START, VerifyStage.MEASURE])
def test_ctrl_c_ends_the_server_and_keeps_the_boots(tmp_path: Path, stage: VerifyStage) -> None:
    def press(progress: VerifyProgress) -> None:
        is_starting = progress.moment is not None and progress.moment.waited.elapsed_s > 0.2
        is_now = stage is VerifyStage.MEASURE or is_starting
        if progress.position == 1 and progress.stage is stage and is_now:
            raise KeyboardInterrupt

    record = run_verify(make_spec(tmp_path), Watcher(press))

    assert record.is_interrupted
    assert len(stored().boots) == 1
    assert not stored().is_interrupted
    assert_nothing_is_left(tmp_path)


def watch_memory(monkeypatch: pytest.MonkeyPatch, read: Callable[[object], dict[str, int]]) -> None:
    facts = HostFacts(FINGERPRINT, "sm90")
    monkeypatch.setattr(preflight, "host_of", lambda *_: (facts, ""))
    monkeypatch.setattr(memory, "read_memory_used_bytes", read)
    monkeypatch.setattr(memory, "read_foreign_processes", lambda *_: [])
    monkeypatch.setattr(gpu_watch, "MEMORY_RETURN_DEADLINE_S", 0.4)


def test_memory_that_comes_back_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[int] = []

    def read(_uuids: object) -> dict[str, int]:
        # Before, after, a moment later: each boot holds its memory for one reading.
        readings.append([0, 8 << 30, 0][len(readings) % 3])
        return {"GPU-1": readings[-1]}

    watch_memory(monkeypatch, read)

    record = run_verify(make_spec(tmp_path), Watcher())

    assert record.is_finished
    assert len(readings) == 12
    assert record.fingerprint == FINGERPRINT
    assert not any("not watched" in note for note in record.notes)


def test_memory_that_does_not_come_back_stops_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[int] = []

    def read(_uuids: object) -> dict[str, int]:
        readings.append(8 << 30 if readings else 0)
        return {"GPU-1": readings[-1]}

    watch_memory(monkeypatch, read)

    record = run_verify(make_spec(tmp_path), Watcher())

    assert isinstance(record.stopped, HostError)
    assert record.stopped.code == "gpu_memory_held"
    assert "8192 MiB did not come back on GPU GPU-1" in str(record.stopped)
    assert len(stored().boots) == len(record.boots) == 1


def test_somebody_else_on_the_gpus_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_memory(monkeypatch, lambda _uuids: {"GPU-1": 0})
    other = ForeignProcess("GPU-1", GpuProcess(4711, None))
    monkeypatch.setattr(memory, "read_foreign_processes", lambda *_: [other])

    record = run_verify(make_spec(tmp_path), Watcher())

    assert any("process 4711 computes on GPU GPU-1" in note for note in record.notes)


def test_without_a_driver_memory_is_not_watched_and_that_is_said(tmp_path: Path) -> None:
    record = run_verify(make_spec(tmp_path), Watcher())

    assert record.fingerprint is None
    assert any(note.startswith("GPU memory is not watched") for note in record.notes)
