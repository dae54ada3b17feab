"""Lets us learn how our children end, also where we were started to ignore SIGCHLD.

A program that ignores it hands that down through exec. The kernel then keeps no exit status: a wait
fails, and ``subprocess`` takes a child that crashed for one that ended with status 0.
"""

from __future__ import annotations

import signal

_IS_HANDED_DOWN = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN


def learn_ends() -> None:
    """Have exit statuses kept from now on; for the main thread, before children are started."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def hand_down() -> None:
    """Give a command what it would have without us; for the time between its fork and its exec."""
    if _IS_HANDED_DOWN:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
