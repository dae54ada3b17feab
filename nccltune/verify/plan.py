"""In which order arms are started, and which boots are compared with which. Pure.

Each round starts every arm twice, the second time in the mirrored order: A B C C B A. A host that
gets slower or faster at a steady pace does the same to both arms of every pair, A B B A. A single
boot of each arm is a look that decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nccltune.block_rule import MIN_BLOCK_COUNT
from nccltune.errors import UsageProblem

if TYPE_CHECKING:
    from nccltune.verify.model import Boot

BOOTS_A_ROUND = 2
"""Of each arm."""
DECIDING_BOOTS = MIN_BLOCK_COUNT * BOOTS_A_ROUND
"""Of each arm; fewer decide nothing."""

_BLOCK_BOOTS = 4

Block = tuple["Boot", "Boot", "Boot", "Boot"]


def boot_order(arm_count: int, boots: int) -> tuple[int, ...]:
    """Return which arm each boot starts, by the arm's position.

    >>> boot_order(3, 2), boot_order(3, 1)
    ((0, 1, 2, 2, 1, 0), (0, 1, 2))

    Args:
        arm_count: the first is the baseline.
        boots: of each arm.

    Raises:
        UsageProblem: neither one boot nor whole rounds.
    """
    once = tuple(range(arm_count))
    if boots == 1:
        return once
    if boots < BOOTS_A_ROUND or boots % BOOTS_A_ROUND:
        raise UsageProblem(
            f"--boots {boots}: each arm is started in pairs (A B B A), so give an even number, "
            "or 1 for a look that decides nothing",
            code="bad_boots",
        )
    return (*once, *reversed(once)) * (boots // BOOTS_A_ROUND)


def ends_round(arm_count: int, done: int) -> bool:
    """Tell whether so many boots are whole rounds, after which a verify may stop.

    >>> [ends_round(2, done) for done in range(5)]
    [False, False, False, False, True]
    """
    return done > 0 and done % (arm_count * BOOTS_A_ROUND) == 0


def blocks_of(boots: Sequence[Boot], baseline: str, candidate: str) -> tuple[Block, ...]:
    """Return the whole A B B A blocks of two arms, in their order; boots left over are in none."""
    pair = sorted((b for b in boots if b.arm in (baseline, candidate)), key=lambda b: b.position)
    blocks: list[Block] = []
    for start in range(0, len(pair) - _BLOCK_BOOTS + 1, _BLOCK_BOOTS):
        first, second, third, fourth = pair[start : start + _BLOCK_BOOTS]
        is_mirrored = first.arm == fourth.arm != second.arm == third.arm
        if is_mirrored:
            blocks.append((first, second, third, fourth))
    return tuple(blocks)
