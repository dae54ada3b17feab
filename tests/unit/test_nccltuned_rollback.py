"""What the service says and does when starts end."""

from __future__ import annotations

import pytest

from nccltune.errors import BusyError, FileError
from nccltune.inject.marker import settings_digest
from nccltune.live.failed_starts import Ending, Start
from nccltune.paths import state_dir
from nccltune.profile import Profile
from nccltune.store import activate, read_active, save_candidate
from nccltuned.ledger import Ledger
from nccltuned.rollback import RollbackGuard

SETTINGS = {"NCCL_ALGO": "allreduce:tree"}


@pytest.fixture
def guard(caplog: pytest.LogCaptureFixture) -> RollbackGuard:
    caplog.set_level("INFO")
    save_candidate(Profile("bad", SETTINGS))
    activate("bad", reason="manual")
    return RollbackGuard(Ledger.load(state_dir()), state_dir(), 3)


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

    assert facts["failed_starts"] == {"count": 1, "rollback_after": 3, "last": "nccl"}
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

    RollbackGuard(Ledger.load(state_dir()), state_dir(), 3).roll_back_if_due()

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
