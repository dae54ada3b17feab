"""Calls in a child: answers, crashes, hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nccltuned.child import Calls, call_in_child


def outcome(function: Callable[[], object], timeout_s: float = 20.0) -> object:
    """Run a call to its end and return what was handed over."""
    found: list[object] = []
    calls = Calls()
    calls.start(function, found.append, timeout_s=timeout_s)
    while not found:
        for number in calls.descriptors():
            calls.handle(number)
        calls.expire(time.monotonic())
    assert calls.descriptors() == ()
    assert not calls.is_stuck
    return found[0]


def die() -> object:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_call_returns_what_the_function_returns() -> None:
    assert outcome(lambda: {"pid": os.getpid() != 0, "long": "x" * 300_000}) == {
        "pid": True,
        "long": "x" * 300_000,
    }


def test_call_runs_in_a_process_of_its_own() -> None:
    assert outcome(os.getpid) != os.getpid()


def test_call_that_raises_hands_over_none(capfd: object) -> None:
    def fail() -> object:
        raise ValueError

    assert outcome(fail) is None


def test_call_that_is_killed_hands_over_none() -> None:
    assert outcome(die) is None


def test_call_that_returns_no_json_hands_over_none() -> None:
    assert outcome(lambda: {1j}) is None


def test_call_that_hangs_is_killed_at_its_deadline() -> None:
    assert outcome(signal.pause, timeout_s=0.05) is None


def test_call_leaves_no_child_behind() -> None:
    call = call_in_child(signal.pause, timeout_s=100.0)

    call.end()
    while not call.reap():
        pass

    assert not os.path.exists(f"/proc/{call.pid}")  # noqa: PTH110


def test_call_does_not_inherit_sockets_and_files() -> None:
    reader, writer = os.pipe()

    def targets() -> list[str]:
        found = []
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found.append(str(path.readlink()))
        return found

    try:
        pipe = str(Path(f"/proc/self/fd/{reader}").readlink())
        found = outcome(lambda: pipe in targets())
    finally:
        os.close(reader)
        os.close(writer)

    assert found is False


def test_calls_close_kills_what_is_at_work() -> None:
    calls = Calls()
    calls.start(signal.pause, lambda _answer: None, timeout_s=100.0)

    calls.close()

    assert not calls.is_stuck
    assert calls.next_deadline_s() is None


def test_calls_handle_leaves_other_descriptors_alone() -> None:
    assert not Calls().handle(12345)


def test_call_that_eats_memory_ends_and_the_caller_does_not() -> None:
    assert outcome(lambda: len(bytearray(2**30))) is None


def test_call_whose_answer_has_no_end_is_ended() -> None:
    assert outcome(lambda: "x" * (9 * 2**20)) is None
