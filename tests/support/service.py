"""The real service as a process, and servers started through the real routes beside it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.hosts import REPOSITORY
from tests.support.standin_sglang.program import serve_command, standin_environ

LIMIT_S = 30.0
PYTHONPATH = f"{REPOSITORY}:{REPOSITORY / 'daemon'}"
NCCLTUNE = [sys.executable, "-m", "nccltune"]


def wait_for(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until something holds, or fail with what it was."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


@dataclass
class Manager:
    """Stands in for systemd: takes what a service tells it."""

    path: Path
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.setblocking(False)

    def heard(self, line: str) -> bool:
        """Tell whether a line was said, by its beginning."""
        with suppress(BlockingIOError):
            while True:
                self.said += self._socket.recv(65536).decode().splitlines()
        return any(each.startswith(line) for each in self.said)

    def close(self) -> None:
        """Hear nothing more."""
        self._socket.close()


@dataclass
class Daemon:
    """A service that runs."""

    process: subprocess.Popen[bytes]
    run_folder: Path
    log_path: Path
    manager: Manager

    def log(self) -> str:
        """Return what it has logged."""
        return self.log_path.read_text(encoding="utf-8")

    def has_logged(self, *texts: str) -> bool:
        """Tell whether it has logged one of these."""
        log = self.log()
        return any(text in log for text in texts)

    def data(self) -> dict[str, Any]:
        """Return what it has published."""
        try:
            text = (self.run_folder / "active.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        found: dict[str, Any] = json.loads(text)
        return found

    def env(self) -> dict[str, str]:
        """Return the settings that it has published."""
        text = (self.run_folder / "active.env").read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return dict(line.split("=", 1) for line in lines)

    def server(self, pid: int) -> dict[str, Any]:
        """Return what it says of one server; empty where it does not know it yet."""
        found = [each for each in self.data().get("servers", []) if each["pid"] == pid]
        return found[0] if found else {}

    def metrics(self) -> str:
        """Ask for the metrics, as Prometheus would through a proxy."""
        return ask_metrics(str(self.run_folder / "metrics.sock"))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return how it did."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


def ask_metrics(address: str | tuple[str, int]) -> str:
    """Fetch ``/metrics`` and return the body."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as client:
        client.settimeout(LIMIT_S)
        client.connect(address)
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        content = b""
        while part := client.recv(65536):
            content += part
    head, _, body = content.decode().partition("\r\n\r\n")
    assert " 200 " in head
    return body


@contextmanager
def running_daemon(
    folder: Path,
    *options: str,
    environ: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    wants_ready: bool = True,
    interval_s: float = 0.5,
) -> Iterator[Daemon]:
    """Start the service in a folder of its own, and leave nothing of it behind."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("daemon-*.log")))
    manager = Manager(folder / f"notify-{number}.sock")
    log_path = folder / f"daemon-{number}.log"
    run_folder = folder / "run"
    command = [sys.executable, "-m", "nccltuned", "--verbose"]
    command += ["--interval-s", str(interval_s), *options]
    variables = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "NCCLTUNE_RUN_DIR": str(run_folder),
        "NOTIFY_SOCKET": str(manager.path),
        **(environ or {}),
    }
    variables.pop("JOURNAL_STREAM", None)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*wrapper, *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            close_fds=not wrapper,
        )
    daemon = Daemon(process, run_folder, log_path, manager)
    try:
        if wants_ready:
            wait_for(lambda: manager.heard("READY=1"), "the service is ready")
        yield daemon
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        manager.close()


@contextmanager
def started(
    folder: Path,
    command: Sequence[str],
    wishes: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command among stand-ins, in a session of its own, and leave nothing behind."""
    base = {"PYTHONPATH": PYTHONPATH, **(os.environ if environ is None else environ)}
    base["PYTHONPATH"] = PYTHONPATH
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            list(command),
            env=standin_environ(base, **(wishes or {})),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_command(*flags: str, port: int, tp: int = 2) -> list[str]:
    """Return ``nccltune run -- sglang serve ...``."""
    return [*NCCLTUNE, "run", "--", *serve_command(*flags, port=port, tp=tp)]
