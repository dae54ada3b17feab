"""Keeps a service manager informed: asks for time while there is progress, then says ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.sdnotify import Notifier
    from nccltune.supervise.endings import Ending
    from nccltune.supervise.watch import Moment

KILL_MARGIN_S = 30.0
"""Between the end of our own patience and the manager's: time to end the server and say why."""

_REPEAT_S = 5.0


class ServiceReport:
    """An observer that tells systemd.

    The time asked for is what is left of our own limits, so that a server that gets nowhere is not
    given more of it, and a service manager ends us where we hang ourselves.
    """

    def __init__(self, notifier: Notifier, clock: Callable[[], float] = time.monotonic) -> None:
        self._notifier = notifier
        self._clock = clock
        self._told = ""
        self._told_s = self._alive_s = float("-inf")
        self._is_ready = False

    @property
    def tick_s(self) -> float | None:
        """How often ``update`` has to be called; None where nobody minds."""
        watchdog_s = self._notifier.watchdog_s
        return None if watchdog_s is None else watchdog_s / 3.0

    def update(self, moment: Moment) -> None:
        """Tell what is new, and again what must not be forgotten."""
        if not self._notifier.is_listened_to:
            return
        self._keep_alive()
        if moment.served_s is not None:
            self._tell_ready(moment)
            return
        if not moment.is_sglang:
            return  # no limit of ours applies: the manager's own does
        text = moment.waited.step.format()
        now_s = self._clock()
        if text == self._told and now_s - self._told_s < _REPEAT_S:
            return
        self._told, self._told_s = text, now_s
        waited = moment.waited
        left_s = min(
            waited.limits.stall_timeout_s - waited.idle_s,
            waited.limits.ready_timeout_s - waited.elapsed_s,
        )
        self._notifier.extend_timeout(max(0.0, left_s) + KILL_MARGIN_S)
        idle = f", no progress for {int(waited.idle_s)} s" if waited.idle_s >= _REPEAT_S else ""
        self._notifier.status(f"{text}, {int(waited.elapsed_s)} s since the launch{idle}")

    def end(self, ending: Ending) -> None:
        """Tell that it is over."""
        self._notifier.stopping(ending.message)

    def _tell_ready(self, moment: Moment) -> None:
        if self._is_ready:
            return
        where = f" on {moment.endpoint.url}" if moment.endpoint is not None else ""
        ready_s = moment.waited.elapsed_s - (moment.served_s or 0.0)
        # Said again until it is heard: without it the manager would end the server.
        self._is_ready = self._notifier.ready(f"serving{where}, ready after {int(ready_s)} s")

    def _keep_alive(self) -> None:
        watchdog_s, now_s = self._notifier.watchdog_s, self._clock()
        if watchdog_s is not None and now_s - self._alive_s >= watchdog_s / 4.0:
            self._alive_s = now_s
            self._notifier.watchdog()
