"""The launcher against real rank processes that stand in for GPUs: every way a launch can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.errors import HostError, RankError
from nccltune.measurement import Outcome, PayloadRequest
from tests.support.hosts import REPOSITORY, standin_bench, standin_plan
from tests.support.standin_device import BASE_US, BYTES_PER_US

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nccltune.bench.launcher import GpuBench
from nccltune.bench.gpu_watch import GpuWatch
from nccltune.bench.leftovers import list_segments

REQUESTS = (PayloadRequest(43008, 123), PayloadRequest(67108864, 4), PayloadRequest(14336, 123))
FAULTS = (
    "crash@1:NCCL_BUFFSIZE=1000;segfault@0:NCCL_BUFFSIZE=2000;exit@1:NCCL_BUFFSIZE=3000"
    ";reject@0:NCCL_PROTO=bogus;reject@1:NCCL_PROTO=bogus"
    ";unsupported@0:NCCL_ALGO=allreduce:CollnetDirect"
    ";unsupported@1:NCCL_ALGO=allreduce:CollnetDirect"
    ";error@1:NCCL_NTHREADS=64;leak@0:NCCL_NTHREADS=128;gone@1:NCCL_NTHREADS=256"
    ";hang_in_init@0:NCCL_NTHREADS=512;wrong_collective@1:NCCL_MAX_CTAS=1"
)
MARK = f"test-gpu-bench-{os.getpid()}"
"""In the environment of all that descends from the bench, whoever its parent is by now."""


@pytest.fixture(scope="module")
def bench() -> Iterator[GpuBench]:
    test_fault = "hang@1:NCCL_MAX_CTAS=3;wrong_data@0:NCCL_MAX_CTAS=5"
    base = {"STANDIN_MARK": MARK}
    with standin_bench(2, faults=FAULTS, base=base, test_fault=test_fault, deadline_s=2.0) as bench:
        yield bench


def rank_pids(bench: GpuBench) -> list[int]:
    """Every process that descends from the bench's server once those that leave are gone."""
    bench._await_last()
    server = bench._server._process.pid
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != server:
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z" and int(stat[1]) == server:
                found.append(int(entry.name))
    return found


def test_launch_measures_every_payload_in_order(bench: GpuBench) -> None:
    launch = bench.launch({}, REQUESTS)

    assert launch.outcome is Outcome.OK
    assert [p.size_bytes for p in launch.payloads] == [43008, 67108864, 14336]
    assert all(len(p.samples_us) == 12 and p.is_data_ok for p in launch.payloads)
    assert {"start", "context", "communicator", "measure", "teardown"} <= launch.phases_s.keys()
    assert rank_pids(bench) == []


def test_launch_pruned_by_caller_keeps_what_was_measured(bench: GpuBench) -> None:
    launch = bench.launch({}, REQUESTS, keep_going=lambda payload: payload.size_bytes != 67108864)

    assert launch.outcome is Outcome.OK
    assert launch.is_pruned
    assert [p.size_bytes for p in launch.payloads] == [43008, 67108864]


