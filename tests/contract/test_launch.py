"""``nccltune launch`` in front of real processes: a stand-in server, and commands of any kind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nccltune.profile import Profile
from nccltune.store import activate, read_launch_records, save_candidate
from tests.support.hosts import REPOSITORY
from tests.support.launching import (
    WAIT_S,
    Finished,
    Launch,
    at_terminal,
    finish_launch,
    ignore_child_ends,
    ignore_hangup,
    is_alive,
    launching,
    service_manager,
    wait_for,
    zombies_of,
)
from tests.support.standin_sglang.program import (
    free_port,
    read_records,
    running_server,
    serve_command,
    standin_environ,
)

# Above the time that spawning takes on a busy machine.
SHORT = ("--stall-timeout-s", "2")


def wished(folder: Path, **wishes: str | float) -> dict[str, str]:
    """Return an environment with wishes, in which every process writes down what it has."""
    record = str(folder / "record.jsonl")
    return standin_environ(dict(os.environ), record=record, **wishes)


def launch_server(
    folder: Path, *options: str, port: int | None = None, **wishes: str | float
) -> Finished:
    argv = serve_command(port=port or free_port())
    return finish_launch(folder, *argv, options=options, environ=wished(folder, **wishes))


def server_pids(folder: Path) -> list[int]:
    return [int(str(entry["pid"])) for entry in read_records(folder / "record.jsonl")]


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


# A start that goes well.


def test_launch_shows_stages_says_ready_and_passes_the_end_through(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    with launching(tmp_path, *argv, environ=wished(tmp_path, stage_s=0.3)) as launch:
        data = launch.wait_ready()
        pid = data["pid"]
        assert is_alive(pid)
        done = launch.finish(signal.SIGTERM)

    stages = [each["stage"] for each in data["stages"]]
    assert stages == [
        "start",
        "server_args",
        "init_parallel",
        "weights",
        "draft_weights",
        "kv_cache",
        "capture_target",
        "capture_draft",
        "capture_draft",
        "warm_up",
        "ready",
    ]
    captured = next(each for each in data["stages"] if each["stage"] == "capture_target")
    assert (captured["subject"], captured["done"], captured["total"]) == ("target verify", 8, 8)
    assert captured["duration_s"] == pytest.approx(0.3, abs=0.25)
    assert data["url"] == f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"
    shown = "\n".join(done.own_lines)
    assert "loading weights" in shown
    assert "graph capture (target verify" in shown
    assert "ready on http://127.0.0.1:" in shown
    # SGLang ends itself by SIGKILL when it has drained its requests.
    assert done.exit_code == 137
    assert done.own_lines[-1] == "stopped by SIGTERM; the server ended (SIGKILL)"
    assert done.report["status"] == "ok"
    assert done.report["data"]["ending"] == "stopped"
    assert not any(map(is_alive, server_pids(tmp_path)))


@pytest.mark.parametrize(
    "wishes",
    [
        {"starting_s": 0.5},
        {"health_s": 1.0},
        {"quiet": 1},
        {"silence_s": 0.5},
        {"version": "0.5.23"},
        {"shards": 0},
    ],
    ids=lambda wishes: " ".join(wishes),
)
def test_launch_waits_for_a_server_that_is_slow_or_says_little(
    tmp_path: Path, wishes: dict[str, Any]
) -> None:
    argv = serve_command(port=free_port())
    environ = wished(tmp_path, **wishes)
    with launching(tmp_path, *argv, environ=environ) as launch:
        data = launch.wait_ready()
        launch.finish(signal.SIGTERM)

    assert data["ready_s"] >= max(wishes.get("starting_s", 0.0), wishes.get("health_s", 0.0))


def test_launch_of_a_script_learns_the_address_from_the_log(tmp_path: Path) -> None:
    port = free_port()
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\nexec {' '.join(serve_command(port=port))}\n")
    script.chmod(0o755)

    with launching(tmp_path, str(script), environ=wished(tmp_path)) as launch:
        data = launch.wait_ready()

    assert data["url"] == f"http://127.0.0.1:{port}"


def test_launch_of_a_script_that_hides_the_servers_log_finds_the_server(tmp_path: Path) -> None:
    port = free_port()
    argv = serve_command(port=port)
    script = f"{' '.join(argv)} >{tmp_path / 'server.log'} 2>&1; exit $?"

    with launching(tmp_path, *shell(script), environ=wished(tmp_path)) as launch:
        data = launch.wait_ready()

    assert data["url"] == f"http://127.0.0.1:{port}"


def test_launch_of_another_kind_of_program_is_left_alone(tmp_path: Path) -> None:
    options = ("--stall-timeout-s", "0.5", "--ready-timeout-s", "0.5")

    done = finish_launch(tmp_path, *shell("sleep 1.5; exit 4"), options=options)

    assert done.exit_code == 4


def test_launch_puts_the_profile_into_every_rank_and_on_record(tmp_path: Path) -> None:
    save_candidate(Profile("fast", {"NCCL_PROTO": "allreduce:LL", "NCCL_NTHREADS": "128"}))
    activate("fast", reason="manual")
    argv = serve_command(port=free_port())

    with launching(tmp_path, *argv, options=["--any-host"], environ=wished(tmp_path)) as launch:
        data = launch.wait_ready()
        ranks = [
            entry["environ"]
            for entry in read_records(tmp_path / "record.jsonl")
            if entry["role"] == "rank"
        ]
        (record,) = read_launch_records()
        assert is_alive(record.pid)

    assert len(ranks) == 2
    for environ in ranks:
        expected = {"NCCL_PROTO": "allreduce:LL", "NCCL_NTHREADS": "128", "SPT_NOENV": "1"}
        assert expected.items() <= environ.items()  # type: ignore[attr-defined]
        assert "NCCLTUNE_APPLIED" in environ  # type: ignore[operator]
    assert (record.route, record.profile_name, record.pid) == ("launch", "fast", data["pid"])
    assert record.started_ticks > 0
    assert data["profile"] == "fast"


# A start that fails.


@pytest.mark.parametrize(
    ("fail", "kind", "line", "code"),
    [
        ("usage", "usage", "error: unrecognized arguments: --no-such-flag", 2),
        ("nccl_init", "nccl", "NCCL error: unhandled system error", 137),
        ("die_loading", "exception", "ValueError: There is no safetensors file", 137),
        ("killed_loading", "killed", "scheduler died during initialization (exit code: -9)", 1),
        ("segfault_loading", "child", "scheduler died during initialization (exit code: -11)", 1),
        ("oom_kv", "memory", "Not enough memory. Please try to increase", 137),
        ("oom_capture", "memory", "Capture cuda graph failed: CUDA out of memory", 137),
        ("warmup", "warm_up", "TimeoutError: Read timed out", 137),
    ],
)
def test_launch_ends_at_once_with_the_telling_line_when_the_server_dies(
    tmp_path: Path, fail: str, kind: str, line: str, code: int
) -> None:
    done = launch_server(tmp_path, fail=fail)

    assert done.exit_code == code
    assert line in done.own_lines[-1]
    assert done.error["code"] == "server_died"
    assert line in done.error["message"]
    assert done.report["exit_code"] == code
    assert done.report["data"]["failure"]["kind"] == kind
    assert done.report["data"]["is_nccl_like"] is (kind == "nccl")
    assert done.report["data"]["elapsed_s"] < 10.0


def test_launch_ends_as_the_bare_command_does(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    environ = wished(tmp_path, fail="die_loading")
    bare = subprocess.run(argv, env=environ, capture_output=True, timeout=WAIT_S, check=False)

    assert finish_launch(tmp_path, *argv, environ=environ).exit_code == 128 - bare.returncode


@pytest.mark.parametrize(
    ("wishes", "where", "is_nccl_like"),
    [
        (
            {"fail": "stall_capture", "stall_at": 3},
            "stalled in graph capture (target verify, 3 of 8)",
            True,
        ),
        ({"fail": "nccl_hang"}, "stalled in connecting ranks", True),
        ({"silence_s": 60}, "stalled in loading weights", False),
        ({"fail": "never_up"}, "stalled in warm-up", True),
    ],
    ids=["capture", "nccl", "silence", "503"],
)
def test_launch_ends_a_server_that_gets_nowhere_and_names_both_limits(
    tmp_path: Path, wishes: dict[str, Any], where: str, is_nccl_like: bool
) -> None:
    done = launch_server(tmp_path, *SHORT, "--ready-timeout-s", "50", **wishes)

    assert done.exit_code == 124
    assert done.error["code"] == "stalled"
    assert done.error["message"].startswith(f"{where}: no progress for ")
    assert "(--stall-timeout-s 2)" in done.error["message"]
    assert "--ready-timeout-s 50" in done.error["message"]
    assert done.report["data"]["is_nccl_like"] is is_nccl_like
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_ends_a_server_that_makes_progress_for_ever(tmp_path: Path) -> None:
    done = launch_server(
        tmp_path, "--ready-timeout-s", "1.5", "--stall-timeout-s", "40", fail="endless_progress"
    )

    assert done.exit_code == 124
    assert done.error["code"] == "ready_timeout"
    assert "(--ready-timeout-s 1.5), in loading weights (" in done.error["message"]
    assert "--stall-timeout-s 40" in done.error["message"]
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_lets_a_server_live_that_is_slow_and_moves(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    options = ("--stall-timeout-s", "2")
    environ = wished(tmp_path, stage_s=0.5)

    with launching(tmp_path, *argv, options=options, environ=environ) as launch:
        data = launch.wait_ready()

    assert data["ready_s"] > 2.5


def test_launch_is_not_taken_in_by_an_older_server_on_the_same_port(tmp_path: Path) -> None:
    with running_server(tmp_path) as older:
        done = launch_server(tmp_path, port=older.port)

    assert done.exit_code == 1
    assert done.report["data"]["is_ready"] is False
    assert done.report["data"]["failure"]["kind"] == "port"
    assert done.report["warnings"] == [f"somebody answers on {older.url} already"]


def test_launch_of_a_port_that_somebody_else_holds_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = launch_server(tmp_path, port=taken.getsockname()[1])

    assert done.exit_code == 1
    assert "its port is taken: " in done.own_lines[-1]


def test_launch_of_a_server_that_dies_in_service_names_the_cause(tmp_path: Path) -> None:
    done = launch_server(tmp_path, die_after_s=0.2)

    assert done.exit_code == 137
    assert done.report["data"]["is_ready"] is True
    assert done.error["code"] == "exited"
    assert "of service: one of its processes was killed" in done.own_lines[-1]


def test_launch_of_what_is_no_command_says_so(tmp_path: Path) -> None:
    done = finish_launch(tmp_path, "/no/such/server", "--tp", "8")

    assert done.exit_code == 8
    assert done.error["code"] == "cannot_start"
    assert "/no/such/server: cannot be started: no such file" in done.own_lines[-1]


def test_launch_that_requires_a_profile_does_not_say_that_it_starts(tmp_path: Path) -> None:
    done = finish_launch(tmp_path, *shell("echo started"), options=["--require-profile"])

    assert (done.exit_code, done.out) == (3, b"")
    assert done.own_lines == ["not started, for --require-profile was given: no profile is active"]
    assert (done.report["status"], done.error["code"]) == ("no", "no_profile")


# What goes through.


def test_launch_passes_output_through_byte_by_byte(tmp_path: Path) -> None:
    script = r"printf 'a\r\tb\377\0c'; printf '\r50%%|x\r\033[31my\377\n' >&2; exit 7"

    done = finish_launch(tmp_path, *shell(script))

    assert done.exit_code == 7
    assert done.out == b"a\r\tb\xff\0c"
    kept = [line for line in done.err.split(b"\n") if not line.startswith(b"nccltune: ")]
    assert b"\n".join(kept) == b"\r50%|x\r\x1b[31my\xff\n"


def test_launch_keeps_the_order_of_two_streams_that_are_one(tmp_path: Path) -> None:
    script = "i=0; while [ $i -lt 500 ]; do echo out$i; echo err$i >&2; i=$((i+1)); done"

    done = finish_launch(tmp_path, *shell(script), has_one_stream=True)

    lines = [line for line in done.out.splitlines() if not line.startswith(b"nccltune: ")]
    assert lines == [b"%s%d" % (word, at) for at in range(500) for word in (b"out", b"err")]


def test_launch_passes_much_output_through_unharmed(tmp_path: Path) -> None:
    size = 8 * 2**20
    write = "os.write(1, bytes(range(256)) * 256)"
    script = f"import os; [{write} for _ in range({size // 65536})]"

    done = finish_launch(tmp_path, sys.executable, "-c", script)

    assert done.out == bytes(range(256)) * (size // 256)


def test_launch_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    script = f"for i in 1 2 3; do echo line; sleep 0.05; done; touch {proof}; exit 4"
    receiving, sending = os.pipe()
    os.close(receiving)

    with launching(tmp_path, *shell(script), stdout=sending, stderr=sending) as launch:
        os.close(sending)
        code = launch.process.wait(WAIT_S)

    assert (code, proof.exists()) == (4, True)


def test_launch_hands_stdin_on(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_bytes(b"from stdin")

    with given.open("rb") as stdin:
        done = finish_launch(tmp_path, "cat", stdin=stdin)

    assert done.out == b"from stdin"


def test_launch_hands_open_files_on(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_bytes(b"handed down")

    with given.open("rb") as file:
        number = file.fileno()
        done = finish_launch(tmp_path, *shell(f"cat /proc/self/fd/{number}"), pass_fds=[number])

    assert done.out == b"handed down"


@pytest.mark.parametrize("code", [0, 1, 3, 5, 126, 255])
def test_launch_passes_the_exit_code_through(tmp_path: Path, code: int) -> None:
    done = finish_launch(tmp_path, *shell(f"exit {code}"))

    assert done.exit_code == code
    assert done.report["exit_code"] == code
    assert done.report["status"] == ("ok" if code == 0 else "error")


def test_launch_shows_a_death_by_signal_as_a_shell_does(tmp_path: Path) -> None:
    assert finish_launch(tmp_path, *shell("kill -SEGV $$")).exit_code == 139


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_launch_passes_signals_on(tmp_path: Path, name: str) -> None:
    script = f"trap 'echo got it; exit 9' {name}; echo up; while :; do sleep 0.02; done"

    with launching(tmp_path, *shell(script)) as launch:
        launch.wait_text(b"up")
        done = launch.finish(signal.Signals[f"SIG{name}"])

    assert done.exit_code == 9
    assert b"got it" in done.out


def test_launch_leaves_an_ignored_signal_ignored(tmp_path: Path) -> None:
    script = "echo up; sleep 0.5; exit 6"

    with launching(tmp_path, *shell(script), preexec_fn=ignore_hangup) as launch:
        launch.wait_text(b"up")
        done = launch.finish(signal.SIGHUP)

    assert done.exit_code == 6


# Started by a program that ignores how its children end, which every exec hands down.


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -SEGV $$", 139)])
def test_launch_started_to_ignore_child_ends_passes_the_end_through(
    tmp_path: Path, script: str, code: int
) -> None:
    done = finish_launch(tmp_path, *shell(script), preexec_fn=ignore_child_ends)

    assert (done.exit_code, done.report["exit_code"]) == (code, code)
    assert not any("bug" in line for line in done.own_lines)


def test_launch_started_to_ignore_child_ends_names_the_cause_of_a_death(tmp_path: Path) -> None:
    environ = wished(tmp_path, fail="nccl_init")
    argv = serve_command(port=free_port())

    done = finish_launch(tmp_path, *argv, environ=environ, preexec_fn=ignore_child_ends)

    assert done.exit_code == 137
    assert done.error["code"] == "server_died"
    assert "NCCL error" in done.own_lines[-1]


def test_launch_hands_down_whether_child_ends_are_ignored(tmp_path: Path) -> None:
    words = ("grep", "SigIgn", "/proc/self/status")
    bit = 1 << (signal.SIGCHLD - 1)

    ignoring = finish_launch(tmp_path, *words, preexec_fn=ignore_child_ends)
    usual = finish_launch(tmp_path, *words)

    assert [int(done.out.split()[1], 16) & bit for done in (ignoring, usual)] == [bit, 0]


# Stopping.


def test_launch_stops_a_server_that_is_still_loading(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    with launching(tmp_path, *argv, environ=wished(tmp_path, silence_s=60)) as launch:
        launch.wait_text(b"Load weight begin")
        done = launch.finish(signal.SIGTERM)

    assert done.exit_code == 143
    assert done.report["data"]["ending"] == "stopped"
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_kills_a_server_that_was_asked_three_times(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    asked = b"SIGTERM received."
    with launching(tmp_path, *argv, environ=wished(tmp_path, ignore_term=1)) as launch:
        launch.wait_ready()
        for count in (1, 2):
            launch.process.send_signal(signal.SIGTERM)
            wait_for(lambda count=count: launch.written.count(asked) == count)  # type: ignore[misc]
        assert launch.process.poll() is None
        done = launch.finish(signal.SIGTERM)

    assert done.exit_code == 137
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_that_is_killed_takes_the_server_with_it(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    with launching(tmp_path, *argv, environ=wished(tmp_path)) as launch:
        launch.wait_ready()
        pids = server_pids(tmp_path)
        launch.process.kill()
        wait_for(lambda: not any(map(is_alive, pids)))


def test_launch_that_is_killed_takes_the_server_behind_a_script_with_it(tmp_path: Path) -> None:
    script = f"{' '.join(serve_command(port=free_port()))}; exit $?"
    with launching(tmp_path, *shell(script), environ=wished(tmp_path)) as launch:
        launch.wait_ready()
        pids = server_pids(tmp_path)
        launch.process.kill()
        wait_for(lambda: not any(map(is_alive, pids)))
        wait_for(lambda: not not_ended_copies_of(launch))


def test_launch_that_is_killed_asks_what_is_behind_a_script_to_end(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    # A shell says so when a child of it was ended, and nobody is there to read it then.
    inner = f"exec 2>&-; trap 'touch {asked}; exit' TERM; echo up; while :; do sleep 0.1; done"
    with launching(tmp_path, *shell(f'sh -c "{inner}"; exit $?')) as launch:
        wait_for(lambda: b"up\n" in (tmp_path / "out").read_bytes())
        launch.process.kill()
        wait_for(asked.exists)
        wait_for(lambda: not not_ended_copies_of(launch))


def test_launch_that_ends_leaves_no_process_of_its_own(tmp_path: Path) -> None:
    with launching(tmp_path, *shell("sleep 0.5"), environ=wished(tmp_path)) as launch:
        launch.finish()

    assert not_ended_copies_of(launch) == []


def test_launch_lets_a_server_behind_a_script_finish_its_requests(tmp_path: Path) -> None:
    script = f"{' '.join(serve_command(port=free_port()))}; exit $?"
    with launching(tmp_path, *shell(script), environ=wished(tmp_path)) as launch:
        launch.wait_ready()
        done = launch.finish(signal.SIGTERM)

    assert b"SIGTERM received." in done.out + done.err
    assert done.exit_code == 143
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_kills_a_server_behind_a_script_that_was_asked_three_times(tmp_path: Path) -> None:
    script = f"{' '.join(serve_command(port=free_port()))}; exit $?"
    environ = wished(tmp_path, ignore_term=1)
    with launching(tmp_path, *shell(script), environ=environ) as launch:
        launch.wait_ready()
        launch.process.send_signal(signal.SIGTERM)
        wait_for(lambda: b"SIGTERM received." in launch.written)
        assert launch.process.poll() is None
        done = launch.finish(signal.SIGTERM, signal.SIGTERM)

    assert done.exit_code == 143
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_whose_warden_was_killed_fetches_orphans_and_passes_the_end_through(
    tmp_path: Path,
) -> None:
    go_on = tmp_path / "go on"
    script = (
        f"echo up; while ! [ -e '{go_on}' ]; do sleep 0.02; done;"
        " for i in 1 2 3 4 5 6 7 8; do (sleep 0.05 &); done; sleep 0.2; echo more;"
        f" while [ -e '{go_on}' ]; do sleep 0.02; done; exit 7"
    )
    with launching(tmp_path, *shell(script)) as launch:
        launch.wait_text(b"up\n")
        (warden,) = set(not_ended_copies_of(launch)) - {launch.process.pid}
        os.kill(warden, signal.SIGKILL)
        go_on.touch()
        launch.wait_text(b"more\n")
        wait_for(lambda: not zombies_of(launch.process.pid), limit_s=5.0)
        go_on.unlink()
        done = launch.finish()

    assert done.exit_code == 7
    assert not any("bug" in line for line in done.own_lines)


def not_ended_copies_of(launch: Launch) -> list[int]:
    """Return processes that have the launch's own command line."""
    own = launch.words
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().decode(errors="replace").split("\0")[:-1] == own:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    "wishes",
    [{}, {"fail": "stall_capture"}, {"fail": "die_loading"}],
    ids=["stopped", "stalled", "dead"],
)
def test_launch_leaves_nothing_behind_not_even_what_ignores_signals(
    tmp_path: Path, wishes: dict[str, Any]
) -> None:
    stray = tmp_path / "stray"
    argv = serve_command(port=free_port())
    environ = wished(tmp_path, stray=str(stray), stage_s=0.4, **wishes)

    with launching(tmp_path, *argv, options=SHORT, environ=environ) as launch:
        wait_for(lambda: stray.exists() and stray.read_text())
        if not wishes:
            launch.wait_ready()
            launch.process.send_signal(signal.SIGTERM)
        launch.finish()

    assert not is_alive(int(stray.read_text()))
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_whose_report_cannot_be_written_costs_the_server_nothing(tmp_path: Path) -> None:
    options = ("--report-file", str(tmp_path / "no" / "folder" / "report.json"))

    done = finish_launch(tmp_path, *shell("echo served"), options=options)

    assert (done.exit_code, done.out) == (0, b"served\n")
    assert any("cannot be written" in line for line in done.own_lines)


