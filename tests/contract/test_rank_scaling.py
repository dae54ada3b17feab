"""Every number of ranks that one host can have, on rank processes that stand in for GPUs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from nccltune.bench.faults import RankFault
from nccltune.bench.launch_record import slowest_of
from nccltune.bench.launcher import GpuBench
from nccltune.bench.rank import RankSamples
from nccltune.bench.ranks import Ranks
from nccltune.measurement import Outcome, PayloadRequest
from nccltune.payloads.derive import default_workload
from nccltune.search.engine import SearchPlan, run_search
from nccltune.search.result import Verdict
from tests.support.hosts import STANDIN_MODULE, standin_bench, standin_plan
from tests.support.search_program import Loud
from tests.support.studies import FACTS, OBJECTIVE

RANK_COUNTS = (2, 4, 6, 8)
REQUESTS = (PayloadRequest(43008, 123), PayloadRequest(67108864, 4))
WINNER = {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"}


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for one that has crashed; nothing worse shows here later."""
    monkeypatch.setattr("nccltune.bench.ranks.FAULT_GRACE_S", 0.1)


class Quiet(Loud):
    """Says nothing."""

    def update(self, progress: object) -> None:
        """Take no note."""


def faults_of(rank_count: int) -> str:
    """Settings by which each rank in turn can be made to fail, and the last in several ways."""
    last = rank_count - 1
    crashes = [f"crash@{rank}:NCCL_MIN_CTAS={rank + 1}" for rank in range(rank_count)]
    rejects = [f"reject@{rank}:NCCL_PROTO=bogus" for rank in range(rank_count)]
    others = [f"leak@{last}:NCCL_NTHREADS=128", f"wrong_collective@{last}:NCCL_NTHREADS=256"]
    return ";".join([*crashes, *rejects, *others, f"gone@{last}:NCCL_NTHREADS=512"])


@pytest.fixture(scope="module", params=RANK_COUNTS)
def rank_count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def bench(rank_count: int) -> Iterator[GpuBench]:
    faults = faults_of(rank_count)
    hooks = f"wrong_data@{rank_count - 1}:NCCL_MAX_CTAS=5"
    with standin_bench(rank_count, faults=faults, test_fault=hooks, deadline_s=1.0) as bench:
        yield bench


def children(bench: GpuBench) -> list[int]:
    """Ranks that are still there once those that leave are gone."""
    bench._await_last()
    server = bench._server._process.pid
    return [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


def test_launch_measures_on_all_ranks_and_leaves_none(bench: GpuBench) -> None:
    launch = bench.launch({}, REQUESTS)

    assert launch.outcome is Outcome.OK
    assert all(len(payload.samples_us) == REQUESTS[0].replay_count for payload in launch.payloads)
    assert children(bench) == []


def test_launch_names_whichever_rank_crashes(bench: GpuBench, rank_count: int) -> None:
    for rank in range(rank_count):
        launch = bench.launch({"NCCL_MIN_CTAS": str(rank + 1)}, REQUESTS)
        assert (launch.outcome, launch.failed_rank) == (Outcome.CRASHED, rank)
    assert children(bench) == []


def test_launch_that_hangs_in_one_rank_costs_one_deadline(bench: GpuBench, rank_count: int) -> None:
    began = time.monotonic()
    launch = bench.launch({"NCCL_NTHREADS": "128"}, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.TIMEOUT, rank_count - 1)
    assert time.monotonic() - began < 2.5
    assert children(bench) == []


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({"NCCL_PROTO": "bogus"}, Outcome.REJECTED),
        ({"NCCL_NTHREADS": "512"}, Outcome.HOST_FAILED),
        ({"NCCL_MAX_CTAS": "5"}, Outcome.WRONG_DATA),
    ],
    ids=lambda value: str(value) if isinstance(value, Outcome) else "",
)
def test_launch_with_a_fault_in_the_last_rank_or_in_all_is_told_apart(
    bench: GpuBench, settings: dict[str, str], outcome: Outcome
) -> None:
    assert bench.launch(settings, REQUESTS).outcome is outcome
    assert children(bench) == []


