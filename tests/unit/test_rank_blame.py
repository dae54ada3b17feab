"""Steps that ranks note, and the words for a fault."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from nccltune.bench.faults import hang_fault, name_ranks, stuck_fault, wrong_data_fault
from nccltune.bench.steps import Step, StepFile, read_step
from nccltune.measurement import Outcome

WHEN = "within 8 s while measuring 43008 B"
FIRST, CHECK = Step(2, "waiting for the first all-reduce"), Step(4, "waiting for the data check")


def test_last_step_is_kept_whatever_was_longer_before(tmp_path: Path) -> None:
    path = tmp_path / "rank0.step"
    steps = StepFile(str(path))
    assert read_step(path) == Step()

    steps.note("waiting for the first all-reduce")
    steps.note("timing")
    assert read_step(path) == Step(2, "timing")

    steps.rest()
    assert read_step(path) == Step()
    steps.note("joining")
    assert read_step(path) == Step(1, "joining")


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b"no number\n"])
def test_step_that_cannot_be_read_is_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rank0.step"
    if content is not None:
        path.write_bytes(content)

    assert read_step(path) == Step()


def test_step_that_cannot_be_written_stops_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = StepFile("/dev/full")

    with pytest.raises(OSError, match="space"):
        os.pwrite(steps._descriptor, b"1\n", 0)
    steps.note("joining")
    steps.rest()


@pytest.mark.parametrize(
    ("ranks", "named"),
    [([6], "rank 6"), ([6, 1], "ranks 1, 6"), (range(8), "all ranks")],
)
def test_ranks_are_named_in_order(ranks: list[int], named: str) -> None:
    assert name_ranks(ranks, 8) == named


def test_single_rank_is_named_although_it_is_all() -> None:
    assert name_ranks([0], 1) == "rank 0"


@pytest.mark.parametrize("rank_count", [2, 4, 8])
def test_hang_is_put_down_to_those_furthest_behind_whoever_they_are(rank_count: int) -> None:
    rng = random.Random(rank_count)
    for _ in range(50):
        behind = sorted(rng.sample(range(rank_count), rng.randint(1, rank_count - 1)))
        steps = {r: FIRST if r in behind else CHECK for r in range(rank_count)}
        fault = hang_fault(steps, steps, rank_count, WHEN)

        assert fault.outcome is Outcome.TIMEOUT
        assert fault.rank == (behind[0] if len(behind) == 1 else None)
        assert str(fault).startswith(f"{name_ranks(behind, rank_count)} did not answer {WHEN} (")
        assert FIRST.what in str(fault)
        assert CHECK.what not in str(fault)


@pytest.mark.parametrize("rank_count", [2, 4, 8])
def test_hang_in_one_step_of_all_ranks_names_step_and_size_but_no_rank(rank_count: int) -> None:
    steps = dict.fromkeys(range(rank_count), FIRST)
    fault = hang_fault(steps, steps, rank_count, WHEN)

    assert fault.rank is None
    assert str(fault) == f"no rank answered {WHEN} (all in the same step: {FIRST.what})"


def test_only_late_rank_is_named_although_the_others_have_answered() -> None:
    fault = hang_fault({5: CHECK}, {5: CHECK}, 8, WHEN)

    assert (fault.rank, str(fault)) == (5, f"rank 5 did not answer {WHEN} ({CHECK.what})")


def test_ranks_that_still_move_are_slow_and_nobody_is_named() -> None:
    earlier = {0: FIRST, 1: FIRST, 2: CHECK}
    later = {0: Step(3, "capturing the graph"), 1: CHECK, 2: CHECK}
    fault = hang_fault(earlier, later, 3, WHEN)

    assert fault.rank is None
    assert str(fault) == f"no rank answered {WHEN} (still at work: capturing the graph)"


def test_rank_that_hangs_while_another_still_moves_is_named() -> None:
    earlier, later = {0: FIRST, 1: FIRST}, {0: FIRST, 1: CHECK}

    assert hang_fault(earlier, later, 2, WHEN).rank == 0


def test_ranks_late_in_what_has_no_steps_are_only_named() -> None:
    steps = {1: Step(), 3: Step()}

    assert str(hang_fault(steps, steps, 4, WHEN)) == f"ranks 1, 3 did not answer {WHEN}"


@pytest.mark.parametrize("rank_count", [2, 4, 8])
def test_no_words_promise_what_does_not_follow(rank_count: int) -> None:
    steps = (Step(), FIRST, CHECK)
    for earlier in steps:
        for later in steps:
            for others in steps:
                rest = dict.fromkeys(range(1, rank_count), others)
                fault = hang_fault({0: earlier, **rest}, {0: later, **rest}, rank_count, "in 1 s")

                assert ": )" not in str(fault)
                assert "()" not in str(fault)


def test_wrong_data_names_ranks_by_collective() -> None:
    wrong = {"all_gather": [6], "broadcast": [], "reduce_scatter": [1, 6]}
    fault = wrong_data_fault(wrong, 8)

    assert fault is not None
    assert (fault.outcome, fault.rank) == (Outcome.WRONG_DATA, None)
    assert str(fault) == "wrong data in all_gather in rank 6, reduce_scatter in ranks 1, 6"
    assert wrong_data_fault({"all_gather": []}, 8) is None


def test_wrong_data_of_one_rank_in_several_collectives_blames_it() -> None:
    fault = wrong_data_fault({"all_gather": [6], "broadcast": [6]}, 8)

    assert fault is not None
    assert fault.rank == 6


def test_stuck_processes_are_listed_with_what_to_do() -> None:
    one, several = stuck_fault({3: 77}, 10.0), stuck_fault({5: 79, 3: 77}, 10.0)

    assert (one.outcome, one.rank, several.rank) == (Outcome.HOST_FAILED, 3, None)
    assert str(one).startswith("rank processes that have not ended within 10 s: 77 (rank 3); look")
    assert "10 s: 77 (rank 3), 79 (rank 5); look for Xid errors in dmesg" in str(several)
    assert str(several).endswith("reset the GPU or restart the host")
