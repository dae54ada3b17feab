"""Processes that do not end: they alone are named, they hold up no other, and nothing forgets them.

A driver that holds a process cannot be had here. ``Driver`` stands in for it: what has ended counts
as held until it lets go.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.bench.host import rank_environ
from nccltune.bench.prepared import UNKNOWN_STATUS, PreparedServer, RankProcess
from nccltune.measurement import Outcome, PayloadRequest
from tests.support.hosts import REPOSITORY, STANDIN_MODULE, standin_bench, standin_plan

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

REQUESTS = (PayloadRequest(43008, 123),)
FAULTY = {"NCCL_MAX_CTAS": "1"}
REAP_S = 0.3


class Driver:
    """Holds the processes of some ranks.

    Attributes:
        held: these ranks.
        limits_s: how long each wait was to last, seconds.
    """

    def __init__(self, patch: pytest.MonkeyPatch, held: Collection[int]) -> None:
        self.held = set(held)
        self.limits_s: list[float] = []
        reap = PreparedServer.reap

        def held_reap(
            server: PreparedServer, processes: Sequence[RankProcess], within_s: float
        ) -> dict[int, int | None]:
            end = time.monotonic() + within_s
            self.limits_s.append(within_s)
            free = [process for process in processes if process.rank not in self.held]
            statuses = reap(server, free, within_s)
            for process in processes:
                if process.rank in self.held:
                    process.connection.close()
                    time.sleep(max(0.0, end - time.monotonic()))
                    statuses[process.pid] = None
            return statuses

        patch.setattr(PreparedServer, "reap", held_reap)
        patch.setattr("nccltune.bench.ranks.REAP_DEADLINE_S", REAP_S)


@pytest.mark.parametrize(
    ("kind", "rank_count", "held"),
    [
        ("segfault", 4, [1]),
        ("segfault", 4, [0, 1, 2, 3]),
        ("exit", 8, [1, 6]),
        ("error", 2, [1]),
        ("hang_between", 4, [1]),
    ],
)
def test_only_ranks_that_their_driver_holds_are_named_until_it_lets_go(
    kind: str, rank_count: int, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccltune.bench.ranks.DEATH_DEADLINE_S", 0.1)
    faults = ";".join(f"{kind}@{rank}:NCCL_MAX_CTAS=1" for rank in held)
    with standin_bench(rank_count, faults=faults, deadline_s=1.0) as bench:
        assert bench.launch({}, REQUESTS).outcome is Outcome.OK
        bench._await_last()
        driver = Driver(monkeypatch, held)

        failed = [bench.launch(FAULTY, REQUESTS), bench.launch({}, REQUESTS)]

        for launch in failed:
            assert (launch.outcome, launch.payloads) == (Outcome.HOST_FAILED, ())
            assert launch.failed_rank == (held[0] if len(held) == 1 else None)
            assert launch.message.startswith("rank processes that have not ended within 0.3 s: ")
            named = [rank for rank in range(rank_count) if f"(rank {rank})" in launch.message]
            assert named == held
        # Whoever is told to end has all the time, whatever was spent on others before.
        deaths = {0.1} if kind in ("segfault", "exit") else set()
        assert {round(limit_s, 1) for limit_s in driver.limits_s} == {REAP_S} | deaths
        driver.held.clear()
        assert bench.launch({}, REQUESTS).outcome is Outcome.OK


def test_bench_closes_although_a_rank_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin_bench(2, faults="segfault@1:NCCL_MAX_CTAS=1", deadline_s=5.0) as bench:
        monkeypatch.setattr("nccltune.bench.ranks.DEATH_DEADLINE_S", 0.1)
        Driver(monkeypatch, {1})
        assert bench.launch(FAULTY, REQUESTS).outcome is Outcome.HOST_FAILED
        server, folder = bench._server._process, bench._folder

    assert server.poll() is not None
    assert not folder.exists()


def test_what_a_rank_started_ends_with_the_bench_although_the_rank_did_not_end_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nccltune.bench.ranks.REAP_DEADLINE_S", 0.1)
    mark = f"test-rank-stuck-{os.getpid()}"
    base = {"STANDIN_EXIT_S": "3600", "STANDIN_MARK": mark}
    with standin_bench(2, faults="child@1:NCCL_MAX_CTAS=1", base=base) as bench:
        assert bench.launch(FAULTY, REQUESTS).outcome is Outcome.OK
        assert len(marked(mark)) == 4  # the server, two ranks and the child

    end = time.monotonic() + 5.0
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def marked(mark: str) -> list[int]:
    """Every process with a mark in its environment as it was started; no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def test_wait_for_ranks_whose_server_has_gone_ends_too() -> None:
    environ = rank_environ({"PYTHONPATH": str(REPOSITORY)}, standin_plan(2), 0, {})
    server = PreparedServer(STANDIN_MODULE, environ)
    server.await_ready()
    server._process.kill()
    server._process.wait()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"]) as stuck:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        pids = (stuck.pid, ended.pid)
        ours, theirs = zip(*(Pipe() for _ in pids), strict=True)
        ranks = [RankProcess(rank, pid, ours[rank]) for rank, pid in enumerate(pids)]
        began = time.monotonic()
        statuses = server.reap(ranks, 0.2)
        took_s = time.monotonic() - began
        stuck.kill()
    server.close()
    for connection in theirs:
        connection.close()

    assert statuses == {stuck.pid: None, ended.pid: UNKNOWN_STATUS}
    assert 0.2 <= took_s < 5.0
    assert server.is_gone
