"""The service against real processes: what it publishes, sees, tells and rolls back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from nccltune.inject.marker import MARKER
from nccltune.live.procfs import read_environ
from nccltune.live.scanner import find_servers
from nccltune.profile import Profile
from nccltune.store import activate, deactivate, profiles_dir, read_active, save_candidate
from tests.support.service import (
    NCCLTUNE,
    PYTHONPATH,
    Daemon,
    ask_metrics,
    run_command,
    running_daemon,
    started,
    wait_for,
)
from tests.support.standin_sglang.program import free_port, serve_command, wait_until_up

OLDER = {"NCCL_PROTO": "allreduce:Simple"}
SETTINGS = {"NCCL_ALGO": "allreduce:ring", "NCCL_NTHREADS": "256"}
UNDER_PROFILE = "NCCL_ALGO"


@pytest.fixture(autouse=True)
def profiles() -> None:
    save_candidate(Profile("older", OLDER))
    save_candidate(Profile("mine", SETTINGS))
    activate("older", reason="manual")
    activate("mine", reason="manual")


def fail(
    folder: Path, daemon: Daemon, command: list[str], *, times: int = 1, **wishes: str
) -> list[str]:
    """Start a server that dies, until the service knows how some of them did; return the words.

    A stand-in may die before a busy machine lets the service look, and is not judged then: the
    service says so where the start is on record, and says nothing of one typed by hand.
    """
    endings: list[str] = []
    while len(endings) < times:
        with started(folder, command, wishes) as process:
            process.wait(30)
        head = f"start failed: pid={process.pid} ending="
        missed = f"before it was looked at: pid={process.pid}\n"
        is_told = partial(daemon.has_logged, head, missed)
        if "nccltune" in command:
            wait_for(is_told, "the end of a start is told")
        else:
            with suppress(AssertionError):
                wait_for(is_told, "the end of a start is told", 5.0)
        if daemon.has_logged(head):
            endings.append(daemon.log().partition(head)[2].split()[0])
    return endings


def test_service_publishes_tells_systemd_and_ends_cleanly(tmp_path: Path) -> None:
    watchdog = {"WATCHDOG_USEC": "900000"}
    with running_daemon(tmp_path, environ=watchdog, interval_s=600.0) as daemon:
        env = daemon.env()
        assert {name: env[name] for name in SETTINGS} == SETTINGS
        assert env["SPT_NOENV"] == "1"
        assert MARKER in env
        assert daemon.data()["active"]["name"] == "mine"
        wait_for(lambda: daemon.manager.heard("WATCHDOG=1"), "a sign of life")
        assert daemon.manager.heard("STATUS=mine")
        wait_for(lambda: "nccltune_profile_active 1" in daemon.metrics(), "it is said")

        assert daemon.stop() == 0
        assert daemon.manager.heard("STOPPING=1")
    assert not (daemon.run_folder / "metrics.sock").exists()


def test_service_notices_every_step_of_the_store_by_itself(tmp_path: Path) -> None:
    with running_daemon(tmp_path, interval_s=600.0) as daemon:
        activate("older", reason="manual")
        wait_for(lambda: daemon.data()["active"]["name"] == "older", "the activation is published")
        assert daemon.env()["NCCL_PROTO"] == "allreduce:Simple"
        deactivate()
        wait_for(lambda: daemon.data()["active"]["name"] is None, "the end of it is published")
        assert daemon.env() == {}


def _truncate(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8")[:50], encoding="utf-8")


@pytest.mark.parametrize("harm", [Path.unlink, _truncate], ids=["deleted", "truncated"])
def test_service_says_when_the_profile_comes_to_harm_and_when_it_is_back(
    tmp_path: Path, harm: object
) -> None:
    path = profiles_dir() / "mine.json"
    text = path.read_text(encoding="utf-8")
    with running_daemon(tmp_path, interval_s=600.0) as daemon:
        harm(path)  # type: ignore[operator]
        wait_for(lambda: daemon.data()["active"]["is_degraded"], "the harm is published")
        assert daemon.env() == {}
        wait_for(
            lambda: "cannot be used, and servers start without one: profile=mine" in daemon.log(),
            "it is said",
        )
        wait_for(lambda: "nccltune_profile_degraded 1" in daemon.metrics(), "it is said")
        path.write_text(text, encoding="utf-8")
        wait_for(lambda: not daemon.data()["active"]["is_degraded"], "it is well again")


def test_service_reads_everything_again_on_sighup(tmp_path: Path) -> None:
    with running_daemon(tmp_path, interval_s=600.0) as daemon:
        before = daemon.metrics()
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "reading everything again" in daemon.log(), "the signal is taken")
        name = "nccltune_last_check_timestamp_seconds"
        line = next(line for line in before.splitlines() if line.startswith(name))
        wait_for(lambda: line not in daemon.metrics(), "a new look")
        assert daemon.process.poll() is None


def test_service_sees_a_tuned_server_from_start_to_end(tmp_path: Path) -> None:
    port = free_port()
    with running_daemon(tmp_path) as daemon:
        with started(tmp_path, run_command(port=port)) as process:
            wait_until_up(port, process)
            wait_for(
                lambda: daemon.server(process.pid).get("verdict") == "in_effect", "it is in effect"
            )
            server = daemon.server(process.pid)
            assert server["route"] == "run"
            assert [rank["rank"] for rank in server["ranks"]] == ["TP0", "TP1"]
            wait_for(lambda: f"start succeeded: pid={process.pid}" in daemon.log(), "it is ready")
            label = f'nccltune_rank_variables{{pid="{process.pid}",state="in_effect"}} 4'
            wait_for(lambda: label in daemon.metrics(), "it is said")
        wait_for(lambda: not daemon.server(process.pid), "its end is published")


def test_service_reports_drift_with_pid_rank_key_expected_and_actual(tmp_path: Path) -> None:
    port = free_port()
    wishes = {"lose": "NCCL_ALGO", "lose_rank": "1"}
    with (
        running_daemon(tmp_path) as daemon,
        started(tmp_path, run_command(port=port), wishes) as process,
    ):
        wait_until_up(port, process)
        wait_for(
            lambda: daemon.server(process.pid).get("verdict") == "not_in_effect", "it is noticed"
        )
        [_, second] = daemon.server(process.pid)["ranks"]
        line = (
            f"lost: pid={second['pid']} rank=TP1 key=NCCL_ALGO expected=allreduce:ring "
            "actual=(not set)"
        )
        wait_for(lambda: line in daemon.log(), "it is said")
        label = f'nccltune_rank_variables{{pid="{process.pid}",state="lost"}} 1'
        wait_for(lambda: label in daemon.metrics(), "it is said")


def test_service_never_touches_a_running_server(tmp_path: Path) -> None:
    port = free_port()
    with started(tmp_path, serve_command(port=port)) as process:
        wait_until_up(port, process)
        [server] = [each for each in find_servers() if each.pid == process.pid]
        before = {rank: read_environ(rank.process) for rank in server.ranks}
        with running_daemon(tmp_path) as daemon:
            wait_for(lambda: daemon.server(process.pid).get("ranks"), "it is seen")
            daemon.stop()
        assert {rank: read_environ(rank.process) for rank in server.ranks} == before
        assert process.poll() is None


def test_service_rolls_back_once_after_three_deaths_in_nccl(tmp_path: Path) -> None:
    command = run_command(port=free_port())
    with running_daemon(tmp_path) as daemon:
        fail(tmp_path, daemon, command, times=2, fail="nccl_init")
        assert read_active().name == "mine"
        wait_for(lambda: daemon.data()["failed_starts"]["count"] == 2, "both are counted")
    # What was seen is kept while the service is away.
    with running_daemon(tmp_path) as daemon:
        fail(tmp_path, daemon, command, fail="nccl_init")
        wait_for(lambda: read_active().name == "older", "the profile is rolled back")
        assert (read_active().how, read_active().action) == ("daemon", "rollback")
        wait_for(
            lambda: "ROLLED BACK after 3 failed starts: profile=mine now=older" in daemon.log(),
            "it is said",
        )
        wait_for(lambda: daemon.data()["active"]["name"] == "older", "it is published")
        wait_for(lambda: "nccltune_rollbacks 1" in daemon.metrics(), "it is said")
        activate("mine", reason="manual")
        wait_for(lambda: daemon.data()["active"]["name"] == "mine", "it is active again")
    with running_daemon(tmp_path) as daemon:
        fail(tmp_path, daemon, command, times=2, fail="nccl_init")
        assert read_active().name == "mine"
        assert "ROLLED BACK" not in daemon.log()


def test_service_reads_the_log_of_a_server_behind_launch(tmp_path: Path) -> None:
    command = [*NCCLTUNE, "launch", "--", *serve_command(port=free_port())]
    with running_daemon(tmp_path) as daemon:
        for _ in range(3):
            with started(tmp_path, command, {"fail": "nccl_init"}) as process:
                process.wait(30)
        wait_for(lambda: daemon.log().count("ending=nccl profile=mine") >= 1, "it is told")
        wait_for(lambda: "NCCL error" in daemon.log(), "it is said")


@pytest.mark.parametrize(("kind", "stall_s"), [("nccl_hang", "0.5"), ("stall_capture", "3")])
def test_service_rolls_back_for_starts_that_hang_in_nccl_behind_launch(
    tmp_path: Path, kind: str, stall_s: str
) -> None:
    limit = ["--stall-timeout-s", stall_s]
    command = [*NCCLTUNE, "launch", *limit, "--", *serve_command(port=free_port())]
    with running_daemon(tmp_path) as daemon:
        while read_active().name == "mine":
            assert daemon.log().count("ending=nccl profile=mine") <= 3
            with started(tmp_path, command, {"fail": kind}) as process:
                process.wait(60)
        wait_for(lambda: "ROLLED BACK after 3 failed starts" in daemon.log(), "it is told")


def stop_while_ranks_connect(folder: Path, daemon: Daemon, command: list[str]) -> None:
    """Start a server that does not get further, and stop it as an operator would."""
    log, seen, told = folder / "server.log", " server: pid=", "start failed: "
    seen_count, told_count = daemon.log().count(seen), daemon.log().count(told)
    with started(folder, command, {"fail": "nccl_hang"}) as process:
        wait_for(lambda: "Init torch distributed begin" in log.read_text(), "ranks connect")
        wait_for(lambda: daemon.log().count(seen) > seen_count, "it is seen")
        process.terminate()
        process.wait(60)
        wait_for(lambda: daemon.log().count(told) > told_count, "its end is told")


@pytest.mark.parametrize("route", ["run", "launch"])
def test_service_takes_no_stop_while_ranks_connect_for_a_failure(
    tmp_path: Path, route: str
) -> None:
    command = [*NCCLTUNE, route, "--", *serve_command(port=free_port())]
    with running_daemon(tmp_path) as daemon:
        for _ in range(3):
            stop_while_ranks_connect(tmp_path, daemon, command)

        assert daemon.data()["failed_starts"]["count"] == 0
        assert "ending=nccl" not in daemon.log()
    assert read_active().name == "mine"


@pytest.mark.parametrize("kind", ["oom_kv", "oom_capture", "killed_loading", "usage"])
def test_service_does_not_roll_back_for_what_is_not_nccls_doing(tmp_path: Path, kind: str) -> None:
    with running_daemon(tmp_path) as daemon:
        fail(tmp_path, daemon, run_command(port=free_port()), times=3, fail=kind)

        assert daemon.data()["failed_starts"]["count"] == 0
    assert read_active().name == "mine"


def test_service_that_comes_late_does_not_take_the_next_starts_log_for_this_ones(
    tmp_path: Path,
) -> None:
    port = free_port()
    first_wishes = {"fail": "oom_kv", "stage_s": "1"}
    with running_daemon(tmp_path) as daemon:
        with started(tmp_path, run_command(port=port), first_wishes) as first:
            wait_for(lambda: f"server: pid={first.pid} " in daemon.log(), "it is followed")
            daemon.process.send_signal(signal.SIGSTOP)
            first.wait(30)
        # As a script does that starts a server again and again into one file.
        with started(tmp_path, run_command(port=port), {"fail": "nccl_hang"}):
            log = tmp_path / "server.log"
            wait_for(lambda: "Init torch distributed begin" in log.read_text(), "the next begins")
            daemon.process.send_signal(signal.SIGCONT)
            head = f"start failed: pid={first.pid} ending="
            wait_for(lambda: head in daemon.log(), "its end is told")

    assert daemon.log().partition(head)[2].split()[0] == "unknown"


def test_service_does_not_roll_back_for_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = run_command(port=taken.getsockname()[1])
        with running_daemon(tmp_path) as daemon:
            assert fail(tmp_path, daemon, command, times=3) == ["port"] * 3
    assert read_active().name == "mine"


def test_service_does_not_roll_back_where_the_command_dies_without_the_profile_too(
    tmp_path: Path,
) -> None:
    port = free_port()
    # Nothing tells of a start by hand: it must live until it is seen, on a busy machine too.
    with running_daemon(tmp_path, interval_s=0.1) as daemon:
        bare = fail(tmp_path, daemon, serve_command(port=port), fail="nccl_init", stage_s="1")
        under = fail(tmp_path, daemon, run_command(port=port), times=3, fail="nccl_init")

        assert bare + under == ["nccl"] * 4
    assert read_active().name == "mine"


def test_service_rolls_back_for_a_crash_that_the_command_has_under_the_profile_alone(
    tmp_path: Path,
) -> None:
    port = free_port()
    wishes = {"fail": "segfault_loading", "fail_if": UNDER_PROFILE}
    with running_daemon(tmp_path) as daemon:
        fail(tmp_path, daemon, run_command(port=port), times=3, **wishes)
        assert read_active().name == "mine"
        # By hand, hence nothing tells of it: it must be seen before it says that it is ready.
        with started(tmp_path, serve_command(port=port), {**wishes, "stage_s": "0.5"}) as process:
            wait_until_up(port, process)
            wait_for(lambda: f"start succeeded: pid={process.pid}" in daemon.log(), "it is up")
        wait_for(lambda: read_active().name == "older", "the profile is rolled back")


def test_service_that_is_told_not_to_never_rolls_back(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--rollback-after", "0") as daemon:
        fail(tmp_path, daemon, run_command(port=free_port()), times=4, fail="nccl_init")

        wait_for(lambda: daemon.data()["failed_starts"]["count"] == 4, "all are counted")
    assert read_active().name == "mine"


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "never_there"])
def test_server_is_tuned_whatever_became_of_the_service(tmp_path: Path, is_killed: bool) -> None:
    if is_killed:
        with running_daemon(tmp_path) as daemon:
            daemon.stop(signal.SIGKILL)
    port = free_port()
    with started(tmp_path, run_command(port=port)) as process:
        wait_until_up(port, process)
        [server] = [each for each in find_servers() if each.pid == process.pid]
        for rank in server.ranks:
            values = read_environ(rank.process).values or {}
            assert {name: values.get(name) for name in SETTINGS} == SETTINGS


def test_service_that_was_killed_takes_over_where_it_was(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        daemon.stop(signal.SIGKILL)
    with running_daemon(tmp_path) as daemon:
        wait_for(lambda: "nccltune_profile_active 1" in daemon.metrics(), "it is said")
        assert "there are no metrics" not in daemon.log()


def test_service_takes_the_socket_that_systemd_opened(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.set_inheritable(True)
        script = (
            f"import os, sys; os.dup2({listener.fileno()}, 3); "
            "os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid())); "
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        wrapper = [sys.executable, "-c", script]
        with running_daemon(tmp_path, wrapper=wrapper) as daemon:
            assert "nccltune_profile_active 1" in ask_metrics(listener.getsockname())
            assert not (daemon.run_folder / "metrics.sock").exists()


def test_service_works_without_a_place_to_publish_and_without_metrics(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way", encoding="utf-8")
    with running_daemon(tmp_path) as daemon:
        wait_for(lambda: "nothing can be published" in daemon.log(), "it is said")
        wait_for(lambda: "there are no metrics" in daemon.log(), "it is said")
        fail(tmp_path, daemon, run_command(port=free_port()), times=3, fail="nccl_init")
        wait_for(lambda: read_active().name == "older", "it rolls back all the same")


def test_service_starts_before_there_is_any_state(tmp_path: Path) -> None:
    home = tmp_path / "no-state-yet"
    with running_daemon(tmp_path, environ={"NCCLTUNE_HOME": str(home)}) as daemon:
        assert daemon.data()["active"]["name"] is None
        os.environ["NCCLTUNE_HOME"] = str(home)
        save_candidate(Profile("first", SETTINGS))
        activate("first", reason="manual")
        wait_for(lambda: daemon.data()["active"]["name"] == "first", "the first profile is seen")


def test_service_says_when_the_folder_that_it_was_given_is_not_there(tmp_path: Path) -> None:
    home = tmp_path / "not-mounted"
    with running_daemon(tmp_path, environ={"NCCLTUNE_HOME": str(home)}) as daemon:
        active = daemon.data()["active"]
        assert active["is_degraded"]
        assert "names is not there" in active["problem"]
        assert f"ERROR: launches start without a profile: {home}: the state folder" in daemon.log()
        wait_for(lambda: "nccltune_profile_degraded 1" in daemon.metrics(), "it is said")
        home.mkdir()
        wait_for(lambda: not daemon.data()["active"]["is_degraded"], "the folder is seen")
        home.joinpath("nccltuned.lock").unlink(missing_ok=True)
        home.rename(tmp_path / "unmounted")
        wait_for(lambda: daemon.data()["active"]["is_degraded"], "the folder is missed")
        wait_for(lambda: "nccltune_profile_degraded 1" in daemon.metrics(), "it is said")


def test_service_loads_nothing_heavy() -> None:
    code = (
        "import sys, nccltuned.__main__, nccltuned.service; "
        "heavy = {'torch', 'optuna', 'numpy', 'rich', 'httpx', 'click', 'pynvml', 'yaml', "
        "'nccltune.search', 'nccltune.bench', 'subprocess', 'http', 'asyncio'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
