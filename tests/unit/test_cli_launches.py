"""Series of launches in the view of a search, and polite ways of ending them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from nccltune.cli.interrupts import polite_signals
from nccltune.cli.launches import SeriesFollower
from nccltune.measurement import Launch, Outcome

if TYPE_CHECKING:
    from nccltune.search.result import Progress


class Collector:
    def __init__(self) -> None:
        self.moments: list[Progress] = []

    def update(self, progress: Progress) -> None:
        self.moments.append(progress)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_series_counts_launches_outcomes_and_the_time_left(clock: FakeClock) -> None:
    collector = Collector()
    series = SeriesFollower(collector, clock=clock)

    clock.now_s += 2.0
    series.note(0, 4, Launch({}, Outcome.OK))
    clock.now_s += 2.0
    series.note(1, 4, Launch({"NCCL_PROTO": "LL"}, Outcome.CRASHED))

    latest = collector.moments[-1]
    assert (latest.trial_idx, latest.trial_total) == (2, 4)
    assert latest.elapsed_s == 4.0
    assert latest.remaining_s == 4.0
    assert latest.outcome_counts == {Outcome.OK: 1, Outcome.CRASHED: 1}
    assert series.latest is latest.launch


def test_series_with_a_time_limit_ends_with_it(clock: FakeClock) -> None:
    collector = Collector()
    series = SeriesFollower(collector, time_limit_s=10.0, clock=clock)

    clock.now_s += 8.0
    series.note(0, 100, Launch({}, Outcome.OK))
    was_over = series.is_over
    clock.now_s += 2.0

    assert collector.moments[0].remaining_s == 2.0
    assert not was_over
    assert series.is_over


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_polite_signal_is_what_ctrl_c_is_and_only_inside(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    with pytest.raises(KeyboardInterrupt), polite_signals():
        os.kill(os.getpid(), number)

    assert signal.getsignal(number) is before


def test_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with polite_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
