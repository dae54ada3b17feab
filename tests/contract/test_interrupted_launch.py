"""Ctrl-C at any instant of a launch: it ends at once, and nothing is left."""

from __future__ import annotations

import gc
import random
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.measurement import PayloadRequest
from tests.support.hosts import standin_bench

if TYPE_CHECKING:
    from types import FrameType

    from nccltune.bench.launcher import GpuBench

REQUESTS = (PayloadRequest(43008, 123), PayloadRequest(14336, 123))


@contextmanager
def ctrl_c_after(delay_s: float) -> Iterator[None]:
    """Press Ctrl-C after a delay, unless the block is over by then."""
    is_armed = True

    def press(_number: int, _frame: FrameType | None) -> None:
        if is_armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    try:
        yield
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def processes_of(bench: GpuBench) -> list[int]:
    """The bench's server and its ranks, zombies aside."""
    server = bench._server._process.pid
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z" and server in (int(entry.name), int(parent)):
            found.append(int(entry.name))
    return found


@contextmanager
def unclosed_allowed() -> Iterator[None]:
    """Let what an interrupt caught between being opened and being named close by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def time_to_end(bench: GpuBench, delay_s: float) -> float:
    """Interrupt the next launch and close the bench; return what both took beside the delay."""
    began = time.monotonic()
    with unclosed_allowed():
        try:
            with ctrl_c_after(delay_s):
                bench.launch({}, REQUESTS)
        except KeyboardInterrupt:
            pass
        bench.close()
        return time.monotonic() - began - delay_s


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("launch_count", [0, 1], ids=["first", "second"])
def test_launch_interrupted_at_any_instant_ends_at_once(seed: int, launch_count: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        bench = standin_bench(4, deadline_s=30.0)
        for _ in range(launch_count):
            bench.launch({}, REQUESTS)

        assert time_to_end(bench, rng.uniform(0.0005, 0.02)) < 1.5
        assert processes_of(bench) == []


def test_launch_interrupted_between_the_answers_to_a_fork_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = standin_bench(4, deadline_s=30.0)

    def interrupt(_connection: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(reduction, "recv_handle", interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bench.launch({}, REQUESTS)
    bench.close()

    assert time.monotonic() - began < 1.5
    assert processes_of(bench) == []
