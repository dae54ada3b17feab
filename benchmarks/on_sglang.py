"""The experiments on a real SGLang, each one command: what runs there becomes docs/results/.

    python benchmarks/on_sglang.py --out DIR --model DIR [--stage NAME]... [-- SGLANG FLAG...]

``--model`` holds ``target`` and ``draft``, an EAGLE-3 pair; benchmarks/kimi_shaped_model.py writes
one without weights, to be served with ``--load-format dummy``. What a build of SGLang needs of its
environment is set by the caller; what it needs of its command line stands after ``--``.

Stages; each writes its raw data under --out and prints a short table:

routes  run, launch and the hook, each at tensor parallel 1 and with two ranks that share one GPU:
        is the profile in every rank, by ``nccltune status`` and by NCCL's own log
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccltune.bench.nccl_log import parse_nccl_log
from nccltune.sglang.endpoints import Endpoint, Health, ask, read_health

if TYPE_CHECKING:
    from typing import IO

READY_LIMIT_S = 240.0
END_LIMIT_S = 20.0
VERIFY_BYTES = 43008
"""One verify pass at batch size 1: 3 draft tokens x hidden 7168 x 2 bytes."""
PROFILE = "routes-proof"
SETTINGS = {
    "NCCL_ALGO": "allreduce:ring",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NTHREADS": "256",
    "NCCL_PROTO": "allreduce:LL",
}
"""Chosen to be seen in NCCL's log, not to be fast."""
LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ENV,TUNING"}
ROUTES = ("run", "launch", "hook")
LANES = ("tp1", "shared")


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
        command = self.nccltune(*words)
        done = subprocess.run(
            [*command, "--json"],
            env={**self.environ, **(environ or {})},
            capture_output=True,
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


def routes(run: Run) -> None:
    """Put a profile into servers by every route, and look whether it arrived."""
    profile = {"schema": "nccltune.profile/1", "name": PROFILE, "settings": SETTINGS}
    path = run.out / f"{PROFILE}.json"
    path.write_text(json.dumps(profile))
    run.call("import", "profile", "import", str(path), "--replace")
    run.call("activate", "profile", "activate", PROFILE, "--any-host")
    run.call("install", "install", "--no-units", "--python", run.python)
    try:
        with ThreadPoolExecutor(len(LANES)) as pool:
            lanes = [pool.submit(routes_of, run, lane) for lane in run.options.lane or LANES]
            for lane in lanes:
                lane.result()
    finally:
        run.call("uninstall", "uninstall", "--no-units", "--python", run.python)


def routes_of(run: Run, lane: str) -> None:
    """Try every route in one lane, one after the other."""
    for number, route in enumerate(ROUTES):
        port = 30200 + 10 * number + 100 * LANES.index(lane)
        try:
            one_route(run, lane, route, port)
        except (OSError, ValueError, KeyError) as error:
            print(f"{lane:6} {route:6} FAILED: {type(error).__name__}: {error}", flush=True)


def nodes_of(run: Run, lane: str, port: int) -> list[tuple[list[str], dict[str, str]]]:
    """Return command and environment of each launch of a lane's server.

    Two ranks that share a GPU are two "nodes" on loopback, for NCCL refuses a GPU twice within one.
    """
    if lane == "tp1":
        return [(run.sglang(port, tp=1), dict(LOGGED))]
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


def one_route(run: Run, lane: str, route: str, port: int) -> None:
    """Start one server by one route, and keep what status and NCCL say of it."""
    name = f"{lane}-{route}"
    logs: list[Path] = []
    with ExitStack() as stack:
        pids = []
        for number, (command, own) in enumerate(nodes_of(run, lane, port)):
            log = run.out / f"{name}-node{number}.log"
            report = run.out / f"{name}-node{number}-report.json"
            environ = {**run.environ, **own}
            if route == "hook":
                environ["NCCLTUNE_ANY_HOST"] = "1"
            logs.append(log)
            stream = stack.enter_context(log.open("w"))
            line = through(run, route, command, report)
            pids.append(stack.enter_context(started(line, environ, stream)))
        endpoint = Endpoint(port=port)
        ready_s = wait_up(endpoint)
        meta = generate(endpoint, 40)
        envelope = run.call(f"{name}-status", "status")
        text = subprocess.run(
            run.nccltune("status"), env=run.environ, capture_output=True, text=True, check=False
        )
        (run.out / f"{name}-status.txt").write_text(text.stdout + text.stderr)
    # Ports of the lanes differ, and every command names its own.
    servers = [
        s for s in envelope["data"]["servers"] if f"--port {port // 10}" in " ".join(s["command"])
    ]
    for server in servers:
        for rank in server["ranks"]:
            states = ", ".join(sorted({key["state"] for key in rank["keys"]}))
            what = f"{rank['rank'] or 'scheduler'}: {len(rank['keys'])} keys {states}"
            print(
                f"{lane:6} {route:6} up after {ready_s:5.1f} s, {meta['completion_tokens']} tokens;"
                f" status: {server['verdict']}, {what}",
                flush=True,
            )
    for log in logs:
        nccl = parse_nccl_log(log.read_text(errors="replace").splitlines())
        ours = {key: value for key, value in nccl.confirmed.items() if key in SETTINGS}
        print(
            f"{lane:6} {route:6} {log.name}: set by environment {ours};"
            f" AllReduce {VERIFY_BYTES} B: {nccl.used.get(VERIFY_BYTES, 'none')}",
            flush=True,
        )


STAGES: dict[str, Callable[[Run], None]] = {"routes": routes}


def main() -> int:
    """Run the stages asked for, in their order."""
    words = sys.argv[1:]
    flags: list[str] = []
    if "--" in words:
        idx = words.index("--")
        words, flags = words[:idx], words[idx + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="the interpreter with SGLang")
    parser.add_argument("--stage", action="append", choices=list(STAGES))
    parser.add_argument("--lane", action="append", choices=LANES)
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out.resolve(), options.model, options.python, tuple(flags), options)
    for name in options.stage or list(STAGES):
        print(f"== {name}", flush=True)
        STAGES[name](run)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
