"""Which data makes a chain of in-place sums exact in bf16, so that each element can be compared.

After the first all-reduce every rank holds the same sum S, after the second ``world x S``, and so
on: the chain multiplies by the world size. Nothing is ever rounded, in whatever order a ring or a
tree adds up, as long as all partial sums are whole numbers of at most 8 bits times one power of
two. Pure arithmetic: no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

EXACT_INTEGER = 256
"""bf16 has 8 significant bits: it holds every whole number up to here."""

MIN_EXPONENT = -126
MAX_EXPONENT = 127
"""Exponents of bf16's normal numbers, from the smallest to the largest power of two."""

MAX_CHAIN_WORLD_SIZE = 16
MAX_VALUE = 8
MAX_SINGLE_SUM = 128
"""Largest sum of a check of one all-reduce: half of what would still be exact."""


@dataclass(frozen=True, slots=True)
class DataCheck:
    """How one payload's data is checked.

    Attributes:
        limit: ranks start with whole numbers from ``-limit`` to ``limit``, times ``scale``.
        chain_count: all-reduces in a row that stay exact and finite, at most as many as were asked
            for. Infinity would be equal to infinity, whatever went wrong before.
        scale: the power of two that data starts at; the smallest normal one, to leave room.
        factor: what the sum of the ranks' whole numbers is multiplied by in the end.
    """

    limit: int
    chain_count: int
    scale: float
    factor: float


def plan_check(world_size: int, graph_count: int) -> DataCheck:
    """Choose data for checking a graph of so many all-reduces.

    Repeated sums stay exact only where the world size is a power of two; elsewhere a single
    all-reduce is checked.

    >>> plan_check(2, 123).chain_count, plan_check(4, 123).chain_count
    (123, 123)
    >>> plan_check(8, 123).chain_count, plan_check(6, 123).chain_count
    (83, 1)
    """
    scale = 2.0**MIN_EXPONENT
    limit = _chain_limit(world_size)
    if limit == 0:
        return DataCheck(max(1, MAX_SINGLE_SUM // world_size), 1, scale, scale)
    bits_each = world_size.bit_length() - 1
    largest_exponent = (limit * world_size).bit_length() - 1 + MIN_EXPONENT
    chain_count = min(graph_count, 1 + (MAX_EXPONENT - largest_exponent) // bits_each)
    return DataCheck(limit, chain_count, scale, float(world_size) ** (chain_count - 1) * scale)


def _chain_limit(world_size: int) -> int:
    """Return the largest value that stays exact in a chain; 0 where none does.

    Ranks sum up to ``limit x world``, and then up to ``world`` of those sums.
    """
    is_power_of_two = world_size & (world_size - 1) == 0
    if not is_power_of_two or not 2 <= world_size <= MAX_CHAIN_WORLD_SIZE:
        return 0
    return min(MAX_VALUE, EXACT_INTEGER // world_size**2)
