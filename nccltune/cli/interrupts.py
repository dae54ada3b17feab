"""Lets every polite way of ending a process be what Ctrl-C is: keep what is known, then stop."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

POLITE_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def polite_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt; one that is ignored (nohup) stays so."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in POLITE_SIGNALS}
    taken = [number for number in POLITE_SIGNALS if before[number] is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
