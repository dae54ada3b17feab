"""``nccltune launch`` as a process of its own, in front of a stand-in server or any command."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.hosts import REPOSITORY
from tests.support.standin_sglang.program import standin_environ

WAIT_S = 30.0


@dataclass(frozen=True)
class Finished:
    """How a launch ended."""

    exit_code: int
    out: bytes
    err: bytes
    report: dict[str, Any]

    @property
    def own_lines(self) -> list[str]:
        """Return what ``launch`` itself wrote."""
        lines = self.err.decode(errors="replace").splitlines()
        return [line.removeprefix("nccltune: ") for line in lines if line.startswith("nccltune: ")]

    @property
    def error(self) -> dict[str, str]:
        """Return the one error of its report."""
        (error,) = self.report["errors"]
        found: dict[str, str] = error
        return found


class Launch:
    """A launch that runs."""

    def __init__(
        self,
        folder: Path,
        *command: str,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        has_one_stream: bool = False,
        **popen: Any,
    ) -> None:
        self.report_path = folder / "report.json"
        self._out_path, self._err_path = folder / "out", folder / "err"
        self.words = words = launch_words(self.report_path, command, options)
        with self._out_path.open("wb") as out, self._err_path.open("wb") as err:
            popen.setdefault("stdout", out)
            popen.setdefault("stderr", subprocess.STDOUT if has_one_stream else err)
            popen.setdefault("stdin", subprocess.DEVNULL)
            self.process = subprocess.Popen(
                words,
                env=with_repository(standin_environ(environ)),
                start_new_session=True,
                **popen,
            )

    @property
    def report(self) -> dict[str, Any]:
        """Return the newest report; empty before there is one."""
        if not self.report_path.exists():
            return {}
        report: dict[str, Any] = json.loads(self.report_path.read_text())
        return report

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the report says that the server is ready, and return its data."""
        wait_for(lambda: self.report or self.process.poll() is not None)
        data: dict[str, Any] = self.report.get("data", {})
        assert data.get("is_ready"), (self.report, self._err_path.read_bytes()[-2000:])
        return data

    @property
    def written(self) -> bytes:
        """Return all that was written so far, stdout first."""
        return self._out_path.read_bytes() + self._err_path.read_bytes()

    def wait_text(self, text: bytes) -> None:
        """Wait until the command has written something."""
        wait_for(lambda: text in self.written)

    def finish(self, *signals: int) -> Finished:
        """Send signals, wait for the end, and return all that is left."""
        for number in signals:
            self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        return Finished(code, self._out_path.read_bytes(), self._err_path.read_bytes(), self.report)


@contextmanager
def launching(folder: Path, *command: str, **options: Any) -> Iterator[Launch]:
    """Start a launch, and see to it that it is over at the end."""
    launch = Launch(folder, *command, **options)
    try:
        yield launch
    finally:
        if launch.process.poll() is None:
            launch.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                launch.process.wait(2.0)
            launch.process.kill()
            launch.process.wait()


def finish_launch(folder: Path, *command: str, **options: Any) -> Finished:
    """Run a launch to its end."""
    with launching(folder, *command, **options) as launch:
        return launch.finish()


class Terminal:
    """A pseudo-terminal with a launch in front of it, and all that has been shown there."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._shown = b""

    def read(self) -> bytes:
        """Return what was shown so far."""
        while select.select([self._descriptor], [], [], 0.0)[0]:
            try:
                piece = os.read(self._descriptor, 65536)
            except OSError:  # nobody has the other end any more
                break
            self._shown += piece
        return self._shown

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._descriptor, keys)

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        wait_for(lambda: self.read() is None or self._process.poll() is not None)
        return self._process.wait()


@contextmanager
def at_terminal(folder: Path, *command: str, environ: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a launch as a person at a terminal would."""
    given = {"TERM": "xterm-256color", **environ, "COLUMNS": "90", "LINES": "40"}
    here, there = pty.openpty()
    process = subprocess.Popen(
        launch_words(folder / "report.json", command),
        env=with_repository(given),
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(there)
    try:
        yield Terminal(process, here)
    finally:
        process.kill()
        process.wait()
        os.close(here)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs, and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_for(condition: Callable[[], object], limit_s: float = WAIT_S) -> None:
    """Wait until something holds."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"not so within {limit_s} s"
        time.sleep(0.01)


@contextmanager
def service_manager(path: Path) -> Iterator[list[str]]:
    """Listen where NOTIFY_SOCKET points, as systemd does; yields what comes, as it comes."""
    messages: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))

        def receive() -> None:
            while message := receiver.recv(65536):
                messages.append(message.decode())

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            yield messages
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", str(path))
            thread.join()


def ignore_hangup() -> None:
    """Be what nohup makes of a process; for ``preexec_fn``."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ignore_child_ends() -> None:
    """Ignore SIGCHLD, which exec hands down; for ``preexec_fn``."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def zombies_of(pid: int) -> list[int]:
    """Return the children of a process that have ended and that it has not fetched."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if (state, int(parent)) == ("Z", pid):
                found.append(int(path.parent.name))
    return found


def launch_words(
    report_path: Path, command: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a launch."""
    own = ["launch", "--report-file", str(report_path), *options]
    return [sys.executable, "-m", "nccltune", *own, "--", *command]


def with_repository(environ: Mapping[str, str]) -> dict[str, str]:
    """Let an interpreter find the package that is being tested."""
    before = environ.get("PYTHONPATH", "")
    return {**environ, "PYTHONPATH": f"{REPOSITORY}:{before}".rstrip(":")}