@pytest.mark.parametrize(
    ("settings", "outcome", "message"),
    [
        ({"NCCL_BUFFSIZE": "1000"}, Outcome.CRASHED, "rank 1 died of SIGFPE while measuring"),
        ({"NCCL_BUFFSIZE": "2000"}, Outcome.CRASHED, "rank 0 died of SIGSEGV while measuring"),
        ({"NCCL_BUFFSIZE": "3000"}, Outcome.CRASHED, "something told on the way out"),
        ({"NCCL_PROTO": "bogus"}, Outcome.REJECTED, 'element token "bogus"'),
        ({"NCCL_ALGO": "allreduce:CollnetDirect"}, Outcome.UNSUPPORTED, "no algorithm/protocol"),
        ({"NCCL_NTHREADS": "64"}, Outcome.CRASHED, "rank 1 while measuring 43008 B: RuntimeError"),
        ({"NCCL_NTHREADS": "128"}, Outcome.TIMEOUT, "rank 0 did not answer within 2 s"),
        ({"NCCL_NTHREADS": "256"}, Outcome.HOST_FAILED, "no CUDA-capable device"),
        ({"NCCL_NTHREADS": "512"}, Outcome.TIMEOUT, "while joining the communicator"),
        ({"NCCL_MAX_CTAS": "3"}, Outcome.TIMEOUT, "rank 1 did not answer within 2 s"),
        ({"NCCL_MAX_CTAS": "5"}, Outcome.WRONG_DATA, "wrong data in an all-reduce of 43008 B"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else None,
)
def test_launch_with_a_fault_is_told_apart_and_leaves_nothing(
    bench: GpuBench, settings: dict[str, str], outcome: Outcome, message: str
) -> None:
    began = time.monotonic()
    launch = bench.launch(settings, REQUESTS)

    assert launch.outcome is outcome
    assert message in launch.message
    assert time.monotonic() - began < 2.0 + 1.5
    assert rank_pids(bench) == []
    assert bench.launch({}, REQUESTS).outcome is Outcome.OK


def test_launch_with_a_child_of_its_own_kills_it_too(bench: GpuBench) -> None:
    bench.launch({"NCCL_NTHREADS": "128"}, REQUESTS)

    assert marked_pids() == [bench._server._process.pid]


def marked_pids() -> list[int]:
    """Every process that the bench or its ranks have started, zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if MARK.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def test_check_collectives_reports_wrong_data_and_memory(bench: GpuBench) -> None:
    good = bench.check_collectives({})
    bad = bench.check_collectives({"NCCL_MAX_CTAS": "1"})

    assert good.outcome is Outcome.OK
    assert good.memory_bytes == (1 << 26, 1 << 26)
    assert bad.outcome is Outcome.WRONG_DATA
    assert "all_gather" in bad.message


GATHERS = [PayloadRequest(96000, 16), PayloadRequest(32000, 16)]


@pytest.mark.parametrize("rank_count", [2, 8])
def test_check_collectives_times_all_gathers_of_the_slowest_rank(rank_count: int) -> None:
    with standin_bench(rank_count, deadline_s=20.0) as bench:
        plain = bench.check_collectives({})
        launch = bench.check_collectives({}, GATHERS)

    assert (plain.outcome, plain.gathers) == (Outcome.OK, ())
    assert (launch.outcome, launch.payloads) == (Outcome.OK, ())
    assert launch.memory_bytes == plain.memory_bytes
    assert [one.size_bytes for one in launch.gathers] == [96000, 32000]
    assert all(len(one.samples_us) == 12 and one.is_data_ok for one in launch.gathers)
    assert launch.gather_median_us[96000] == 2.0 * (BASE_US + rank_count * 96000 / BYTES_PER_US)


@pytest.mark.parametrize(
    ("fault", "outcome", "message", "timed"),
    [
        ("wrong_collective", Outcome.WRONG_DATA, "wrong data in all_gather", []),
        ("wrong_gather", Outcome.WRONG_DATA, "wrong data in an all-gather of 96000 B", [96000]),
        ("unsupported_gather", Outcome.UNSUPPORTED, "no algorithm/protocol", []),
    ],
)
def test_check_collectives_ends_with_the_first_all_gather_that_fails(
    fault: str, outcome: Outcome, message: str, timed: list[int]
) -> None:
    with standin_bench(2, faults=f"{fault}@1:NCCL_MAX_CTAS=1", deadline_s=20.0) as bench:
        launch = bench.check_collectives({"NCCL_MAX_CTAS": "1"}, GATHERS)

    assert launch.outcome is outcome
    assert message in launch.message
    assert [one.size_bytes for one in launch.gathers] == timed
    assert len(launch.memory_bytes) == 2


@pytest.mark.parametrize("rank_count", [4, 6, 8])
def test_launch_names_the_one_faulty_rank_among_many(rank_count: int) -> None:
    faults = f"crash@{rank_count - 1}:NCCL_BUFFSIZE=1000"
    with standin_bench(rank_count, faults=faults, deadline_s=20.0) as many:
        good = many.launch({}, REQUESTS)
        bad = many.launch({"NCCL_BUFFSIZE": "1000"}, REQUESTS)

    assert good.outcome is Outcome.OK
    assert bad.outcome is Outcome.CRASHED
    assert bad.failed_rank == rank_count - 1


def test_fresh_interpreters_measure_the_same_way() -> None:
    with standin_bench(2, is_fresh=True, deadline_s=20.0) as bench:
        assert bench.launch({}, REQUESTS[:1]).outcome is Outcome.OK


def test_server_that_cannot_load_nccl_says_so() -> None:
    with pytest.raises(RankError, match=r"libnccl\.so\.2.*SGLANG_NCCL_SO_PATH"):
        standin_bench(2, base={"CUDA_HOME": "/broken"})


def test_ranks_get_nothing_of_the_callers_nccl_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "bogus")
    with standin_bench(2, faults="reject@0:NCCL_PROTO=bogus") as bench:
        assert bench.launch({}, REQUESTS[:1]).outcome is Outcome.OK


def test_memory_that_does_not_come_back_is_the_hosts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nccltune.bench.gpu_watch.MEMORY_RETURN_DEADLINE_S", 0.2)
    readings = iter([{"GPU-0": 0}] + [{"GPU-0": 1 << 30}] * 50)
    watch = GpuWatch(lambda: next(readings))
    with standin_bench(2, faults=FAULTS, watch=watch) as bench:
        launch = bench.launch({"NCCL_PROTO": "bogus"}, REQUESTS)

    assert launch.outcome is Outcome.HOST_FAILED
    assert "1024 MiB did not come back on GPU GPU-0" in launch.message


def test_driver_that_stops_answering_is_the_hosts_fault() -> None:
    def lost() -> dict[str, int]:
        raise HostError("GPU 1 is lost", code="gpu_lost")

    with standin_bench(2, watch=GpuWatch(lost)) as bench:
        launch = bench.launch({}, REQUESTS)

    assert (launch.outcome, launch.message) == (Outcome.HOST_FAILED, "GPU 1 is lost")


def test_somebody_else_on_the_gpus_is_host_busy_and_no_fault_of_the_settings() -> None:
    ours = ["GPU-00000000", "GPU-00000001"]
    seen = iter([ours, [*ours, "GPU-00000001"]])
    with standin_bench(2, watch=GpuWatch(None, lambda: next(seen))) as bench:
        alone, busy = bench.launch({}, REQUESTS), bench.launch({}, REQUESTS)

    assert alone.outcome is Outcome.OK
    assert busy.outcome is Outcome.HOST_BUSY
    assert "GPU-00000001: 2 processes" in busy.message
    assert not busy.outcome.is_candidates_fault


def test_shared_memory_of_killed_ranks_is_removed() -> None:
    before = list_segments()
    with standin_bench(2, faults="segment@0:NCCL_MAX_CTAS=1", deadline_s=5.0) as bench:
        launch = bench.launch({"NCCL_MAX_CTAS": "1"}, REQUESTS)

        assert launch.outcome is Outcome.CRASHED
        assert list_segments() == before


def test_server_killed_between_launches_is_started_again(tmp_path: Path) -> None:
    with standin_bench(2, deadline_s=20.0) as bench:
        assert bench.launch({}, REQUESTS).outcome is Outcome.OK
        before = bench._server._process.pid
        os.kill(before, signal.SIGKILL)

        again = bench.launch({}, REQUESTS)
        assert bench._server._process.pid != before
        assert rank_pids(bench) == []
        assert bench.launch({}, REQUESTS).message == ""

    assert again.outcome is Outcome.OK
    assert len(again.payloads) == len(REQUESTS)
    assert "launched again" in again.message
    assert "was killed (SIGKILL)" in again.message


def test_server_killed_with_a_rank_of_its_own_says_nothing_of_the_settings(tmp_path: Path) -> None:
    base = {"STANDIN_ONCE": str(tmp_path / "mark")}
    faults = "out_of_memory@1:NCCL_NTHREADS=64"
    with standin_bench(2, faults=faults, base=base, deadline_s=20.0) as bench:
        launch = bench.launch({"NCCL_NTHREADS": "64"}, REQUESTS)
        assert rank_pids(bench) == []

    assert (tmp_path / "mark").exists()
    assert (launch.outcome, launch.settings) == (Outcome.OK, {"NCCL_NTHREADS": "64"})
    assert len(launch.payloads) == len(REQUESTS)


def test_server_killed_again_at_once_ends_with_what_to_do() -> None:
    with standin_bench(2, faults="out_of_memory@1:NCCL_NTHREADS=64", deadline_s=20.0) as bench:
        with pytest.raises(RankError, match=r"was killed \(SIGKILL\).*make room") as caught:
            bench.launch({"NCCL_NTHREADS": "64"}, REQUESTS)

        assert caught.value.code == "rank_server_gone"
        assert bench.launch({}, REQUESTS).outcome is Outcome.OK  # another attempt is another start


def test_killed_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    program = tmp_path / "launcher.py"
    program.write_text(
        "from tests.support.hosts import standin_bench\n"
        "from nccltune.measurement import PayloadRequest\n"
        "bench = standin_bench(2, faults='leak@0:NCCL_NTHREADS=64', deadline_s=60.0)\n"
        "print(bench._server._process.pid, flush=True)\n"
        "bench.launch({'NCCL_NTHREADS': '64'}, [PayloadRequest(43008, 123)])\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    launcher = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    children = Path(f"/proc/{server}/task/{server}/children")
    end = time.monotonic() + 20
    while len(ranks := children.read_text().split()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    pids = [server, *map(int, ranks)]
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)

    assert len(ranks) == 2
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_standin_plan_gives_each_rank_a_gpu_of_its_own() -> None:
    plan = standin_plan(8)
    assert len(set(plan.uuids)) == 8