def test_check_collectives_counts_every_rank(bench: GpuBench, rank_count: int) -> None:
    good = bench.check_collectives({})
    bad = bench.check_collectives({"NCCL_NTHREADS": "256"})

    assert good.memory_bytes == (1 << 26,) * rank_count
    assert (bad.outcome, bad.failed_rank) == (Outcome.WRONG_DATA, rank_count - 1)


def test_sample_is_the_slowest_rank_of_each_replay(rank_count: int) -> None:
    measured = slowest_of(
        REQUESTS[0],
        [
            RankSamples((10.0 + rank, 20.0 - rank), is_data_ok=rank != 1)
            for rank in range(rank_count)
        ],
    )

    assert measured.samples_us == (10.0 + rank_count - 1, 20.0)
    assert not measured.is_data_ok


def test_rank_that_writes_garbage_has_crashed(
    bench: GpuBench, rank_count: int, tmp_path: Path
) -> None:
    ranks = Ranks([bench._server], bench._jobs({}, {}, tmp_path), deadline_s=5.0)
    try:
        ranks.await_start()
        ours, theirs = Pipe()
        ranks._processes[-1].connection = ours
        theirs.send_bytes(b"no pickle")
        with pytest.raises(RankFault, match=f"rank {rank_count - 1} answered nonsense") as caught:
            ranks.ask("reading memory", "free_bytes")
    finally:
        ranks.kill()

    assert caught.value.outcome is Outcome.CRASHED
    assert children(bench) == []


def test_fork_gives_each_rank_its_own_device_and_the_settings(rank_count: int) -> None:
    plan = standin_plan(rank_count)
    shared = standin_plan(rank_count, is_shared=True)
    jobs: dict[bool, list[Any]] = {}
    for one in (plan, shared):
        with GpuBench(one, {"PYTHONPATH": "."}, device_module=STANDIN_MODULE) as bench:
            jobs[one.is_shared] = bench._jobs({"NCCL_ALGO": "allreduce:Ring"}, {}, Path("/none"))

    for is_shared, some in jobs.items():
        assert [job.role.rank for job in some] == list(range(rank_count))
        ordinals = [job.role.device_ordinal for job in some]
        assert ordinals == ([0] * rank_count if is_shared else list(range(rank_count)))
        assert {job.environ["NCCL_ALGO"] for job in some} == {"allreduce:Ring"}
    hosts = {job.environ["NCCL_HOSTID"] for job in jobs[True]}
    assert len(hosts) == rank_count
    assert not any("NCCL_HOSTID" in job.environ for job in jobs[False])


def test_search_runs_the_whole_way(bench: GpuBench, rank_count: int, tmp_path: Path) -> None:
    plan = SearchPlan(
        workload=default_workload(),
        facts=FACTS,
        extra_candidates=(WINNER, {"NCCL_PROTO": "bogus"}),
        trial_count=3,
    )
    result = run_search(plan, bench, tmp_path / "x.journal", is_resume=False, observer=Quiet())

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == WINNER
    assert result.outcome_counts == {Outcome.OK: 2, Outcome.REJECTED: 1}
    assert {row.size_bytes for row in result.payloads} == set(OBJECTIVE._graph_counts)
    assert children(bench) == []


def test_shared_gpu_search_says_where_its_numbers_come_from(
    rank_count: int, tmp_path: Path
) -> None:
    plan = SearchPlan(
        workload=default_workload(),
        facts=dataclasses.replace(FACTS, has_full_nvlink=False),
        extra_candidates=(WINNER,),
        trial_count=2,
        is_shared_gpu=True,
    )
    shared = standin_plan(rank_count, is_shared=True)
    with GpuBench(shared, {"PYTHONPATH": "."}, device_module=STANDIN_MODULE) as bench:
        result = run_search(plan, bench, tmp_path / "x.journal", is_resume=False, observer=Quiet())

    assert result.source == "shared-gpu"
    assert max(row.size_bytes for row in result.payloads) <= 1 << 20
