"""What the load generator of ``nccltune verify`` adds to inter-token latency.

A server in a process of its own streams events of SGLang's shape and size, cumulative text and all,
at a fixed pace, and notes when it sends each. The load generator and a bare socket reader, which
takes a moment after each ``recv`` and looks at nothing before the end, read it in turns, A B B A.
The gaps between events are compared with each other, and each with the server's own: its error. In
one row another thread works as a live view does.

    python benchmarks/load_cost.py [--blocks 4] [--limit-pct 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import multiprocessing
import os
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nccltune.sglang.endpoints import Endpoint
from nccltune.verify.load.client import Limits, fetch

EVENT_COUNT = 250
TOKENS_AN_EVENT = 2
LIMITS = Limits(deadline_s=120.0, stall_s=30.0)
VIEW_WORK_S, VIEW_PAUSE_S = 0.020, 0.230
FIGURES = ("mean", "p50", "p99", "error")
"""Of the gaps in ms; the error is the mean distance from the server's own gap."""
LIMITED = ("mean", "p50", "error")
"""The 99th percentile shows what else this machine does, and is printed only."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    pace_ms: float
    stream_count: int = 1
    has_view: bool = False

    @property
    def name(self) -> str:
        """As the table shows it."""
        streams = "1 stream" if self.stream_count == 1 else f"{self.stream_count} streams"
        return f"{self.pace_ms:g} ms, {streams}{', view' if self.has_view else ''}"


CASES = (Case(2), Case(5), Case(10), Case(10, stream_count=8), Case(10, has_view=True))


def main() -> int:
    """Measure, print a table, and end with 1 where the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4, help="of four turns each")
    parser.add_argument("--limit-pct", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    cpus = f"{os.cpu_count()} CPUs, load {load:.1f} before"
    print(f"Python {sys.version.split()[0]}, {cpus}; gaps between events in ms")
    print(f"{'':24}{'':12}" + "".join(f"{name:>9}" for name in FIGURES))
    found = {case.name: _measure(case, options.blocks) for case in CASES}
    most_pct = max(rows["added_pct"][name] for rows in found.values() for name in LIMITED)
    is_good = most_pct <= options.limit_pct
    word = "within" if is_good else "ABOVE"
    print(f"mean, p50, error: at most {most_pct:.2f} % added: {word} {options.limit_pct:g} %")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_good else 1


def _measure(case: Case, block_count: int) -> dict[str, dict[str, float]]:
    gaps_ms: dict[str, list[float]] = {"server": [], "bare": [], "nccltune": []}
    errors_ms: dict[str, list[float]] = {"bare": [], "nccltune": []}
    with _server(case.pace_ms) as (port, pipe):
        for reader in ("bare", "nccltune", "nccltune", "bare") * block_count:
            seen = _read_bare(port, case) if reader == "bare" else _read(port, case)
            truth = dict(pipe.recv() for _ in range(case.stream_count))
            for idx, moments_s in enumerate(seen):
                read, sent = _gaps_ms(moments_s), _gaps_ms(truth[idx])
                gaps_ms["server"] += sent
                gaps_ms[reader] += read
                errors_ms[reader] += [abs(a - b) for a, b in zip(read, sent, strict=True)]
    rows = {name: _figures(values, errors_ms.get(name)) for name, values in gaps_ms.items()}
    bare, own = rows["bare"], rows["nccltune"]
    rows["added_pct"] = {name: 100.0 * (own[name] - bare[name]) / bare["mean"] for name in FIGURES}
    for idx, (name, row) in enumerate(rows.items()):
        values = "".join(f"{row[figure]:9.3f}" if figure in row else "" for figure in FIGURES)
        unit = "  % of the mean gap" if name == "added_pct" else ""
        title = case.name if idx == 0 else ""
        print(f"{title:24}{name.removesuffix('_pct'):12}{values}{unit}", flush=True)
    return rows


def _gaps_ms(moments_s: Sequence[float]) -> list[float]:
    assert len(moments_s) == EVENT_COUNT
    return [1e3 * (after - before) for before, after in itertools.pairwise(moments_s)]


def _figures(gaps_ms: Sequence[float], errors_ms: Sequence[float] | None) -> dict[str, float]:
    ordered = sorted(gaps_ms)
    p50, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    row = {"mean": statistics.fmean(ordered), "p50": p50, "p99": p99}
    return row if errors_ms is None else {**row, "error": statistics.fmean(errors_ms)}


# The two readers: each returns, for every stream, the moment of every event.


def _read(port: int, case: Case) -> list[list[float]]:
    tokens = EVENT_COUNT * TOKENS_AN_EVENT
    prompts = [str(idx) for idx in range(case.stream_count)]
    with _view() if case.has_view else nullcontext():
        run = fetch(Endpoint(port=port), prompts, tokens=tokens, limits=LIMITS)
    return [[chunk.at_s for chunk in stream.chunks] for stream in run.streams]


def _read_bare(port: int, case: Case) -> list[list[float]]:
    with ThreadPoolExecutor(case.stream_count) as pool:
        return list(pool.map(_read_socket, [port] * case.stream_count, range(case.stream_count)))


def _read_socket(port: int, idx: int) -> list[float]:
    moments_s: list[float] = []
    reads: list[bytes] = []
    body = json.dumps({"text": str(idx)}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + body)
        while data := connection.recv(65536):
            moments_s.append(time.perf_counter())
            reads.append(data)
    ends = list(itertools.accumulate(len(data) for data in reads))
    found = re.finditer(rb"}\n\n", b"".join(reads))
    return [moments_s[bisect.bisect_left(ends, match.end())] for match in found]


@contextmanager
def _view() -> Iterator[None]:
    """Keep the interpreter busy now and then, as drawing a picture does."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(VIEW_PAUSE_S):
            until_s = time.perf_counter() + VIEW_WORK_S
            while time.perf_counter() < until_s:
                sum(range(100))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# The server


@contextmanager
def _server(pace_ms: float) -> Iterator[tuple[int, Connection]]:
    """Yield the port of a server, and a pipe with index and moments of each finished stream."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(pace_ms / 1e3, there), daemon=True)
    process.start()
    try:
        yield here.recv(), here
    finally:
        process.kill()
        process.join()


def _serve(pace_s: float, pipe: Connection) -> None:
    events = [_piece(_event(idx + 1)) for idx in range(EVENT_COUNT)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        lock = threading.Lock()
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_stream, args=(connection, events, pace_s, pipe, lock)).start()


def _stream(
    connection: socket.socket,
    events: Sequence[bytes],
    pace_s: float,
    pipe: Connection,
    lock: threading.Lock,
) -> None:
    sent_s: list[float] = []
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        idx = _prompt_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        due_s = time.perf_counter()
        for event in events:
            due_s += pace_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
            sent_s.append(time.perf_counter())
            connection.sendall(event)
        connection.sendall(_piece(b"data: [DONE]\n\n") + _piece(b""))
    with lock:
        pipe.send((idx, sent_s))


def _prompt_of(connection: socket.socket) -> int:
    request = b""
    while not request.endswith(b"}"):
        request += connection.recv(65536)
    return int(json.loads(request.partition(b"\r\n\r\n")[2])["text"])


def _event(number: int) -> bytes:
    tokens = number * TOKENS_AN_EVENT
    is_last = number == EVENT_COUNT
    content = {
        "text": " word" * tokens,
        "output_ids": [100] * tokens,
        "meta_info": {
            "id": "0" * 32,
            "finish_reason": {"type": "length", "length": tokens} if is_last else None,
            "prompt_tokens": 30,
            "completion_tokens": tokens,
            "cached_tokens": 0,
        },
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _piece(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


if __name__ == "__main__":
    sys.exit(main())
