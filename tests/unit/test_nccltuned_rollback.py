"""What the service says and does when starts end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from nccltune.errors import BusyError, FileError
from nccltune.inject.marker import settings_digest
from nccltune.live.failed_starts import Ending, Start
from nccltune.paths import state_dir
from nccltune.profile import Profile
from nccltune.store import activate, read_active, save_candidate
from nccltuned.keeper import LOCK_NAME, Keeper
from nccltuned.ledger import Ledger
from nccltuned.rollback import RollbackGuard

SETTINGS = {"NCCL_ALGO": "allreduce:tree"}


@pytest.fixture
def guard(caplog: pytest.LogCaptureFixture) -> Iterator[RollbackGuard]:
    caplog.set_level("INFO")
    save_candidate(Profile("bad", SETTINGS))
    activate("bad", reason="manual")
    keeper = Keeper(state_dir())
    yield RollbackGuard(Ledger.load(state_dir()), state_dir(), 3, keeper)
    keeper.close()


def start(pid: int, ending: Ending = Ending.NCCL, *, is_bare: bool = False) -> Start:
    return Start(
        boot_id="boot",
        pid=pid,
        started_ticks=1,
        launched_at="2999-01-01T00:00:00+00:00",
        command_digest="c",
        profile_name=None,
        digest=None if is_bare else settings_digest(SETTINGS),
        ending=ending,
        detail="NCCL error",
    )


def test_guard_names_the_profile_of_a_start_that_only_a_mark_told_of(
    guard: RollbackGuard, caplog: pytest.LogCaptureFixture
) -> None:
    guard.start_ended(start(1))
    guard.start_ended(start(2, Ending.READY, is_bare=True))

    assert caplog.messages == [
        "start failed: pid=1 ending=nccl profile=bad command=c last=NCCL error",
        "start succeeded: pid=2 ending=ready profile=- command=c last=NCCL error",
    ]


def test_guard_rolls_back_and_says_it_loudly(
    guard: RollbackGuard, caplog: pytest.LogCaptureFixture
) -> None:
    for pid in (1, 2, 3):
        guard.start_ended(start(pid))

    assert read_active().name is None
    assert "ROLLED BACK after 3 failed starts: profile=bad now=(no profile)" in caplog.text
    assert caplog.records[-1].levelname == "ERROR"


def test_guard_publishes_counts_and_no_line_of_a_log(guard: RollbackGuard) -> None:
    guard.start_ended(start(1))
    guard.start_ended(start(2, Ending.PORT))

    facts = guard.facts(read_active())

    assert facts["failed_starts"] == {
        "count": 1,
        "uncounted": 0,
        "rollback_after": 3,
        "last": "nccl",
    }
    assert "NCCL error" not in str(facts)
    assert guard.start_counts() == {"nccl": 1, "port": 1}


def test_guard_that_cannot_roll_back_now_tries_again_and_tells_once(
    guard: RollbackGuard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(**_: object) -> None:
        raise BusyError("somebody else", code="store_busy")

    with monkeypatch.context() as patch:
        patch.setattr("nccltuned.ledger.rollback", busy)
        for pid in (1, 2, 3):
            guard.start_ended(start(pid))
        guard.roll_back_if_due()
        assert read_active().name == "bad"

    guard.roll_back_if_due()

    assert read_active().name is None
    assert caplog.text.count("cannot be: somebody else") == 1


def test_guard_that_finds_a_roll_back_due_at_its_start_does_it(guard: RollbackGuard) -> None:
    for pid in (1, 2, 3):
        guard.ledger.add(start(pid))

    guard.keeper.close()
    keeper = Keeper(state_dir())
    RollbackGuard(Ledger.load(state_dir()), state_dir(), 3, keeper).roll_back_if_due()
    keeper.close()

    assert read_active().name is None


def test_guard_that_cannot_write_its_ledger_acts_all_the_same(
    guard: RollbackGuard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_ledger: Ledger) -> None:
        raise FileError("starts.json", "cannot be written", code="cannot_write")

    monkeypatch.setattr(Ledger, "_save", refuse)
    for pid in (1, 2, 3):
        guard.start_ended(start(pid))

    assert read_active().name is None
    assert caplog.text.count("starts are not kept") == 1
    assert "ROLLED BACK" in caplog.text


STRANGER = 54321


def of_stranger(pid: int, ending: Ending = Ending.NCCL, generation: int = 0) -> Start:
    generation = generation or read_active().generation
    found = start(pid, ending)
    return replace(found, uid=STRANGER, is_trusted=False, generation=generation)


def test_guard_never_rolls_back_for_what_strangers_start(
    guard: RollbackGuard, caplog: pytest.LogCaptureFixture
) -> None:
    for pid in range(10):
        guard.start_ended(of_stranger(pid))

    assert read_active().name == "bad"
    facts = guard.facts(read_active())["failed_starts"]
    assert facts == {"count": 0, "uncounted": 10, "rollback_after": 3, "last": None}
    assert "uid=54321 (does not count)" in caplog.text
    assert "NCCL error" not in caplog.text


def test_guard_lets_no_stranger_clear_failures_that_count(guard: RollbackGuard) -> None:
    guard.start_ended(start(1))
    guard.start_ended(start(2))
    guard.start_ended(of_stranger(3, Ending.READY))
    guard.start_ended(replace(of_stranger(4), digest=None))
    guard.start_ended(start(5))

    assert read_active().name is None


def test_guard_counts_a_user_who_had_a_server_before_the_profile(guard: RollbackGuard) -> None:
    guard.start_ended(of_stranger(1, Ending.READY))
    guard.start_ended(of_stranger(2))
    assert guard.facts(read_active())["failed_starts"]["uncounted"] == 1  # type: ignore[index]
    activate("bad", reason="manual")
    for pid in (3, 4, 5):
        guard.start_ended(of_stranger(pid))

    assert read_active().name is None


def test_guard_does_not_undo_a_step_that_was_taken_meanwhile(
    guard: RollbackGuard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_candidate(Profile("other", {"NCCL_ALGO": "allreduce:ring"}))
    before = read_active()
    for pid in (1, 2, 3):
        guard.ledger.add(start(pid))
    activate("other", reason="manual")
    with monkeypatch.context() as patch:
        # What was read a moment before the operator's step.
        patch.setattr("nccltuned.rollback.read_active", lambda _folder: before)
        guard.roll_back_if_due()

    assert read_active().name == "other"
    assert "another step was taken meanwhile, other is active now" in caplog.text
    guard.roll_back_if_due()
    assert read_active().name == "other"


def test_guard_beside_another_on_the_same_store_rolls_nothing_back_until_that_is_gone(
    guard: RollbackGuard, caplog: pytest.LogCaptureFixture
) -> None:
    second = RollbackGuard(Ledger.load(state_dir()), state_dir(), 3, Keeper(state_dir()))
    guard.roll_back_if_due()
    for pid in (1, 2):
        guard.start_ended(start(pid))
    for pid in (1, 2, 3):
        second.start_ended(start(pid))

    assert read_active().name == "bad"
    assert caplog.text.count("another nccltuned keeps this store") == 1
    assert len(Ledger.load(state_dir()).starts) == 2
    guard.keeper.close()
    second.roll_back_if_due()

    assert read_active().name is None
    assert "keeps the store from here on" in caplog.text
    assert {each.pid for each in Ledger.load(state_dir()).starts} == {1, 2, 3}
    second.keeper.close()


def test_keeper_whose_file_was_taken_away_asks_anew() -> None:
    first, second = Keeper(state_dir()), Keeper(state_dir())
    state_dir().mkdir(parents=True, exist_ok=True)
    assert first.is_held()
    assert not second.is_held()
    (state_dir() / LOCK_NAME).unlink()

    assert second.is_held()
    assert not first.is_held()
    second.close()
    assert first.is_held()
    first.close()


def test_keeper_of_a_folder_that_cannot_be_written_stands_in_nobodys_way() -> None:
    assert Keeper(state_dir() / "nowhere").is_held()
