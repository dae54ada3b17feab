from __future__ import annotations

from collections import Counter

import pytest

from nccltune.errors import UsageProblem
from nccltune.verify.model import Boot
from nccltune.verify.plan import blocks_of, boot_order, ends_round

ARMS = "ABCD"


def boots(text: str) -> list[Boot]:
    return [Boot(arm, position, "", 1.0, ()) for position, arm in enumerate(text)]


def order(arm_count: int, count: int) -> str:
    return "".join(ARMS[idx] for idx in boot_order(arm_count, count))


def shown(found: tuple[tuple[Boot, ...], ...]) -> list[str]:
    return ["".join(f"{boot.arm}{boot.position}" for boot in block) for block in found]


def test_each_round_is_mirrored() -> None:
    assert order(2, 2) == "ABBA"
    assert order(2, 4) == "ABBAABBA"
    assert order(3, 4) == "ABCCBAABCCBA"


@pytest.mark.parametrize("arm_count", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 4, 6])
def test_every_arm_is_started_equally_often_and_at_equal_distance(
    arm_count: int, count: int
) -> None:
    made = order(arm_count, count)

    assert set(Counter(made).values()) == {count}
    means = {arm: sum(i for i, a in enumerate(made) if a == arm) / count for arm in set(made)}
    assert len(set(means.values())) == 1  # a steady drift does the same to all


@pytest.mark.parametrize("count", [0, 3, -2])
def test_boots_that_make_no_rounds_are_refused(count: int) -> None:
    with pytest.raises(UsageProblem, match=rf"--boots {count}: "):
        boot_order(2, count)


def test_one_boot_of_each_arm_is_a_look_that_holds_no_block() -> None:
    assert order(3, 1) == "ABC"


def test_every_pair_has_one_block_a_round() -> None:
    made = boots(order(3, 4))

    assert shown(blocks_of(made, "A", "B")) == ["A0B1B4A5", "A6B7B10A11"]
    assert shown(blocks_of(made, "A", "C")) == ["A0C2C3A5", "A6C8C9A11"]
    assert shown(blocks_of(made, "B", "C")) == ["B1C2C3B4", "B7C8C9B10"]


def test_boots_left_over_are_in_no_block() -> None:
    assert shown(blocks_of(boots("ABBAAB"), "A", "B")) == ["A0B1B2A3"]
    assert blocks_of(boots("ABB"), "A", "B") == ()
    assert blocks_of(boots("ABBA"), "A", "C") == ()


def test_boots_are_sorted_by_position() -> None:
    assert shown(blocks_of(boots("ABBA")[::-1], "A", "B")) == ["A0B1B2A3"]


def test_what_is_not_mirrored_is_no_block() -> None:
    assert blocks_of(boots("AABB"), "A", "B") == ()
    assert blocks_of(boots("ABAB"), "A", "B") == ()


def test_rounds_end_after_every_arm_has_been_started_twice() -> None:
    assert [done for done in range(13) if ends_round(3, done)] == [6, 12]
