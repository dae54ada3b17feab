"""Lets every polite way of ending a process be what Ctrl-C is: keep what is known, then stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

POLITE_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.1


@contextmanager
def polite_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, and let none of them be lost.

    Handlers run between any two instructions, also inside callbacks (after a fork, when an object
    is freed) that swallow every exception, Ctrl-C's included. What was lost there is sent again.
    """
    last = int(signal.SIGINT)
    again: list[threading.Timer] = []
    report = sys.unraisablehook

    def stop(number: int) -> NoReturn:
        nonlocal last
        last = number
        raise KeyboardInterrupt

    def take_lost(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            report(lost)
            return
        timer = threading.Timer(AGAIN_S, os.kill, (os.getpid(), last))
        timer.daemon = True
        timer.start()
        again.append(timer)

    with handling(POLITE_SIGNALS, stop):
        sys.unraisablehook = take_lost
        try:
            yield
        finally:
            sys.unraisablehook = report
            for timer in again:
                timer.cancel()


@contextmanager
def handling(numbers: Iterable[int], take: Callable[[int], object]) -> Iterator[None]:
    """Give signals to a function, and let those that are ignored (nohup) stay so."""

    def handle(number: int, _frame: FrameType | None) -> None:
        take(number)

    before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number in before if before[number] is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
