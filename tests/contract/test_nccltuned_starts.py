"""Which starts the service tells of, against real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nccltune.live.listeners import descendants
from nccltune.live.procfs import PROC_ROOT, read_command_line
from nccltune.profile import Profile
from nccltune.store import activate, read_launch_records, save_candidate
from tests.support.service import NCCLTUNE, PYTHONPATH, Daemon, running_daemon, wait_for
from tests.support.standin_sglang.program import free_port, standin_environ
from tests.support.verifying import verify_command

SERVER = ("sglang", "serve", "--model-path", "/m", "--port", "1")
FAILING = """
sleep 1
echo "[2026-11-29 12:00:00] server_args=ServerArgs(port=1)"
sleep 1
echo "RuntimeError: NCCL error: unhandled system error"
"""


@pytest.fixture(autouse=True)
def profile() -> None:
    save_candidate(Profile("mine", {"NCCL_ALGO": "allreduce:ring"}))
    activate("mine", reason="manual")


@contextmanager
def shells(folder: Path, script: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start shells that look like servers, each with a log of its own, and leave none behind."""
    (folder / "serve").write_text(script, encoding="utf-8")
    found = []
    try:
        for number in range(count):
            with (folder / f"{number}.log").open("wb") as log:
                process = subprocess.Popen(
                    SERVER, executable="/bin/sh", cwd=folder, stdout=log, stderr=log
                )
            found.append(process)
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


def told(daemon: Daemon, what: str = "start failed") -> list[int]:
    return [int(pid) for pid in re.findall(rf"{what}: pid=(\d+)", daemon.log())]


def test_service_tells_no_server_dead_for_want_of_descriptors(tmp_path: Path) -> None:
    wrapper = ["sh", "-c", 'ulimit -n 48; exec "$@"', "sh"]
    with (
        running_daemon(tmp_path, wrapper=wrapper, interval_s=0.2) as daemon,
        shells(tmp_path, "sleep 100\n", 16) as servers,
    ):
        wait_for(lambda: daemon.has_logged("than there are descriptors"), "it is said")
        first, *others = [server.pid for server in servers]
        assert not {first, *others} & set(told(daemon))
        servers[0].kill()
        servers[0].wait()
        wait_for(lambda: first in told(daemon), "an end is told all the same")

        assert not set(others) & set(told(daemon))
        assert daemon.process.poll() is None


CONDA = """#!{python}
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "between"]))
"""
BETWEEN = f"""
import subprocess, sys
sys.exit(subprocess.call({list(SERVER)}, executable="/bin/sh"))
"""


def test_server_behind_a_script_that_a_program_writes_for_it_is_one_start(tmp_path: Path) -> None:
    # As conda run does: the words are those of the outermost and of the server alone.
    (tmp_path / "serve").write_text(FAILING, encoding="utf-8")
    (tmp_path / "between").write_text(BETWEEN, encoding="utf-8")
    (tmp_path / "conda").write_text(CONDA.format(python=sys.executable), encoding="utf-8")
    (tmp_path / "conda").chmod(0o755)
    with running_daemon(tmp_path, interval_s=0.2) as daemon:
        with (tmp_path / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [*NCCLTUNE, "run", "--any-host", "--", "./conda", "run", "-n", "env", *SERVER],
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
                cwd=tmp_path,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: server_below(process.pid), "the server is there")
        pids = [process.pid, *descendants(process.pid)]
        server_pid = server_below(process.pid)
        process.wait(30)
        wait_for(lambda: set(told(daemon)) & set(pids), "its end is told")
        time.sleep(1.0)

        assert [pid for pid in told(daemon) if pid in pids] == [server_pid]
        assert f"pid={server_pid} ending=nccl" in daemon.log()


def server_below(pid: int) -> int | None:
    """Return the server that a process has started; None as long as there is none."""
    found = (each for each in descendants(pid) if is_server(each))
    return next(found, None)


def is_server(pid: int) -> bool:
    return read_command_line(pid, PROC_ROOT).startswith(b"sglang\0")


def test_boots_of_verify_are_no_starts(tmp_path: Path) -> None:
    command = verify_command(tmp_path, port=free_port())
    words = ["verify", "--any-host", "--arms", "default,mine", "--boots", "1", "--runs", "2"]
    with (
        running_daemon(tmp_path, interval_s=0.2) as daemon,
        (tmp_path / "verify.log").open("wb") as log,
    ):
        subprocess.run(
            [*NCCLTUNE, *words, "--tokens", "200", "--", *command],
            env=standin_environ({**os.environ, "PYTHONPATH": PYTHONPATH}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=60,
            check=False,
        )
        boots = {record.pid for record in read_launch_records() if record.route == "verify"}
        seen = boots & set(told(daemon, " server"))
        wait_for(lambda: set(told(daemon, "server is gone")) >= seen, "they are gone")

        assert seen
        assert not boots & {*told(daemon), *told(daemon, "start succeeded")}
