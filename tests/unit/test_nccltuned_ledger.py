"""Failed starts add up, over restarts of the service, and lead to one roll-back."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest

from nccltune.errors import FileError
from nccltune.inject.marker import settings_digest
from nccltune.live.failed_starts import Ending, Start
from nccltune.paths import state_dir
from nccltune.profile import Profile
from nccltune.store import activate, read_active, save_candidate
from nccltuned.ledger import (
    FILE_NAME,
    MAX_OTHERS,
    MAX_STARTS,
    SCHEMA,
    Ledger,
    RolledBack,
    _kept,
)

KEY_FIELDS = ("boot_id", "pid", "started_ticks")
GOOD, BAD, WORSE = ({"NCCL_ALGO": f"allreduce:{name}"} for name in ("ring", "tree", "ring,tree"))


@pytest.fixture(autouse=True)
def profiles() -> None:
    for name, settings in (("good", GOOD), ("bad", BAD), ("worse", WORSE)):
        save_candidate(Profile(name, settings))
    activate("good", reason="manual")
    activate("bad", reason="manual")


def start(
    number: int,
    settings: dict[str, str] = BAD,
    ending: Ending = Ending.NCCL,
    launched_at: str = "2999-01-01T00:00:00+00:00",
) -> Start:
    return Start(
        boot_id="boot",
        pid=number,
        started_ticks=1,
        launched_at=launched_at,
        command_digest="c",
        profile_name="bad",
        digest=settings_digest(settings),
        ending=ending,
        detail=f"NCCL error {number}",
    )


def ledger_with(*starts: Start) -> Ledger:
    ledger = Ledger.load(state_dir())
    for each in starts:
        ledger.add(each)
    return ledger


def test_three_failures_roll_back_to_what_was_before() -> None:
    ledger = ledger_with(start(1), start(2))
    assert ledger.roll_back_if_due(read_active(), 3) is None
    ledger.add(start(3))

    done = ledger.roll_back_if_due(read_active(), 3)

    assert done is not None
    assert (done.profile_name, done.returned_to, done.failure_count) == ("bad", "good", 3)
    assert done.ending == "nccl"
    active = read_active()
    assert (active.name, active.how, active.action) == ("good", "daemon", "rollback")


def test_failures_add_up_over_restarts_of_the_service() -> None:
    ledger_with(start(1))
    ledger_with(start(2))

    assert ledger_with(start(3)).roll_back_if_due(read_active(), 3) is not None


def test_the_same_failures_never_roll_back_twice() -> None:
    ledger = ledger_with(start(1), start(2), start(3))
    ledger.roll_back_if_due(read_active(), 3)
    activate("bad", reason="manual")

    assert ledger.roll_back_if_due(read_active(), 3) is None
    assert Ledger.load(state_dir()).roll_back_if_due(read_active(), 3) is None
    assert read_active().name == "bad"


def test_a_roll_back_that_was_not_written_down_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = ledger_with(start(1), start(2), start(3))

    def die(_ledger: Ledger) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_save", die)
        with pytest.raises(KeyboardInterrupt):
            ledger.roll_back_if_due(read_active(), 3)

    assert Ledger.load(state_dir()).roll_back_if_due(read_active(), 3) is None
    assert read_active().name == "good"


def test_a_roll_back_never_returns_to_what_was_rolled_back_before() -> None:
    ledger = ledger_with(start(1), start(2), start(3))
    ledger.roll_back_if_due(read_active(), 3)
    for number in (4, 5, 6):
        ledger.add(start(number, GOOD))

    done = ledger.roll_back_if_due(read_active(), 3)

    assert done is not None
    assert done.returned_to is None
    assert read_active().name is None


def test_a_roll_back_returns_to_what_has_served_since_it_was_rolled_back() -> None:
    ledger = ledger_with(start(1), start(2), start(3))
    ledger.roll_back_if_due(read_active(), 3)
    activate("bad", reason="manual")
    ledger.add(start(4, ending=Ending.READY))
    activate("worse", reason="manual")
    for number in (5, 6, 7):
        ledger.add(start(number, WORSE))

    done = ledger.roll_back_if_due(read_active(), 3)

    assert done is not None
    assert done.returned_to == "bad"


def test_a_roll_back_never_returns_to_the_same_settings_under_another_name() -> None:
    save_candidate(Profile("same", BAD))
    activate("same", reason="manual")
    ledger = ledger_with(start(1), start(2), start(3))

    done = ledger.roll_back_if_due(read_active(), 3)

    assert done is not None
    assert done.returned_to is None


def test_the_file_is_not_for_everybody_to_read() -> None:
    ledger_with(start(1))

    assert (state_dir() / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_roll_back_whose_target_is_broken_leaves_none_active() -> None:
    (state_dir() / "profiles/good.json").unlink()
    ledger = ledger_with(start(1), start(2), start(3))

    done = ledger.roll_back_if_due(read_active(), 3)

    assert done is not None
    assert done.returned_to is None


def test_failures_under_a_profile_that_is_not_active_change_nothing() -> None:
    ledger = ledger_with(*(start(number, WORSE) for number in (1, 2, 3)))

    assert ledger.roll_back_if_due(read_active(), 3) is None


def test_a_limit_of_none_never_rolls_back() -> None:
    ledger = ledger_with(*map(start, range(9)))

    assert ledger.roll_back_if_due(read_active(), 0) is None


def test_the_same_start_is_kept_once_and_the_newest_word_counts() -> None:
    ledger = ledger_with(start(1), start(1, ending=Ending.READY))

    assert [each.ending for each in ledger.starts] == [Ending.READY]
    assert ledger.has(("boot", 1, 1))
    assert not ledger.has(("boot", 1, 2))


def test_the_file_does_not_grow_without_end() -> None:
    ledger = Ledger.load(state_dir())
    ledger.starts = [start(number) for number in range(MAX_STARTS)]
    ledger.add(start(9999))

    kept = Ledger.load(state_dir()).starts

    assert len(kept) == MAX_STARTS
    assert kept[-1].pid == 9999


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": "nccltune.starts/9", "starts": [], "rollbacks": []}',
        b'{"schema": "nccltune.starts/1", "starts": [{"pid": 1}], "rollbacks": []}',
        b'{"schema": "nccltune.starts/1", "starts": [7], "rollbacks": []}',
        b'{"schema": "nccltune.starts/1"}',
        b"\xff\xfe",
    ],
    ids=["empty", "torn", "list", "newer", "short", "number", "no_starts", "not_text"],
)
def test_a_broken_file_is_begun_anew(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = state_dir() / FILE_NAME
    path.write_bytes(content)

    ledger = Ledger.load(state_dir())

    assert ledger.starts == []
    assert FILE_NAME in caplog.text
    ledger.add(start(1))
    assert len(Ledger.load(state_dir()).starts) == 1


def test_fields_of_a_later_version_are_left_alone() -> None:
    ledger_with(start(1))
    path = state_dir() / FILE_NAME
    text = path.read_text(encoding="utf-8").replace('"pid": 1,', '"pid": 1, "more": 2,')
    path.write_text(text, encoding="utf-8")

    assert Ledger.load(state_dir()).starts == [start(1)]


def test_a_folder_that_cannot_be_written_keeps_starts_in_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    ledger = Ledger(blocked)

    with pytest.raises(FileError):
        ledger.add(start(1))

    assert ledger.has(("boot", 1, 1))


def test_failures_count_whatever_the_clock_says() -> None:
    generation = read_active().generation
    early = replace(start(1), launched_at="1999-01-01T00:00:00+00:00", generation=generation)
    ledger = ledger_with(early, *(replace(early, pid=pid) for pid in (2, 3)))

    assert ledger.roll_back_if_due(read_active(), 3) is not None


def test_failures_of_an_earlier_activation_do_not_count_whatever_the_clock_says() -> None:
    late = replace(start(1), generation=read_active().generation)
    activate("bad", reason="manual")
    ledger = ledger_with(*(replace(late, pid=pid) for pid in (1, 2, 3)))

    assert ledger.roll_back_if_due(read_active(), 3) is None


def test_an_activation_in_times_to_come_hides_no_failure() -> None:
    ledger = ledger_with(*(start(pid, launched_at="2026-01-01T00:00:00+00:00") for pid in range(3)))
    active = read_active()
    ahead = replace(active, activated_at="2999-01-01T00:00:00+00:00")

    assert len(ledger.failures(active)) == 0  # before it was activated
    assert len(ledger.failures(ahead)) == 3


def test_a_roll_back_after_the_clock_was_set_back_still_knows_what_has_served_since() -> None:
    ledger = ledger_with(start(1), start(2), start(3))
    ledger.roll_back_if_due(read_active(), 3)
    activate("bad", reason="manual")
    early = "1999-01-01T00:00:00+00:00"
    served = start(4, ending=Ending.READY, launched_at=early)
    ledger.add(replace(served, generation=read_active().generation))
    activate("worse", reason="manual")
    for number in (5, 6, 7):
        ledger.add(start(number, WORSE))

    done = ledger.roll_back_if_due(read_active(), 3)

    assert done is not None
    assert done.returned_to == "bad"


def test_starts_that_do_not_count_push_out_none_that_do() -> None:
    ledger = ledger_with(start(1), start(2))
    ledger.add(replace(start(3, ending=Ending.READY), uid=7, is_trusted=False, generation=1))
    for number in range(10, 10 + MAX_STARTS):
        ledger.add(replace(start(number), uid=54321, is_trusted=False))

    kept = Ledger.load(state_dir())

    assert {1, 2, 3} <= {each.pid for each in kept.starts}
    assert len(kept.starts) == 2 + MAX_OTHERS
    assert kept.starts[-1].pid == 9 + MAX_STARTS
    assert kept.had_served(7, 2)
    assert not kept.had_served(7, 1)
    assert not kept.had_served(None, 2)


@pytest.mark.parametrize(
    "ending", [Ending.USAGE, Ending.UNKNOWN, Ending.NCCL], ids=["usage", "unknown", "nccl"]
)
@pytest.mark.parametrize("is_same_command", [False, True], ids=["", "without_a_profile"])
def test_a_server_that_dies_again_and_again_pushes_out_no_start_of_another(
    ending: Ending, *, is_same_command: bool
) -> None:
    served = replace(start(1, ending=Ending.READY), digest=None)
    ledger = ledger_with(served, start(2), start(3))
    for number in range(10, 10 + 2 * MAX_STARTS):
        other = start(number, ending=ending)
        if is_same_command:
            other = replace(other, digest=None)
        else:
            other = replace(other, command_digest="other")
        ledger.starts = _kept([*ledger.starts, other])
    ledger.add(start(9999))

    kept = [each.pid for each in Ledger.load(state_dir()).starts]

    assert set(kept) >= ({2, 3, 9999} if is_same_command else {1, 2, 3, 9999})
    assert len(kept) == MAX_STARTS
    assert kept == sorted(kept)


def test_commands_that_are_all_different_push_out_the_oldest_alone() -> None:
    starts: list[Start] = []
    for number in range(MAX_STARTS + 50):
        # Among them some of one command, the largest group.
        command = "one" if 100 <= number < 103 else str(number)
        starts = _kept([*starts, replace(start(number), command_digest=command)])

    assert [each.pid for each in starts] == list(range(50, MAX_STARTS + 50))


@pytest.mark.parametrize("value", [["x"], {"x": 1}, None, "x", 7, 1.5], ids=repr)
@pytest.mark.parametrize("field", [each.name for each in fields(Start)])
def test_a_field_of_another_type_costs_the_service_nothing(field: str, value: object) -> None:
    given = {**asdict(start(1)), "uid": 7, "is_trusted": False, field: value}
    document = {"schema": SCHEMA, "starts": [given], "rollbacks": []}
    (state_dir() / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")

    ledger = Ledger.load(state_dir())
    for number in range(2, 5):
        ledger.add(start(number))

    expected = get_type_hints(Start)[field]
    assert ledger.has(("boot", 1, 1)) or not isinstance(value, expected) or field in KEY_FIELDS
    assert ledger.roll_back_if_due(read_active(), 3) is not None


@pytest.mark.parametrize("field", ["profile_name", "digest", "at", "failure_count"])
def test_a_roll_back_with_a_field_of_another_type_costs_the_service_nothing(field: str) -> None:
    done = RolledBack("bad", settings_digest(BAD), "good", "2026-11-29T12:00:00+00:00", 3)
    document = {"schema": SCHEMA, "starts": [], "rollbacks": [{**asdict(done), field: ["x"]}]}
    (state_dir() / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")

    assert Ledger.load(state_dir()).rollbacks == []


def test_a_start_is_known_by_the_launch_that_it_was_part_of_as_well() -> None:
    ledger = ledger_with(replace(start(1), record_pid=90, record_ticks=5), start(2))

    assert ledger.has(("boot", 1, 1))
    assert ledger.has(("boot", 90, 5))
    assert not ledger.has(("boot", 90, 6))
    assert not ledger.has(("another boot", 90, 5))
    assert not ledger.has(("boot", 1, 5))
