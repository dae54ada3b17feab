"""Looks at store, host and servers in a child whenever there is a reason to, and tells what is new.

The store is small and the reasons are rare: at rest nothing of all this is loaded or done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nccltune.errors import NccltuneError
from nccltune.paths import reading_dir
from nccltuned.journal import tell_changes

if TYPE_CHECKING:
    from nccltune.live.scanner import Server
    from nccltuned.child import Calls

logger = logging.getLogger("nccltuned")

CHECK_TIMEOUT_S = 60.0
CHECK_AGAIN_S = 3600.0
"""Driver, NCCL and GPUs are compared so often although nothing else has changed."""

UNKNOWN_AGAIN_S = 300.0
"""So often where the driver did not answer: it may come up after this service."""

RETRY_S = 60.0

TakeStock = Callable[[tuple["Server", ...]], Mapping[str, object]]
"""From the servers that run to a stock, as ``Stock.to_json`` lays it out."""


def take_stock_of(servers: tuple[Server, ...]) -> Mapping[str, object]:
    """Look at everything; runs in a child, so that what it loads is gone with it."""
    from nccltune.live.stock import take_stock

    return take_stock(servers).to_json()


@dataclass(slots=True)
class Checks:
    """The last look, and when the next is due.

    Attributes:
        calls: runs the look.
        on_stock: told of every look that came to its end.
        stock: what it found; None before the first.
        checked_at_s: when that was, in seconds since 1970; 0 before the first.
        is_failing: the last look did not come to its end.
    """

    calls: Calls
    on_stock: Callable[[], None]
    take: TakeStock = take_stock_of
    stock: Mapping[str, Any] | None = None
    checked_at_s: float = 0.0
    is_failing: bool = False
    _is_running: bool = False
    _is_wanted: bool = True
    _next_s: float = 0.0
    _store_problem: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether the first look is over, whatever came of it."""
        return self.checked_at_s > 0.0 or self.is_failing

    def want(self) -> None:
        """Ask for a look, at once or after the one that is going on."""
        self._is_wanted = True

    def start_if_due(self, servers: tuple[Server, ...]) -> None:
        """Begin a look where one is wanted, or none was for long."""
        self._look_for_store()
        is_due = self._is_wanted or time.monotonic() >= self._next_s
        if not is_due or self._is_running:
            return
        if self.calls.is_stuck:
            # Another one would hang at the same place.
            self._fail("an earlier look still hangs in the kernel, in the driver most likely")
            return
        self._is_running, self._is_wanted = True, False
        self.calls.start(lambda: self.take(servers), self._done, timeout_s=CHECK_TIMEOUT_S)

    def _look_for_store(self) -> None:
        """Want a look where the state folder has come or gone.

        Of a store without a state file, an unmounted volume say, no file changes with it.
        """
        try:
            reading_dir()
            problem = ""
        except NccltuneError as error:
            problem = str(error)
        if problem != self._store_problem:
            if problem:
                logger.error("launches start without a profile: %s", problem)
            else:
                logger.info("the state folder is there again")
            self._store_problem = problem
            self._is_wanted = True

    def _done(self, answer: object) -> None:
        self._is_running = False
        if not isinstance(answer, dict):
            self._fail(f"a look at this host did not come to its end within {CHECK_TIMEOUT_S:g} s")
            return
        is_host_unknown = answer["active"]["is_degraded"] and answer["active"]["match"] is None
        again_s = UNKNOWN_AGAIN_S if is_host_unknown else CHECK_AGAIN_S
        self._next_s = time.monotonic() + again_s
        before, self.stock = self.stock, answer
        self.checked_at_s = time.time()
        if self.is_failing:
            logger.info("looking at this host works again")
        self.is_failing = False
        tell_changes(before, answer)
        self.on_stock()

    def _fail(self, reason: str) -> None:
        self._is_wanted = False
        self._next_s = time.monotonic() + RETRY_S
        if not self.is_failing:
            logger.error("%s; what is published is what was known before", reason)
        self.is_failing = True
        self.on_stock()
