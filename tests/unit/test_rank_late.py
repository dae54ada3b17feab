"""Ranks that answer or die just when the deadline has passed: who is blamed for the launch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from nccltune.bench.faults import RankFault
from nccltune.bench.prepared import PreparedServer, RankProcess
from nccltune.bench.rank import RankJob, Role
from nccltune.bench.ranks import Ranks
from nccltune.bench.steps import Step, StepFile
from nccltune.measurement import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

WHAT = "measuring 43008 B"
FIRST, CHECK = Step(1, "waiting for the first all-reduce"), Step(2, "waiting for the data check")
NO_PID = 1 << 30
"""Larger than any process id."""


class Pipes:
    """A server whose ranks are the far ends of pipes."""

    def __init__(self) -> None:
        self.ends: list[Connection] = []

    def fork(self, job: RankJob) -> RankProcess:
        ours, theirs = Pipe()
        self.ends.append(theirs)
        return RankProcess(job.role.rank, NO_PID + job.role.rank, ours)

    def reap(self, processes: Sequence[RankProcess], within_s: float) -> dict[int, int]:
        for process in processes:
            process.connection.close()
        return {process.pid: signal.SIGSEGV for process in processes}


class Late:
    """Ranks that are all late, and what happens before each of the two looks at their steps."""

    def __init__(self, folder: Path, rank_count: int, patch: pytest.MonkeyPatch) -> None:
        self._pipes = Pipes()
        roles = [Role(rank, rank_count, rank) for rank in range(rank_count)]
        jobs = [
            RankJob(role, {}, str(folder / f"{role.rank}.log"), str(folder / f"{role.rank}.step"))
            for role in roles
        ]
        self._steps = [StepFile(job.step_path) for job in jobs]
        for steps in self._steps:
            steps.note(FIRST.what)
        self.ranks = Ranks([cast("PreparedServer", self._pipes)], jobs, 0.01)
        self.before_look: list[Callable[[], None]] = []
        look = self.ranks._steps

        def eventful_look(late: Sequence[RankProcess]) -> dict[int, Step]:
            if self.before_look:
                self.before_look.pop(0)()
            return look(late)

        patch.setattr(self.ranks, "_steps", eventful_look)
        patch.setattr("nccltune.bench.ranks.STEP_PAUSE_S", 0.0)

    def answer(self, *ranks: int, kind: str = "ok", value: str = "") -> None:
        """End the command of these ranks."""
        for rank in ranks:
            self._steps[rank].rest()
            self._pipes.ends[rank].send((kind, value))

    def die(self, rank: int) -> None:
        """End a rank in the middle of its command."""
        self._pipes.ends[rank].close()

    def move(self, *ranks: int) -> None:
        """Let these ranks come further."""
        for rank in ranks:
            self._steps[rank].note(CHECK.what)

    def fault(self) -> RankFault:
        """Ask all, and return how that fails."""
        with pytest.raises(RankFault) as caught:
            self.ranks.ask(WHAT, "measure")
        return caught.value

    def close(self) -> None:
        """Close all pipes."""
        self.ranks.kill()
        for end in self._pipes.ends:
            end.close()


@contextmanager
def late(folder: Path, rank_count: int) -> Iterator[Late]:
    with pytest.MonkeyPatch.context() as patch:
        ranks = Late(folder, rank_count, patch)
        try:
            yield ranks
        finally:
            ranks.close()


def nothing() -> None:
    """Let a look see what the one before has seen."""


looks = pytest.mark.parametrize("look", [0, 1], ids=["before-both", "between"])


@looks
@pytest.mark.parametrize("rank_count", [2, 4, 8])
@pytest.mark.parametrize("kind", ["one", "all-but-one"])
def test_rank_that_answers_while_steps_are_looked_at_is_not_blamed(
    look: int, rank_count: int, kind: str, tmp_path: Path
) -> None:
    answering = [0] if kind == "one" else list(range(rank_count - 1))
    left = rank_count - len(answering)
    with late(tmp_path, rank_count) as ranks:
        ranks.before_look = [nothing] * look + [lambda: ranks.answer(*answering)]
        fault = ranks.fault()

    assert fault.outcome is Outcome.TIMEOUT
    assert fault.rank == (rank_count - 1 if left == 1 else None)
    named = ", ".join(str(rank) for rank in range(rank_count) if rank not in answering)
    same = "all in the same step: " if left > 1 else ""
    assert str(fault) == (
        f"{'ranks' if left > 1 else 'rank'} {named} did not answer within 0.01 s while {WHAT}"
        f" ({same}{FIRST.what})"
    )


@looks
def test_ranks_that_all_answer_while_steps_are_looked_at_were_only_slow(
    look: int, tmp_path: Path
) -> None:
    with late(tmp_path, 4) as ranks:
        ranks.before_look = [nothing] * look + [lambda: ranks.answer(*range(4))]
        fault = ranks.fault()

    assert (fault.outcome, fault.rank) == (Outcome.TIMEOUT, None)
    assert str(fault) == (
        f"no rank answered within 0.01 s while {WHAT}" + (" (still at work)" if look else "")
    )


@looks
@pytest.mark.parametrize("has_answers", [False, True])
def test_rank_that_dies_while_steps_are_looked_at_is_why_the_others_are_late(
    look: int, has_answers: bool, tmp_path: Path
) -> None:
    with late(tmp_path, 4) as ranks:

        def event() -> None:
            ranks.die(2)
            if has_answers:
                ranks.answer(0)

        ranks.before_look = [nothing] * look + [event]
        fault = ranks.fault()

    assert (fault.outcome, fault.rank) == (Outcome.CRASHED, 2)
    assert str(fault) == f"rank 2 died of SIGSEGV while {WHAT}"


def test_refusal_that_comes_late_is_told_rather_than_the_deadline(tmp_path: Path) -> None:
    with late(tmp_path, 2) as ranks:
        ranks.before_look = [nothing, lambda: ranks.answer(1, kind="unsupported")]
        fault = ranks.fault()

    assert (fault.outcome, fault.rank) == (Outcome.UNSUPPORTED, 1)


def test_ranks_that_move_between_the_looks_are_slow(tmp_path: Path) -> None:
    with late(tmp_path, 2) as ranks:
        ranks.before_look = [nothing, lambda: ranks.move(0, 1)]
        fault = ranks.fault()

    assert str(fault).endswith(f"(still at work: {CHECK.what})")
