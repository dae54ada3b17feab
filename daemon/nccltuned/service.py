"""The service: one thread, one poll, and nothing done that a change did not ask for.

It looks, tells, publishes and rolls back. It never sets anything in a running process, never
starts a measurement, and no launch needs it: each one reads the store by itself.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.atomic import make_dir
from nccltune.errors import NccltuneError
from nccltune.live.launch_inbox import INBOX_NAME
from nccltune.live.procfs import is_exhausted, read_process
from nccltune.store import (
    append_launch_record,
    profiles_dir,
    read_active,
    read_launch_records,
)
from nccltune.store.launches import keep_handed_over, make_room
from nccltuned.checks import Checks, TakeStock, take_stock_of
from nccltuned.child import Calls
from nccltuned.endpoint import MetricsEndpoint, open_endpoint, passed_sockets
from nccltuned.inbox import Inbox
from nccltuned.journal import summary
from nccltuned.keeper import Keeper
from nccltuned.ledger import Ledger
from nccltuned.metrics import Snapshot, format_metrics
from nccltuned.publish import Publisher
from nccltuned.rollback import RollbackGuard
from nccltuned.starts import StartTracker
from nccltuned.unit_log import MAX_JOURNAL_S
from nccltuned.wakeups import Wakeups
from nccltuned.watch import ServerWatch, StoreWatch

if TYPE_CHECKING:
    from nccltune.live.failed_starts import Start
    from nccltune.sdnotify import Notifier

logger = logging.getLogger("nccltuned")

START_TICK_S = 2.0
"""How often a start that is going on is looked at."""

ALERT_TICK_S = 0.5
ALERT_S = 60.0
"""How closely, and for how long, new servers are looked for after one has gone: what restarts it
may do so at once, and its next end may come soon."""

NEED_WAIT_S = 0.5
"""After a look that was given up: what asked for it still does."""

READY_WAIT_S = 20.0
"""The first look may take so long before the service counts as ready all the same."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the service is told.

    Attributes:
        state_folder: of the store; read, and written by a roll-back.
        run_folder: where the active environment is published.
        metrics: address, see ``open_endpoint``.
        interval_s: how often new servers are looked for.
        rollback_after: failed starts that lead to a roll-back; 0 for never.
    """

    state_folder: Path
    run_folder: Path
    metrics: str
    interval_s: float = 10.0
    rollback_after: int = 3


class Service:
    """All of it; ``run`` returns when a signal asks for the end."""

    def __init__(
        self, config: Config, notifier: Notifier, take_stock: TakeStock = take_stock_of
    ) -> None:
        self._config = config
        self._notifier = notifier
        self._wakeups = Wakeups()
        self._calls = Calls()
        self._servers = ServerWatch()
        self._store = StoreWatch(config.state_folder)
        self._active = read_active(config.state_folder)
        ledger = Ledger.load(config.state_folder)
        self._keeper = Keeper(config.state_folder)
        self._guard = RollbackGuard(
            ledger, config.state_folder, config.rollback_after, self._keeper
        )
        self._tracker = StartTracker(ledger.has, self._start_ended, self._defer)
        self._checks = Checks(self._calls, self._publish, take_stock)
        self._publisher = Publisher(config.run_folder, _identity(config))
        self._endpoint: MetricsEndpoint | None = None
        self._inbox = Inbox(config.run_folder / INBOX_NAME)
        self._has_records = False
        self._alert_until_s = 0.0
        self._told: set[str] = set()

    def run(self) -> None:
        """Work until a signal asks for the end."""
        self._wakeups.open()
        try:
            self._open_sockets()
            self._work()
            self._notifier.stopping()
            logger.info("stopping")
        finally:
            self._close()

    def _work(self) -> None:
        ready_by_s: float | None = time.monotonic() + READY_WAIT_S
        next_tick_s = 0.0
        is_asked, is_ready_owed = True, False
        while True:
            now_s = time.monotonic()
            if is_asked or now_s >= next_tick_s:
                self._notifier.watchdog()
                with self._giving_up_in_need():
                    self._tick()
                next_tick_s = time.monotonic() + self._tick_s()
            if ready_by_s is not None and (self._checks.is_settled or now_s >= ready_by_s):
                ready_by_s = None
                is_ready_owed = self._notifier.is_listened_to
                logger.info("ready: %s", self._summary())
            # Said again until it is heard: without it the manager would end the service.
            is_ready_owed = is_ready_owed and not self._notifier.ready(self._summary())
            with self._giving_up_in_need():
                self._poll(min(next_tick_s, ready_by_s or next_tick_s))
            woken = self._wakeups.take()
            if woken.is_stop:
                return
            if woken.is_reload:
                logger.info("reading everything again")
                self._publisher.forget()
                self._checks.want()
            is_asked = woken.is_reload or woken.is_change

    def _tick_s(self) -> float:
        interval_s = self._config.interval_s
        if self._tracker.is_waiting:
            interval_s = min(interval_s, START_TICK_S)
        if time.monotonic() < self._alert_until_s:
            interval_s = min(interval_s, ALERT_TICK_S)
        if self._notifier.watchdog_s is not None:
            interval_s = min(interval_s, self._notifier.watchdog_s / 3.0)
        return interval_s

    def _tick(self) -> None:
        """Look whether anything has changed, and act on it."""
        folder = self._config.state_folder
        self._wakeups.watch([folder, profiles_dir(folder)])
        # Until nothing was written while it was read.
        while self._store.has_decision_changed(self._active):
            self._active = read_active(folder)
            self._checks.want()
        self._tracker.generation = self._active.generation
        self._tracker.trusted_uids = _trusted_uids(folder)
        if self._store.has_launches_changed() or not self._has_records:
            self._read_records()
        before = {server.pid for server in self._servers.servers}
        if self._servers.look():
            self._checks.want()
            if before - {server.pid for server in self._servers.servers}:
                self._alert_until_s = time.monotonic() + ALERT_S
        self._tracker.take_servers(self._servers.servers)
        self._tracker.step()
        self._guard.roll_back_if_due()
        self._checks.start_if_due(self._servers.servers)

    @contextmanager
    def _giving_up_in_need(self) -> Iterator[None]:
        """Give up a look for which there are no descriptors: the next one sees the same."""
        try:
            yield
        except OSError as error:
            if not is_exhausted(error):
                raise
            self._tell_once("nothing can be looked at for now: %s", error)
            time.sleep(NEED_WAIT_S)

    def _poll(self, until_s: float) -> None:
        """Wait for something to do, and do it."""
        deadlines = [until_s]
        for source in (self._calls, self._endpoint):
            deadline_s = None if source is None else source.next_deadline_s()
            deadlines += [] if deadline_s is None else [deadline_s]
        poll = select.poll()
        poll.register(self._wakeups.reader, select.POLLIN)
        if self._inbox.descriptor >= 0:
            poll.register(self._inbox.descriptor, select.POLLIN)
        for number in (*self._calls.descriptors(), *self._tracker.descriptors()):
            poll.register(number, select.POLLIN)
        if self._endpoint is not None:
            for number, events in self._endpoint.interests().items():
                poll.register(number, events)
        wait_s = max(0.0, min(deadlines) - time.monotonic())
        for number, _events in poll.poll(wait_s * 1000.0):
            if number in self._tracker.descriptors():
                self._tracker.step()
            elif number == self._inbox.descriptor:
                self._take_records()
            elif not self._calls.handle(number) and self._endpoint is not None:
                self._endpoint.handle(number)
        now_s = time.monotonic()
        self._calls.expire(now_s)
        if self._endpoint is not None:
            self._endpoint.drop_slow(now_s)

    def _read_records(self) -> None:
        make_room(self._config.state_folder)
        try:
            records = read_launch_records(self._config.state_folder)
        except NccltuneError as error:
            self._tell_once("launches are not known: %s", error)
            return
        self._tracker.take_records(records)
        self._has_records = True
        self._tracker.step()  # at once, for a start may be short

    def _defer(self, function: Callable[[], object], done: Callable[[object], None]) -> None:
        self._calls.start(function, done, timeout_s=MAX_JOURNAL_S)

    def _start_ended(self, start: Start) -> None:
        self._guard.start_ended(start)
        self._publish()

    def _publish(self) -> None:
        """Write what others read, where there is anything new."""
        stock = self._checks.stock
        if stock is None and self._checks.is_failing:
            stock = self._bare_stock()
        if stock is None:
            return
        try:
            if self._publisher.publish(stock, self._guard.facts(self._active)):
                self._notifier.status(self._summary())
        except NccltuneError as error:
            self._tell_once("nothing can be published: %s", error)

    def _bare_stock(self) -> dict[str, object]:
        """Return what the store alone says, so that nothing older stays published."""
        # Loaded here: as a rule a child needs it, and the service does not.
        from nccltune.live.profile_standing import judge_profile
        from nccltune.live.stock import Stock

        problem = "this host could not be looked at; see the log of nccltuned"
        return Stock(judge_profile(self._active, None, problem), (), (problem,)).to_json()

    def _metrics(self) -> str:
        checks = self._checks
        return format_metrics(
            Snapshot(
                stock=checks.stock,
                checked_at_s=checks.checked_at_s,
                is_check_failing=checks.is_failing,
                failed_start_count=len(self._guard.ledger.failures(self._active)),
                uncounted_failed_start_count=len(self._guard.ledger.uncounted(self._active)),
                is_store_keeper=self._guard.ledger.is_kept,
                rollback_count=len(self._guard.ledger.rollbacks),
                start_counts=self._guard.start_counts(),
            )
        )

    def _open_sockets(self) -> None:
        """Serve metrics and take records, or say why not: that is no reason not to work."""
        try:
            make_dir(self._config.run_folder)
            self._inbox.open()
        except (NccltuneError, OSError) as error:
            logger.warning("launches of other users are not taken down: %s", error)
        try:
            self._endpoint = open_endpoint(self._config.metrics, self._metrics, passed_sockets())
        except NccltuneError as error:
            logger.warning("there are no metrics: %s", error)

    def _take_records(self) -> None:
        """Put down what others were not allowed to, each in his own file."""
        folder = self._config.state_folder
        trusted_uids = _trusted_uids(folder)
        for record in self._inbox.take():
            if not folder.is_dir():
                continue  # nothing of ours may stand where a volume is missing
            try:
                if record.uid is None or record.uid in trusted_uids:
                    append_launch_record(record, folder)
                else:
                    keep_handed_over(record, record.uid, folder)
            except NccltuneError as error:
                self._tell_once("launches of other users are not taken down: %s", error)
        if self._store.has_launches_changed():
            self._read_records()

    def _summary(self) -> str:
        return summary(self._checks.stock)

    def _tell_once(self, text: str, error: Exception) -> None:
        if str(error) not in self._told:
            self._told.add(str(error))
            logger.error(text, error)

    def _close(self) -> None:
        self._calls.close()
        self._tracker.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._inbox.close()
        self._keeper.close()
        self._wakeups.close()


def _trusted_uids(folder: Path) -> frozenset[int]:
    """Return whose starts count whatever is known of them: root's, and those of the store's owner.

    Anybody else could roll back a profile by starting what dies.
    """
    try:
        return frozenset({0, folder.stat().st_uid})
    except OSError:
        return frozenset({0})


def _identity(config: Config) -> dict[str, object]:
    """Name this process, so that readers can tell whether it lives, and what it watches."""
    own = read_process(os.getpid())
    return {
        "pid": os.getpid(),
        "started_ticks": None if own is None else own.started_ticks,
        "state_folder": str(config.state_folder),
    }
