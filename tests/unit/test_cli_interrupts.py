"""Polite signals end a command wherever they meet it."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from nccltune.cli.interrupts import polite_signals

LIMIT_S = 10.0


class EndsIn:
    """Gets a signal while it is freed, where Python swallows every exception."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.001)


def free(number: int) -> None:
    EndsIn(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_python_swallows_is_not_lost(number: int) -> None:
    went_on: list[float] = []

    def lose_and_go_on() -> None:
        with polite_signals():
            free(number)
            went_on.append(time.monotonic())
            time.sleep(LIMIT_S)

    with pytest.raises(KeyboardInterrupt):
        lose_and_go_on()

    assert time.monotonic() - went_on[0] < LIMIT_S


def test_a_signal_that_was_lost_at_the_very_end_kills_nobody_later() -> None:
    with polite_signals():
        free(signal.SIGTERM)

    time.sleep(0.2)  # or the default action would end this process


def test_other_exceptions_that_nobody_catches_are_reported_as_ever() -> None:
    class Fails:
        def __del__(self) -> None:
            raise ValueError("made up for a test")

    told: list[object] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda lost: told.append(lost.exc_value and str(lost.exc_value))
    try:
        with polite_signals():
            Fails()
    finally:
        sys.unraisablehook = before

    assert told == ["made up for a test"]
    assert sys.unraisablehook is before
