"""When the service looks at the host, and what it makes of a look that fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import nccltuned.checks as checks_module
from nccltune.paths import state_dir
from nccltuned.checks import Checks, TakeStock
from nccltuned.child import Calls
from tests.support.stocks import stock_data

if TYPE_CHECKING:
    import pytest


def finish(calls: Calls) -> None:
    """Wait for every call, as the service's loop does."""
    while calls.descriptors():
        for number in calls.descriptors():
            calls.handle(number)
        calls.expire(time.monotonic())


class Looks:
    """A service that only looks."""

    def __init__(self, take: TakeStock) -> None:
        self.calls = Calls()
        self.seen: list[Mapping[str, Any] | None] = []
        self.checks = Checks(self.calls, lambda: self.seen.append(self.checks.stock), take)

    def look(self) -> None:
        self.checks.start_if_due(())
        finish(self.calls)


def hang(_servers: object) -> Mapping[str, object]:
    signal.pause()
    raise AssertionError


def test_checks_look_at_first_and_then_only_when_asked() -> None:
    looks = Looks(lambda _servers: stock_data())
    looks.look()
    looks.look()
    assert len(looks.seen) == 1

    looks.checks.want()
    looks.look()

    assert len(looks.seen) == 2
    assert looks.checks.stock == stock_data()
    assert looks.checks.is_settled


def test_checks_asked_for_while_one_is_going_on_look_again_after_it() -> None:
    looks = Looks(lambda _servers: stock_data())
    looks.checks.start_if_due(())
    looks.checks.want()
    looks.checks.start_if_due(())
    assert len(looks.calls.descriptors()) == 1
    finish(looks.calls)

    looks.look()

    assert len(looks.seen) == 2


def test_checks_look_again_by_themselves_after_long(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(lambda _servers: stock_data())
    looks.look()
    monkeypatch.setattr(checks_module, "CHECK_AGAIN_S", -1.0)
    looks.checks.want()
    looks.look()

    looks.look()

    assert len(looks.seen) == 3


def test_checks_look_again_sooner_where_the_driver_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks_module, "UNKNOWN_AGAIN_S", -1.0)
    looks = Looks(lambda _servers: stock_data(is_degraded=True, match=None))
    looks.look()

    looks.look()

    assert len(looks.seen) == 2


def test_checks_that_hang_are_given_up_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks_module, "CHECK_TIMEOUT_S", 0.05)
    looks = Looks(hang)
    looks.look()
    looks.checks.want()
    looks.look()

    assert looks.checks.is_failing
    assert looks.checks.is_settled
    assert looks.checks.stock is None
    assert caplog.text.count("did not come to its end") == 1


def test_checks_that_work_again_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    answers: list[object] = [None, stock_data()]
    looks = Looks(lambda _servers: stock_data())
    for answer in answers:
        looks.checks._done(answer)

    assert not looks.checks.is_failing
    assert "works again" in caplog.text


def test_checks_look_again_when_the_state_folder_goes_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    looks = Looks(lambda _servers: stock_data())
    looks.look()

    state_dir().rmdir()
    looks.look()
    looks.look()
    assert len(looks.seen) == 2
    assert caplog.text.count("names is not there") == 1
    state_dir().mkdir()
    looks.look()
    looks.look()

    assert len(looks.seen) == 3
    assert caplog.text.count("the state folder is there again") == 1


def test_checks_with_a_child_stuck_in_the_kernel_start_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Calls, "is_stuck", property(lambda _self: True))
    looks = Looks(lambda _servers: stock_data())

    looks.look()

    assert looks.checks.is_failing
    assert looks.checks.stock is None
