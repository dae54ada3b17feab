"""Root looks at servers of other users: nothing of theirs is run, nothing of root's is shown."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nccltune.inject.decision import make_record
from nccltune.inject.marker import MARKER, format_marker, settings_digest
from nccltune.inject.resolver import Decision
from nccltune.live.launch_inbox import INBOX_NAME, format_message
from nccltune.live.scanner import Server, find_servers
from nccltune.live.server_facts import read_facts
from nccltune.profile import Profile
from nccltune.store import (
    activate,
    append_launch_record,
    read_active,
    read_launch_records,
    save_candidate,
)
from nccltuned.child import call_in_child
from tests.support.command_line import FINGERPRINT
from tests.support.service import PYTHONPATH, run_command, running_daemon, started, wait_for
from tests.support.standin_sglang.program import free_port

NOBODY = 65534
SECRET = "hunter2-of-root"
SETTINGS = {"NCCL_ALGO": "allreduce:ring"}
FLAGS = ("--model-path", "/m", "--tp", "2", "--speculative-algorithm", "EAGLE3")
STEPS = ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
LAUNCH = (*FLAGS, *STEPS)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

GUARD = """
import sys

def guard(event, arguments):
    is_ours = event == "ctypes.dlopen" and arguments[0] in (None, "libnvidia-ml.so.1")
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system") or (
        event == "ctypes.dlopen" and not is_ours
    ):
        sys.stderr.write(f"RUN: {event} {arguments}\\n")

