"""Why a launch cannot go on: the outcome, the rank to blame where it is one, and the words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nccltune.measurement import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nccltune.bench.steps import Step

_HOST_FAULT = re.compile(
    r"no CUDA-capable device|busy or unavailable|device unavailable|driver version is insufficient"
    r"|No CUDA GPUs are available|system not yet initialized|fell off the bus",
    re.IGNORECASE,
)


class RankFault(Exception):
    """A launch cannot go on.

    Attributes:
        outcome: how it ended.
        rank: the rank that failed, None when it was several.
    """

    def __init__(self, outcome: Outcome, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.rank = rank


def host_outcome(fault: RankFault) -> Outcome:
    """Return the fault's outcome; ``host_failed`` where the GPU or driver is gone."""
    return Outcome.HOST_FAILED if _HOST_FAULT.search(str(fault)) else fault.outcome


def name_ranks(ranks: Collection[int], rank_count: int) -> str:
    """Name ranks among so many: ``rank 6``, ``ranks 1, 6`` or ``all ranks``."""
    if len(ranks) == rank_count > 1:
        return "all ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def hang_fault(
    earlier: Mapping[int, Step], later: Mapping[int, Step], rank_count: int, when: str
) -> RankFault:
    """Say which of the ranks that are late keep the others waiting.

    Those are the ones furthest behind, unless they have moved between two looks: then the launch is
    slow, and nobody hangs. Where all are in the same step, as in a collective that all have begun,
    no rank is to blame.

    Args:
        earlier, later: steps of the ranks that are late, at two looks.
        rank_count: ranks in all.
        when: the limit and what was asked, as ``within 30 s while measuring 43008 B``.
    """
    last = min(later.values(), key=lambda step: step.number)
    behind = sorted(rank for rank, step in later.items() if step.number == last.number)
    is_slow = any(earlier[rank] != later[rank] for rank in behind)
    if is_slow:
        behind = sorted(later)
    waiting = later.keys() - set(behind)
    is_all = len(behind) == rank_count > 1
    who = "no rank answered" if is_all else f"{name_ranks(behind, rank_count)} did not answer"
    where = last.what or ("not begun" if waiting else "")
    if is_slow:
        where = f"still at work: {where}" if where else "still at work"
    elif last.what and len(behind) > 1:
        where = f"all in the same step: {where}"
    message = f"{who} {when}" + (f" ({where})" if where else "")
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        cause = "it" if len(behind) == 1 else "them"
        message += f"; {name_ranks(waiting, rank_count)} {verb} for {cause}"
    return RankFault(Outcome.TIMEOUT, message, behind[0] if len(behind) == 1 else None)


def wrong_data_fault(wrong: Mapping[str, Collection[int]], rank_count: int) -> RankFault | None:
    """Say which collectives gave wrong data, and in which ranks; None where none did.

    Args:
        wrong: the ranks with wrong data, by collective.
        rank_count: ranks in all.
    """
    parts = [f"{name} in {name_ranks(ranks, rank_count)}" for name, ranks in wrong.items() if ranks]
    if not parts:
        return None
    blamed = {rank for ranks in wrong.values() for rank in ranks}
    message = f"wrong data in {', '.join(parts)}"
    return RankFault(Outcome.WRONG_DATA, message, blamed.pop() if len(blamed) == 1 else None)


def stuck_fault(pids: Mapping[int, int], within_s: float) -> RankFault:
    """Say which processes do not end, and what to do.

    Args:
        pids: their process ids, by rank.
        within_s: how long they were given, seconds.
    """
    listed = ", ".join(f"{pid} (rank {rank})" for rank, pid in sorted(pids.items()))
    advice = "look for Xid errors in dmesg; where they stay, reset the GPU or restart the host"
    message = f"rank processes that have not ended within {within_s:g} s: {listed}; {advice}"
    return RankFault(Outcome.HOST_FAILED, message, next(iter(pids)) if len(pids) == 1 else None)
