"""Tells how starts ended, and leaves the active profile when enough of them have failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.inject.marker import settings_digest
from nccltune.live.failed_starts import Ending, Start
from nccltune.store import read_active

if TYPE_CHECKING:
    from nccltune.store import ActiveState
    from nccltuned.keeper import Keeper
    from nccltuned.ledger import Ledger, RolledBack

logger = logging.getLogger("nccltuned")


@dataclass(slots=True)
class RollbackGuard:
    """Keeps the ledger, and acts on it.

    Attributes:
        folder: of the store.
        limit: failed starts that lead to a roll-back; 0 for never.
        keeper: says whether this service is the one that rolls back here.
    """

    ledger: Ledger
    folder: Path
    limit: int
    keeper: Keeper
    # A service that died between a failure and its roll-back finds it due when it comes back.
    _is_due: bool = True
    _told: set[str] = field(default_factory=set)

    def start_ended(self, start: Start) -> None:
        """Take in how a start ended, and roll back where that makes enough of them."""
        self._is_keeper()
        active = read_active(self.folder)
        if start.profile_name is None and _digest_of(active) == start.digest:
            start = replace(start, profile_name=active.name)
        if not start.is_trusted:
            is_trusted = self.ledger.had_served(start.uid, start.generation)
            # What stands in a file that a stranger writes to may be a third one's.
            detail = start.detail if is_trusted else ""
            start = replace(start, is_trusted=is_trusted, detail=detail)
        _tell(start)
        try:
            self.ledger.add(start)
        except NccltuneError as error:
            self._tell_once("starts are not kept over a restart of this service: %s", error)
        self._is_due = True
        self.roll_back_if_due()

    def roll_back_if_due(self) -> None:
        """Roll back if there is reason to; one that cannot be done now is tried again."""
        if not self._is_keeper() or not self._is_due:
            return
        try:
            done = self.ledger.roll_back_if_due(read_active(self.folder), self.limit)
        except NccltuneError as error:
            self._tell_once("the profile should be rolled back, and cannot be: %s", error)
            return
        self._is_due = False
        if done is not None:
            _tell_rollback(done)

    def _is_keeper(self) -> bool:
        """Tell whether this service keeps the store, and say so when that has changed."""
        is_keeper = self.keeper.is_held()
        if is_keeper and not self.ledger.is_kept:
            logger.info("this service keeps the store from here on: folder=%s", self.folder)
            self.ledger.take_over()
            self._is_due = True
        elif not is_keeper and self.ledger.is_kept:
            logger.warning(
                "another nccltuned keeps this store: this one watches and publishes, and rolls "
                "nothing back: folder=%s",
                self.folder,
            )
            self.ledger.is_kept = False
        return is_keeper

    def facts(self, active: ActiveState) -> Mapping[str, object]:
        """Return what is published; the lines of the logs are not, for they are not everybody's."""
        failures = self.ledger.failures(active)
        return {
            "failed_starts": {
                "count": len(failures),
                "uncounted": len(self.ledger.uncounted(active)),
                "rollback_after": self.limit,
                "last": str(failures[-1].ending) if failures else None,
            },
            "rollbacks": [each.to_json() for each in self.ledger.rollbacks],
        }

    def start_counts(self) -> Mapping[str, int]:
        """Count the starts on record by how they ended."""
        return Counter(str(start.ending) for start in self.ledger.starts)

    def _tell_once(self, text: str, error: NccltuneError) -> None:
        if str(error) not in self._told:
            self._told.add(str(error))
            logger.error(text, error)


def _digest_of(active: ActiveState) -> str:
    return "" if active.profile is None else settings_digest(active.profile.settings)


def _tell(start: Start) -> None:
    is_up = start.ending is Ending.READY
    logger.log(
        logging.INFO if is_up else logging.WARNING,
        "start %s: pid=%s ending=%s profile=%s command=%s last=%s%s",
        "succeeded" if is_up else "failed",
        start.pid,
        start.ending,
        start.profile_name or start.digest or "-",
        start.command_digest,
        start.detail or "-",
        "" if start.is_trusted else f" uid={start.uid} (does not count)",
    )


def _tell_rollback(done: RolledBack) -> None:
    logger.error(
        "ROLLED BACK after %s failed starts: profile=%s now=%s last=%s; servers start without it "
        "from here on, run=nccltune search",
        done.failure_count,
        done.profile_name,
        done.returned_to or "(no profile)",
        done.ending,
    )
