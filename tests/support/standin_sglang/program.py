"""Starts the stand-in SGLang from tests: commands, environment, and a server that is up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SITE = FOLDER / "site"
BIN = FOLDER / "bin"
EAGLE3_FLAGS = (
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-draft-model-path",
    "/models/draft",
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "3",
)
START_LIMIT_S = 30.0


def standin_environ(
    base: Mapping[str, str] | None = None, /, **wishes: str | float
) -> dict[str, str]:
    """Return an environment in which ``sglang`` is the stand-in.

    Args:
        base: what to add to; this process's own environment if None.
        wishes: STANDIN_SGLANG_* variables by their rest: ``fail="die_loading"``.
    """
    environ = dict(os.environ if base is None else base)
    path = environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    before = environ.get("PYTHONPATH")
    environ.update(
        PATH=f"{BIN}:{path}",
        PYTHONPATH=f"{SITE}:{before}" if before else str(SITE),
        PYTHONDONTWRITEBYTECODE="1",
        STANDIN_SGLANG_PYTHON=sys.executable,
    )
    environ.update({f"STANDIN_SGLANG_{name.upper()}": str(each) for name, each in wishes.items()})
    return environ


def serve_command(*flags: str, port: int, tp: int = 2, is_eagle3: bool = True) -> list[str]:
    """Return ``sglang serve ...``."""
    return ["sglang", "serve", *_flags(*flags, port=port, tp=tp, is_eagle3=is_eagle3)]


def module_command(*flags: str, port: int, tp: int = 2, is_eagle3: bool = True) -> list[str]:
    """Return ``python -m sglang.launch_server ...``."""
    words = _flags(*flags, port=port, tp=tp, is_eagle3=is_eagle3)
    return [sys.executable, "-m", "sglang.launch_server", *words]


def _flags(*flags: str, port: int, tp: int, is_eagle3: bool) -> list[str]:
    own = ["--model-path", "/models/target", "--tp", str(tp), "--port", str(port)]
    return [*own, *(EAGLE3_FLAGS if is_eagle3 else ()), *flags]


def free_port() -> int:
    """Return a port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Running:
    """A stand-in server that is up."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    record_path: Path
    process_count: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def records(self) -> list[dict[str, object]]:
        """Return what each of its processes wrote down about itself, once all have.

        The server does not wait for its detokenizer, which may come later than its first answer.
        """
        end_s = time.monotonic() + START_LIMIT_S
        while len(found := read_records(self.record_path)) < self.process_count:
            assert time.monotonic() < end_s, f"only {[each['role'] for each in found]} wrote"
            time.sleep(0.02)
        return found


def read_records(path: Path) -> list[dict[str, object]]:
    """Read the file of STANDIN_SGLANG_RECORD: role, process id, environment of each process."""
    whole, _, _half_written = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def running_server(
    folder: Path,
    *flags: str,
    environ: Mapping[str, str] | None = None,
    tp: int = 2,
    **wishes: str | float,
) -> Iterator[Running]:
    """Start a stand-in server, wait until it is up, and leave nothing of it behind."""
    port = free_port()
    log_path, record_path = folder / f"server-{port}.log", folder / f"server-{port}.jsonl"
    wishes = {"record": str(record_path), **wishes}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            serve_command(*flags, port=port, tp=tp),
            env=standin_environ(environ, **wishes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_up(port, process)
        # The one that serves, its ranks, and the detokenizer.
        yield Running(process, port, log_path, record_path, process_count=1 + tp + 1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(port: int, process: subprocess.Popen[bytes], *, host: str = "127.0.0.1") -> None:
    """Wait until a server answers 200, or fail with how it ended."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode} before it was up")
        with suppress(OSError, urllib.error.HTTPError):
            opener.open(f"http://{host}:{port}/health", timeout=5.0).close()
            return
        time.sleep(0.02)
    raise AssertionError(f"the server was not up within {START_LIMIT_S} s")
