"""The arithmetic of the data check: bf16, and the orders of a ring and a tree, in pure Python."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import pytest

from nccltune.bench.data_check import EXACT_INTEGER, MIN_EXPONENT, DataCheck, plan_check

WORLD_SIZES = tuple(range(2, 17))
KIMI_COUNT = 123
CHAINABLE = (2, 4, 8, 16)


def bf16(value: float) -> float:
    """Round to bf16: 8 significant bits, ties to even, subnormal below 2**-126, infinity above."""
    if value == 0.0 or math.isinf(value) or math.isnan(value):
        return value
    mantissa, exponent = math.frexp(value)
    bits = max(exponent - 8, MIN_EXPONENT - 7)
    rounded = math.ldexp(round(math.ldexp(mantissa, exponent - bits)), bits)
    return math.copysign(math.inf, value) if abs(rounded) >= 2.0**128 else rounded


def add_in_order(values: Iterable[float]) -> float:
    """Sum one element as the hops of a ring, or of a chain-shaped tree, do."""
    total: float | None = None
    for value in values:
        total = value if total is None else bf16(total + value)
    assert total is not None
    return total


def add_as_tree(values: Sequence[float]) -> float:
    """Sum one element as a binary tree does."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return bf16(add_as_tree(values[:half]) + add_as_tree(values[half:]))


def all_reduce(values: Sequence[float], rotation: int) -> float:
    """Sum one element over a ring that starts at some rank, as the element's chunk decides."""
    return add_in_order([*values[rotation:], *values[:rotation]])


def replay(values: Sequence[float], count: int) -> float:
    """Run a chain of in-place all-reduces on one element."""
    world = len(values)
    result = all_reduce(values, 0)
    for _ in range(count - 1):
        result = add_in_order([result] * world)
    return result


def elements(world: int, limit: int) -> list[list[int]]:
    """Elements, one whole number a rank: the extremes, then drawn at random."""
    rng = random.Random(f"{world}/{limit}")
    extremes = [[limit] * world, [-limit] * world, [limit, -limit] * (world // 2) + [1] * world]
    drawn = [[rng.randint(-limit, limit) for _ in range(world)] for _ in range(8)]
    return [one[:world] for one in (*extremes, *drawn)]


def expected(check: DataCheck, numbers: Sequence[int]) -> float:
    """Return what the rank process compares with."""
    return bf16(sum(numbers) * check.factor)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_plan_check_first_sum_is_exact_in_every_order(world: int) -> None:
    check = plan_check(world, KIMI_COUNT)

    for numbers in elements(world, check.limit):
        values = [bf16(number * check.scale) for number in numbers]
        exact = sum(numbers) * check.scale
        assert values == [number * check.scale for number in numbers]
        assert {all_reduce(values, rotation) for rotation in range(world)} == {exact}
        assert add_as_tree(values) == exact


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("graph_count", [1, 3, 4, KIMI_COUNT, 400])
def test_plan_check_chain_is_exact_and_finite(world: int, graph_count: int) -> None:
    check = plan_check(world, graph_count)

    for numbers in elements(world, check.limit):
        values = [number * check.scale for number in numbers]
        result = replay(values, check.chain_count)
        assert result == expected(check, numbers)
        assert math.isfinite(result)
        assert (result == 0.0) == (sum(numbers) == 0)


@pytest.mark.parametrize("world", CHAINABLE)
def test_plan_check_chain_is_as_long_as_it_can_be(world: int) -> None:
    longest = plan_check(world, 10_000)
    numbers = [longest.limit] * world

    one_more = replay([number * longest.scale for number in numbers], longest.chain_count + 1)

    assert math.isinf(one_more)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_plan_check_sees_one_wrong_number_of_one_rank(world: int) -> None:
    check = plan_check(world, KIMI_COUNT)

    for numbers in elements(world, check.limit):
        wrong = [numbers[0] + 1, *numbers[1:]]
        result = replay([number * check.scale for number in wrong], check.chain_count)
        assert result != expected(check, numbers)


@pytest.mark.parametrize("world", CHAINABLE)
def test_plan_check_sees_an_all_reduce_of_the_chain_that_lost_a_rank(world: int) -> None:
    check = plan_check(world, KIMI_COUNT)

    for numbers in (one for one in elements(world, check.limit) if sum(one)):
        values = [number * check.scale for number in numbers]
        lost_at = check.chain_count // 2
        value = replay(values, lost_at)
        value = add_in_order([value] * (world - 1))
        value = replay([value] * world, check.chain_count - lost_at - 1)
        assert value != expected(check, numbers)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_plan_check_limit_follows_the_rule(world: int) -> None:
    limit = plan_check(world, KIMI_COUNT).limit

    assert limit >= 1
    if world in CHAINABLE:
        assert limit == min(8, 256 // world**2)
        assert limit * world * world <= EXACT_INTEGER
    else:
        assert plan_check(world, KIMI_COUNT).chain_count == 1
        assert limit * world <= EXACT_INTEGER


@pytest.mark.parametrize("world", [8, 16])
def test_a_limit_twice_as_large_would_not_be_exact(world: int) -> None:
    largest = plan_check(world, KIMI_COUNT).limit * world

    def is_exact(total: int) -> bool:
        return add_in_order([float(total)] * world) == total * world

    assert all(is_exact(total) for total in range(largest + 1))
    assert not all(is_exact(total) for total in range(2 * largest + 1))


def test_a_world_size_that_is_no_power_of_two_cannot_be_chained() -> None:
    assert replay([1.0] * 6, 123) != 6.0**123


@pytest.mark.parametrize("world", [1, 17, 32, 64, 200])
def test_plan_check_beyond_the_rule_checks_a_single_all_reduce(world: int) -> None:
    check = plan_check(world, KIMI_COUNT)

    assert check.chain_count == 1
    assert check.limit >= 1


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (256.0, 256.0),
        (257.0, 256.0),
        (258.0, 258.0),
        (259.0, 260.0),
        (-257.0, -256.0),
        (255.0 * 2.0**120, 255.0 * 2.0**120),
        (2.0**128, math.inf),
        (-(2.0**130), -math.inf),
        (2.0**-126, 2.0**-126),
        (2.0**-133, 2.0**-133),
        (0.0, 0.0),
    ],
)
def test_bf16_of_this_file_rounds_as_the_format_does(value: float, rounded: float) -> None:
    assert bf16(value) == rounded