# Under a service manager.


def test_launch_under_systemd_asks_for_time_then_says_ready_then_stops(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    address = tmp_path / "notify"
    environ = {**wished(tmp_path, stage_s=0.2), "NOTIFY_SOCKET": str(address)}

    with (
        service_manager(address) as messages,
        launching(tmp_path, *argv, options=["--stall-timeout-s", "100"], environ=environ) as launch,
    ):
        launch.wait_ready()
        wait_for(lambda: any("READY=1" in message for message in messages))
        launch.finish(signal.SIGTERM)

    ready = next(idx for idx, message in enumerate(messages) if "READY=1" in message)
    before = "\n".join(messages[:ready])
    asked = [
        int(message.partition("=")[2]) / 1e6
        for message in messages[:ready]
        if message.startswith("EXTEND_TIMEOUT_USEC=")
    ]
    assert asked
    assert all(129.0 <= duration_s <= 130.0 for duration_s in asked)
    assert "STATUS=loading weights" in before
    assert "STATUS=graph capture (target verify" in before
    assert messages[ready].startswith("READY=1\nSTATUS=serving on http://127.0.0.1:")
    assert messages[-1].startswith("STOPPING=1")
    assert not any("EXTEND" in message for message in messages[ready:])


def test_launch_under_systemd_asks_for_no_more_time_when_nothing_moves(tmp_path: Path) -> None:
    argv = serve_command(port=free_port())
    address = tmp_path / "notify"
    environ = {**wished(tmp_path, fail="stall_capture"), "NOTIFY_SOCKET": str(address)}

    with service_manager(address) as messages:
        done = finish_launch(tmp_path, *argv, options=SHORT, environ=environ)

    assert done.exit_code == 124
    assert not any("READY=1" in message for message in messages)
    assert "stalled in graph capture" in messages[-1]


def test_launch_under_systemd_keeps_its_watchdog_and_tells_the_server_nothing(
    tmp_path: Path,
) -> None:
    address = tmp_path / "notify"
    environ = {**os.environ, "NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "200000"}

    with service_manager(address) as messages:
        done = finish_launch(tmp_path, *shell("env; sleep 1"), environ=environ)

    assert messages.count("WATCHDOG=1") >= 5
    assert b"NOTIFY_SOCKET" not in done.out
    assert b"WATCHDOG_USEC" not in done.out


# At a terminal.


def test_launch_at_a_terminal_draws_around_the_servers_lines_and_takes_ctrl_c(
    tmp_path: Path,
) -> None:
    # One rank: others would write into its bars.
    argv = serve_command(port=free_port(), tp=1)
    with at_terminal(tmp_path, *argv, environ=wished(tmp_path, stage_s=0.3)) as terminal:
        wait_for(lambda: b"ready on http://" in terminal.read())
        terminal.type(b"\x03")
        code = terminal.wait()
        shown = terminal.read()

    assert code == 0
    picture, _, after = shown.partition(b"nccltune: ready on")
    assert b"nccltune launch" in picture
    assert b"last progress" in picture
    assert b"graph capture (target verify" in picture
    # Every line of the server came through in one piece, bars with all that they rewrote.
    for line in (
        rb"\] server_args=ServerArgs\(model_path='/models/target'.*mem_fraction_static=0\.88\)\r\n",
        rb"\] Load weight end\. elapsed=0\.24 s, type=LlamaForCausalLM, .* GB\.\r\n",
        rb"\r  0%\|          \| 0/8 \[00:00<\?, \?it/s\]\rCapturing batches .* 8/8 \[.*\]\r\n",
        rb"The server is fired up and ready to roll!\r\n",
    ):
        assert re.search(line, shown), line
    assert b"stopped by SIGINT" in after
    assert b"nccltune launch" not in after
    assert not any(map(is_alive, server_pids(tmp_path)))


def test_launch_at_a_dumb_terminal_writes_lines(tmp_path: Path) -> None:
    environ = {**wished(tmp_path), "TERM": "dumb"}
    with at_terminal(tmp_path, *shell("echo served; cat"), environ=environ) as terminal:
        code = terminal.wait()
        shown = terminal.read()

    # A server has no business with the terminal's keys: its stdin is empty.
    assert code == 0
    assert b"\x1b" not in shown
    assert b"nccltune: no profile for this command" in shown
    assert b"served\r\n" in shown


def test_launch_stays_light() -> None:
    heavy = {"torch", "optuna", "numpy", "rich", "pynvml", "httpx", "yaml"}
    script = "import sys, nccltune.cli.launch; print(*sys.modules)"

    loaded = subprocess.check_output([sys.executable, "-c", script], cwd=REPOSITORY, text=True)

    assert heavy.isdisjoint(loaded.split())