sys.addaudithook(guard)
from nccltune.entry import main
sys.argv = ["nccltune", "status", "--json"]
main()
"""


@pytest.fixture
def den() -> Iterator[Path]:
    """A folder of another user's, with a program that passes for SGLang and for an interpreter."""
    folder = Path(tempfile.mkdtemp(prefix="nccltune-den-"))
    folder.chmod(0o755)
    (folder / "bin").mkdir()
    shutil.copy("/bin/sh", folder / "bin/python3")
    (folder / "serve").write_text("while :; do sleep 60; done\n", encoding="utf-8")
    for name in ("sglang", "libnccl.so.2"):
        (folder / "bin" / name).write_text(f"#!{folder}/bin/python3\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file of root's that nobody else may read."""
    folder = Path(tempfile.mkdtemp(prefix="nccltune-secret-"))
    path = folder / "secret.yaml"
    path.write_text(f"tp-size: {SECRET}\n", encoding="utf-8")
    yield path
    shutil.rmtree(folder)


@contextmanager
def serving(den: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run somebody's program that looks like a server."""
    process = subprocess.Popen(
        ["sglang", "serve", *flags],
        executable=den / "bin/python3",
        cwd=den,
        env={"PATH": f"{den}/bin:/usr/bin:/bin", **(environ or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        start_new_session=True,
    )
    try:
        found: list[Server] = []

        def is_found() -> bool:
            found[:] = [each for each in find_servers() if each.pid == process.pid]
            return bool(found)

        wait_for(is_found, "it is seen")
        yield found[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask_status() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GUARD],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def server_in(answer: str, pid: int) -> dict[str, Any]:
    [server] = [each for each in json.loads(answer)["data"]["servers"] if each["pid"] == pid]
    return dict(server)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SGLANG_NCCL_SO_PATH": "{den}/bin/libnccl.so.2"},
        {"PYTHONPATH": "{den}/site"},
        {"LD_PRELOAD": "{den}/bin/libnccl.so.2"},
    ],
    ids=["interpreter", "library", "packages", "preloaded"],
)
def test_status_runs_and_loads_nothing_of_another_users(
    den: Path, variables: dict[str, str]
) -> None:
    (den / "site/torch").mkdir(parents=True)  # torch, and no NCCL beside it
    save_candidate(Profile("mine", SETTINGS, fingerprint=FINGERPRINT.to_json()))
    activate("mine", reason="manual")
    environ = {name: value.format(den=den) for name, value in variables.items()}

    with serving(den, *LAUNCH, environ=environ) as server:
        done = ask_status()

    assert "RUN:" not in done.stderr
    assert server_in(done.stdout, server.pid)["uid"] == NOBODY


@pytest.mark.parametrize("kind", ["plain", "linked", "readable_in_a_closed_folder", "model"])
def test_status_and_service_show_no_file_that_its_user_may_not_read(
    den: Path, secret: Path, tmp_path: Path, kind: str
) -> None:
    save_candidate(Profile("mine", SETTINGS))
    activate("mine", reason="manual")
    named = secret
    if kind == "linked":
        named = den / "own.yaml"
        named.symlink_to(secret)
    elif kind == "readable_in_a_closed_folder":
        secret.chmod(0o644)
    flags = (*LAUNCH, "--config", str(named))
    if kind == "model":
        (secret.parent / "config.json").write_text(f'{{"{SECRET}": 1', encoding="utf-8")
        flags = (*LAUNCH, "--model-path", str(secret.parent))

    with serving(den, *flags) as server, running_daemon(tmp_path) as daemon:
        shown = ask_status().stdout
        wait_for(lambda: daemon.server(server.pid), "it is published")
        published = json.dumps(daemon.data())
        log = daemon.log()

    for text in (shown, published, log):
        assert SECRET not in text
        assert str(server.pid) in text
    if kind != "model":
        assert "cannot be read as its user reads it" in server_in(shown, server.pid)["reason"]


def test_a_config_file_of_its_own_is_read_and_its_text_is_not_repeated(den: Path) -> None:
    config = den / "own.yaml"
    config.write_text("tp-size: 8\n", encoding="utf-8")
    config.chmod(0o600)
    os.chown(config, NOBODY, NOBODY)

    with serving(den, "--model-path", "/m", "--config", "own.yaml") as server:
        facts = read_facts(server, ())
        assert facts.command is not None
        assert facts.command.tp_size == 8
        assert "--tp-size=8" in facts.argv
        config.write_text(f"tp-size: {SECRET}\n", encoding="utf-8")
        assert SECRET not in read_facts(server, ()).problem


def test_a_program_that_is_lent_roots_rights_lends_them_to_nobody(den: Path, secret: Path) -> None:
    program = den / "bin/python3"
    os.chown(program, 0, 0)
    program.chmod(0o4755)

    with serving(den, *LAUNCH, "--config", str(secret)) as server:
        facts = read_facts(server, ())

    assert facts.files.rights.uid is None
    assert SECRET not in str(facts)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    "flags",
    [
        ("--config", "bomb.yaml"),
        ("--tp", "300000000"),
        ("--dp-size", "2000000000"),
        ("--pp-size", "2000000000"),
        ("--nnodes", "2000000000"),
        ("--base-gpu-id", "9" * 4000),
        ("--cuda-graph-bs", *["1"] * 10_000),
        ("--config", "/dev/zero"),
        ("--config", "pipe.yaml"),
        ("--config", "huge.yaml"),
    ],
    ids=["bomb", "tp", "dp", "pp", "nodes", "base", "words", "device", "pipe", "huge"],
)
def test_no_command_line_of_somebody_elses_stops_the_service(
    den: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    save_candidate(Profile("mine", SETTINGS, fingerprint=FINGERPRINT.to_json()))
    activate("mine", reason="manual")
    (den / "bomb.yaml").write_text(f"{BOMB}tp: 2\n", encoding="utf-8")
    os.mkfifo(den / "pipe.yaml", 0o644)
    with (den / "huge.yaml").open("wb") as file:
        file.truncate(2**40)

    with running_daemon(tmp_path) as daemon, serving(den, *LAUNCH, *flags) as server:
        wait_for(lambda: daemon.server(server.pid), "it is published", 30.0)
        assert "nccltune_check_failing 0" in daemon.metrics()
        text = Path(f"/proc/{daemon.process.pid}/status").read_text(encoding="utf-8")
        [peak] = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")]
        assert int(peak) < 64 * 1024  # KiB


def test_so_many_servers_of_one_user_hide_no_server_of_another(den: Path) -> None:
    with serving(den, *LAUNCH) as first:
        many = [
            subprocess.Popen(
                ["sglang", "serve", *LAUNCH, "--port", str(port)],
                executable=den / "bin/python3",
                cwd=den,
                user=NOBODY + 1,
                group=NOBODY,
                extra_groups=[],
                start_new_session=True,
            )
            for port in range(80)
        ]
        try:
            wait_for(lambda: len(find_servers()) > 60, "they are seen")
            seen = find_servers()
        finally:
            for process in many:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    assert first.pid in {server.pid for server in seen}
    assert len({server.pid for server in seen} & {process.pid for process in many}) == 64


FAILING = """
echo "[2026-11-29 12:00:00] server_args=ServerArgs(port=30000)"
echo "[2026-11-29 12:00:00 TP0] Init torch distributed begin."
sleep 1.5
echo "RuntimeError: NCCL error: unhandled system error"
exit 1
"""


def test_servers_that_somebody_lets_die_roll_nothing_back(den: Path, tmp_path: Path) -> None:
    save_candidate(Profile("mine", SETTINGS))
    activate("mine", reason="manual")
    (den / "serve").write_text(FAILING, encoding="utf-8")
    mark = {MARKER: format_marker(settings_digest(SETTINGS), SETTINGS)}
    with running_daemon(tmp_path, interval_s=0.1) as daemon:
        for number in range(4):
            with (den / f"{number}.log").open("wb") as log:
                process = subprocess.Popen(
                    ["sglang", "serve", *LAUNCH],
                    executable=den / "bin/python3",
                    cwd=den,
                    env={"PATH": "/usr/bin:/bin", **SETTINGS, **mark},
                    stdout=log,
                    user=NOBODY,
                    group=NOBODY,
                    extra_groups=[],
                )
            process.wait()
        wait_for(lambda: "nccltune_uncounted_failed_starts 4" in daemon.metrics(), "they are seen")
        assert daemon.data()["failed_starts"]["count"] == 0
        assert "ending=nccl profile=mine" in daemon.log()
        assert "unhandled system error" not in daemon.log()

    assert read_active().name == "mine"


def test_records_of_somebody_push_out_nobody_elses(den: Path, tmp_path: Path) -> None:
    save_candidate(Profile("mine", SETTINGS))
    activate("mine", reason="manual")
    own = make_record(["sglang", "serve", *LAUNCH], {}, Decision("root's"), route="run")
    append_launch_record(own)
    with running_daemon(tmp_path) as daemon:
        address = str(daemon.run_folder / INBOX_NAME)
        for folder in daemon.run_folder.resolve().parents[:4]:
            folder.chmod(folder.stat().st_mode | 0o011)

        def flood() -> int:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(address)
                real = make_record(["sglang"], {}, Decision("his"), route="run")
                sender.send(format_message(real) or b"")
                for number in range(40):
                    for pid, ticks in ((os.getpid(), own.started_ticks), (4_000_000 + number, 1)):
                        fake = replace(own, pid=pid, started_ticks=ticks, reason="r" * 1000)
                        sender.send(format_message(fake) or b"")
                sender.send(b"x" * 100_000)
                time.sleep(2.0)
            return os.getpid()

        call = call_in_child(flood, timeout_s=30.0)
        while not call.feed():
            time.sleep(0.01)
        pid = call.answer()
        found = read_launch_records()

    assert [record for record in found if record.uid is None] == [
        replace(own, generation=read_active().generation)
    ]
    assert [record.pid for record in found if record.uid == NOBODY] == [pid]


def test_two_services_on_one_store_roll_back_once(tmp_path: Path) -> None:
    for name, settings in (("older", {"NCCL_ALGO": "allreduce:tree"}), ("mine", SETTINGS)):
        save_candidate(Profile(name, settings))
        activate(name, reason="manual")
    command = run_command(port=free_port())
    with (
        running_daemon(tmp_path / "host", interval_s=0.1) as first,
        running_daemon(tmp_path / "pod", interval_s=0.1) as second,
    ):
        for _ in range(5):
            with started(tmp_path, command, {"fail": "nccl_init"}) as process:
                process.wait(30)
        wait_for(lambda: read_active().name != "mine", "it is rolled back")
        time.sleep(1.0)
        assert read_active().name == "older"
        assert "another nccltuned keeps this store" in second.log()
        assert "ROLLED BACK" not in second.log()
        assert "nccltune_store_keeper 0" in second.metrics()
        first.stop()
        wait_for(lambda: "keeps the store from here on" in second.log(), "it takes over")
        assert "nccltune_store_keeper 1" in second.metrics()
    assert read_active().name == "older"
