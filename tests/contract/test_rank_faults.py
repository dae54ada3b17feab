"""Which rank a fault is put down to, and that the host's slowness is put down to none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.measurement import Outcome, PayloadRequest
from tests.support.hosts import standin_bench

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nccltune.bench.prepared import PreparedServer

REQUESTS = (PayloadRequest(43008, 123), PayloadRequest(14336, 123))
FAULTY = {"NCCL_MAX_CTAS": "1"}
IN_FORCE = "NCCL_MAX_CTAS=1"
DEADLINE_S = 0.6
SLOW_EXIT = {"STANDIN_EXIT_S": "1.0"}
"""Longer than the deadline, as a driver can take to let a process go."""

rank_counts = pytest.mark.parametrize("rank_count", [2, 4, 8])


def faults_in(kind: str, *ranks: int) -> str:
    """One fault in each of the ranks."""
    return ";".join(f"{kind}@{rank}:{IN_FORCE}" for rank in ranks)


def others_of(rank_count: int, *ranks: int) -> str:
    """Name all other ranks."""
    others = [str(rank) for rank in range(rank_count) if rank not in ranks]
    return f"rank {others[0]} waits" if len(others) == 1 else f"ranks {', '.join(others)} wait"


@rank_counts
@pytest.mark.parametrize("is_first", [True, False], ids=["rank-0", "rank-in-the-middle"])
def test_rank_that_never_begins_is_named_and_the_others_wait_for_it(
    rank_count: int, is_first: bool
) -> None:
    hung = 0 if is_first else rank_count // 2
    with standin_bench(
        rank_count, test_fault=faults_in("hang", hung), deadline_s=DEADLINE_S
    ) as bench:
        launch = bench.launch(FAULTY, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.TIMEOUT, hung)
    assert launch.message == (
        f"rank {hung} did not answer within 0.6 s while measuring 43008 B (not begun);"
        f" {others_of(rank_count, hung)} for it"
    )


@rank_counts
def test_rank_that_hangs_between_two_collectives_is_named(rank_count: int) -> None:
    hung = rank_count // 2
    faults = faults_in("hang_between", hung)
    with standin_bench(rank_count, faults=faults, deadline_s=DEADLINE_S) as bench:
        launch = bench.launch(FAULTY, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.TIMEOUT, hung)
    assert launch.message == (
        f"rank {hung} did not answer within 0.6 s while measuring 43008 B"
        f" (waiting for the first all-reduce); {others_of(rank_count, hung)} for it"
    )


@pytest.mark.parametrize("rank_count", [4, 8])
def test_two_ranks_that_hang_are_both_named(rank_count: int) -> None:
    hung = (1, rank_count - 1)
    faults = faults_in("hang_between", *hung)
    with standin_bench(rank_count, faults=faults, deadline_s=DEADLINE_S) as bench:
        launch = bench.launch(FAULTY, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.TIMEOUT, None)
    assert launch.message.startswith(f"ranks 1, {rank_count - 1} did not answer")
    assert launch.message.endswith(f"{others_of(rank_count, *hung)} for them")


@rank_counts
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("hang_in_collective", "measuring 43008 B (all in the same step: waiting for the first"),
        ("hang_in_init", "joining the communicator (all in the same step: joining"),
    ],
)
def test_hang_inside_what_all_ranks_have_begun_blames_none(
    rank_count: int, kind: str, step: str
) -> None:
    faults = faults_in(kind, rank_count - 1)
    with standin_bench(rank_count, faults=faults, deadline_s=DEADLINE_S) as bench:
        launch = bench.launch(FAULTY, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.TIMEOUT, None)
    assert launch.message.startswith(f"no rank answered within 0.6 s while {step}")


def wrong_among(rank_count: int) -> Iterator[tuple[tuple[int, ...], str, int | None]]:
    """Ranks that are wrong, how they are named, and whom that blames."""
    last = rank_count - 1
    yield (last,), f"in rank {last}", last
    yield tuple(range(rank_count)), "in all ranks", None
    if rank_count > 2:
        yield (1, last), f"in ranks 1, {last}", None


WRONG = [
    pytest.param(count, *one, id=f"{count}-{one[1]}") for count in (2, 4, 8)
    for one in wrong_among(count)
]  # fmt: skip


@pytest.mark.parametrize(("rank_count", "wrong", "named", "blamed"), WRONG)
def test_wrong_data_names_the_ranks_that_have_it(
    rank_count: int, wrong: tuple[int, ...], named: str, blamed: int | None
) -> None:
    faults = ";".join(
        f"{kind}@{rank}:NCCL_MAX_CTAS={value}"
        for kind, value in (("wrong_collective", 2), ("wrong_gather", 3))
        for rank in wrong
    )
    hooks = faults_in("wrong_data", *wrong)
    with standin_bench(rank_count, faults=faults, test_fault=hooks) as bench:
        launches = [
            bench.launch(FAULTY, REQUESTS),
            bench.check_collectives({"NCCL_MAX_CTAS": "2"}, REQUESTS),
            bench.check_collectives({"NCCL_MAX_CTAS": "3"}, REQUESTS),
        ]

    assert [one.message for one in launches] == [
        f"wrong data in an all-reduce of 43008 B {named}",
        f"wrong data in all_gather {named}",
        f"wrong data in an all-gather of 43008 B a rank {named}",
    ]
    assert {(one.outcome, one.failed_rank) for one in launches} == {(Outcome.WRONG_DATA, blamed)}


@rank_counts
def test_slow_end_of_the_launch_before_is_not_charged_to_the_next(rank_count: int) -> None:
    with standin_bench(rank_count, base=SLOW_EXIT, deadline_s=DEADLINE_S) as bench:
        launches = [bench.launch({"NCCL_MIN_CTAS": n}, REQUESTS) for n in ("1", "2")]

    assert [(one.outcome, one.message) for one in launches] == [(Outcome.OK, "")] * 2
    assert launches[1].duration_s > DEADLINE_S


@rank_counts
def test_candidate_that_hangs_after_a_slow_end_still_costs_one_deadline(rank_count: int) -> None:
    faults = faults_in("hang_between", 1)
    with standin_bench(rank_count, base=SLOW_EXIT, faults=faults, deadline_s=DEADLINE_S) as bench:
        bench.launch({}, REQUESTS)
        launch = bench.launch(FAULTY, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.TIMEOUT, 1)
    assert launch.duration_s < 1.0 + DEADLINE_S + 1.0


@rank_counts
@pytest.mark.parametrize("is_all", [False, True], ids=["one", "all"])
def test_ranks_that_do_not_end_are_the_hosts_fault_until_they_are_gone(
    rank_count: int, is_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccltune.bench.ranks.REAP_DEADLINE_S", 0.5)
    base = {"STANDIN_EXIT_S": "3600"}
    with standin_bench(rank_count, base=base, deadline_s=20.0) as bench:
        assert bench.launch({}, REQUESTS).outcome is Outcome.OK
        pids = {one.rank: one.pid for one in bench._leaving[0]._processes}
        stuck = pids if is_all else {1: pids[1]}
        kill(pid for rank, pid in pids.items() if rank not in stuck)

        for _ in range(2):
            failed = bench.launch({}, REQUESTS)
            assert (failed.outcome, failed.payloads) == (Outcome.HOST_FAILED, ())
            assert failed.failed_rank == (None if is_all else 1)
            assert ", ".join(f"{pid} (rank {rank})" for rank, pid in stuck.items()) in (
                failed.message
            )
            assert "Xid" in failed.message
            assert failed.duration_s < 1.5  # one limit for all, however many they are

        kill(stuck.values())
        assert bench.launch({}, REQUESTS).outcome is Outcome.OK
        kill(one.pid for one in bench._leaving[0]._processes)


def kill(pids: Iterable[int]) -> None:
    """End processes that take an hour to end."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("rank_count", [4, 8])
