"""Servers, commands and processes of the experiments in on_sglang.py."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccltune.live.listeners import descendants
from nccltune.live.procfs import read_process
from nccltune.sglang.endpoints import Endpoint, Health, ask, read_health

if TYPE_CHECKING:
    from typing import IO

READY_LIMIT_S = 240.0
END_LIMIT_S = 20.0
LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ENV,TUNING"}


@dataclass(frozen=True, slots=True)
class Run:
    """What all stages share."""

    out: Path
    model: Path
    python: str
    flags: tuple[str, ...]
    options: argparse.Namespace

    @property
    def environ(self) -> dict[str, str]:
        """The operator's environment of every command."""
        return {**os.environ, "NCCLTUNE_HOME": str(self.out / "home")}

    def port(self, offset: int) -> int:
        """Return a port of this experiment: others may run beside it."""
        first: int = self.options.first_port
        return first + offset

    def nccltune(self, *words: str) -> list[str]:
        """Return a command of nccltune, by the interpreter that runs this."""
        return [sys.executable, "-m", "nccltune", *words]

    def sglang(self, port: int, *, tp: int, num_steps: int = 2) -> list[str]:
        """Return the launch command of an EAGLE-3 server."""
        return [
            self.python,
            "-m",
            "sglang.launch_server",
            *("--model-path", str(self.model / "target")),
            *("--tp-size", str(tp), "--host", "127.0.0.1", "--port", str(port)),
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(self.model / "draft")),
            *("--speculative-num-steps", str(num_steps), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(num_steps + 1)),
            *self.flags,
        ]

    def call(self, name: str, *words: str, environ: Mapping[str, str] | None = None) -> Any:
        """Run a command of nccltune with --json; keep and return its envelope."""
        at = words.index("--") if "--" in words else len(words)
        command = self.nccltune(*words[:at], "--json", *words[at:])
        with (self.out / f"{name}.log").open("w") as log:
            done = subprocess.run(
                command,
                env={**self.environ, **(environ or {})},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
        envelope = json.loads(done.stdout)
        envelope["command_line"] = shlex.join(["nccltune", *words])
        (self.out / f"{name}.json").write_text(json.dumps(envelope, indent=1) + "\n")
        return envelope


@contextmanager
def started(command: Sequence[str], environ: Mapping[str, str], log: IO[str]) -> Iterator[int]:
    """Run a command in a session of its own; at the end ask it to stop, then kill what is left."""
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_up(endpoint: Endpoint, limit_s: float = READY_LIMIT_S) -> float:
    """Wait until a server takes requests; return after how many seconds."""
    began = time.monotonic()
    while read_health(endpoint, 5.0) is not Health.UP:
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"{endpoint.url} is not up after {limit_s:g} s")
        time.sleep(0.5)
    return time.monotonic() - began


def generate(endpoint: Endpoint, tokens: int) -> Mapping[str, Any]:
    """Ask for some tokens and return what the server says of them."""
    body = {
        "input_ids": list(range(5, 37)),
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    answer = ask(endpoint, "/generate", body=body, timeout_s=120.0)
    meta: Mapping[str, Any] = json.loads(answer.body)["meta_info"]
    return meta


def nodes_of(run: Run, lane: str, port: int) -> list[tuple[list[str], dict[str, str]]]:
    """Return command and environment of each launch of a lane's server.

    Two ranks that share a GPU are two "nodes" on loopback, for NCCL refuses a GPU twice within one.
    """
    if lane != "shared":
        return [(run.sglang(port, tp=1 if lane == "tp1" else 2), dict(LOGGED))]
    nodes = []
    for rank in (0, 1):
        command = [
            *run.sglang(port + rank, tp=2),
            *("--nnodes", "2", "--node-rank", str(rank)),
            *("--dist-init-addr", f"127.0.0.1:{port + 300}"),
        ]
        loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        nodes.append((command, {**LOGGED, **loopback, "NCCL_HOSTID": f"node{rank}"}))
    return nodes


def through(run: Run, route: str, command: list[str], report: Path) -> list[str]:
    """Return the command of one route."""
    if route == "hook":
        return command
    return run.nccltune(route, "--any-host", "--report-file", str(report), "--", *command)


def ask_driver(*query: str) -> list[str]:
    """Return what the driver's own tool answers to a query, line by line."""
    if shutil.which("nvidia-smi") is None:
        return ["not known"]
    command = ["nvidia-smi", *query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def alive_of(pids: Collection[int]) -> list[int]:
    """Return which of these processes are there."""
    return sorted(pid for pid in pids if read_process(pid) is not None)


def left_of(pids: Collection[int]) -> str:
    """Say which of these processes are there, and which of them hold GPU memory."""
    names = {str(pid) for pid in pids}
    apps = ask_driver("--query-compute-apps=pid,used_memory")
    holding = [app for app in apps if app.partition(",")[0] in names]
    used = ", ".join(ask_driver("--query-gpu=memory.used"))
    return (
        f"processes {alive_of(pids)}, with GPU memory {holding}; in use on each GPU, by all: {used}"
    )


def tree_of(ancestor: int) -> dict[int, str]:
    """Return pid and command of every process that descends from another."""
    found = (read_process(pid) for pid in descendants(ancestor))
    return {each.pid: " ".join(each.argv) for each in found if each is not None}