def test_fresh_interpreters_start_at_once(rank_count: int) -> None:
    import_s = 0.5
    with standin_bench(
        rank_count, base={"STANDIN_IMPORT_S": str(import_s)}, is_fresh=True
    ) as bench:
        launch = bench.launch({}, REQUESTS)

    assert launch.outcome is Outcome.OK
    assert import_s < launch.duration_s < rank_count * import_s


def test_fresh_interpreters_that_cannot_all_start_leave_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with standin_bench(4, is_fresh=True) as bench:
        begun: list[PreparedServer] = []
        begin = bench._begin_server

        def begin_three() -> PreparedServer:
            if len(begun) == 3:
                raise OSError("no more processes")
            begun.append(begin())
            return begun[-1]

        monkeypatch.setattr(bench, "_begin_server", begin_three)
        with pytest.raises(OSError, match="no more processes"):
            bench.launch({}, REQUESTS)

    assert len(begun) == 3
    assert not any(Path(f"/proc/{one._process.pid}").exists() for one in begun)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("hang_in_context", "opening its GPU"), ("hang_in_reading", "reading memory")],
)
def test_host_that_hangs_before_settings_are_read_is_no_candidates_fault(
    kind: str, what: str
) -> None:
    with standin_bench(2, faults=faults_in(kind, 1), deadline_s=DEADLINE_S) as bench:
        launch = bench.launch(FAULTY, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.HOST_FAILED, 1)
    assert launch.message == f"rank 1 did not answer within 0.6 s while {what}"
