"""Starts and how they ended, kept over restarts of the service, and the roll-backs they led to.

Schema history of ``nccltune.starts``:
    1: first version. Later: the ending ``ended``, ``?`` for a digest that is not known, and the
        launch that a start was part of.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar, get_type_hints

from nccltune.atomic import write_atomic
from nccltune.errors import NccltuneError
from nccltune.inject.marker import settings_digest
from nccltune.jsontext import parse_json
from nccltune.live.failed_starts import (
    Ending,
    Start,
    failures_against,
    is_before,
    uncounted_failures,
)
from nccltune.store import ActiveState, deactivate, find_profile, rollback

logger = logging.getLogger(__name__)

SCHEMA = "nccltune.starts/1"
FILE_NAME = "starts.json"
MAX_STARTS = 200
MAX_OTHERS = 60
"""Of these, starts that do not count: of them the ones of whoever has most make room first."""

KEPT_OF_EACH = 10
"""A server that dies again and again pushes out no start of another command or profile, as long as
so many of its own are left."""

MAX_ROLLBACKS = 20
_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class RolledBack:
    """One roll-back by the service.

    Attributes:
        profile_name: what was rolled back, with its digest.
        returned_to: what is active since; None for no profile.
        at: ISO 8601, UTC.
        generation: of the store's state that it ended; 0 if unknown.
        ending: how the last failure ended; its line is in the journal and with the starts, for a
            log is not everybody's to read.
    """

    profile_name: str
    digest: str
    returned_to: str | None
    at: str
    failure_count: int
    ending: str = ""
    generation: int = 0

    def to_json(self) -> dict[str, object]:
        """Return what is kept and published."""
        return asdict(self)


T = TypeVar("T", Start, RolledBack)


@dataclass(slots=True)
class Ledger:
    """The starts that were seen, the oldest first, and the roll-backs that they led to.

    Attributes:
        is_kept: it is written to disk: no other service keeps this store.
    """

    folder: Path
    starts: list[Start] = field(default_factory=list)
    rollbacks: list[RolledBack] = field(default_factory=list)
    is_kept: bool = True

    @classmethod
    def load(cls, folder: Path) -> Ledger:
        """Read the file; one that is broken is told once and begun anew."""
        path = folder / FILE_NAME
        ledger = cls(folder)
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES).decode()
            data = parse_json(text, path).data
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                raise ValueError(f"no {SCHEMA}")  # noqa: TRY301 - one place to tell all of it
            ledger.starts = _checked(Start, data["starts"])
            ledger.rollbacks = _checked(RolledBack, data["rollbacks"])
        except FileNotFoundError:
            pass
        except (NccltuneError, OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("failed starts are counted anew: path=%s error=%s", path, error)
            return cls(folder)
        return ledger

    def has(self, key: tuple[str, int, int]) -> bool:
        """Tell whether the end of this start is known already."""
        return any(key in (start.key, start.record_key) for start in self.starts)

    def add(self, start: Start) -> None:
        """Keep how one start ended, on disk too where this is the keeper of the store.

        Raises:
            FileError: the state folder cannot be written; it is kept in memory all the same.
        """
        self.starts = [each for each in self.starts if each.key != start.key]
        self.starts = _kept([*self.starts, start])
        if self.is_kept:
            self._save()

    def take_over(self) -> None:
        """Go on with what another service has written meanwhile, and with what was seen here."""
        theirs = Ledger.load(self.folder)
        known = {start.key for start in theirs.starts}
        own = [start for start in self.starts if start.key not in known]
        self.starts, self.rollbacks = _kept([*theirs.starts, *own]), theirs.rollbacks
        self.is_kept = True

    def had_served(self, uid: int | None, generation: int) -> bool:
        """Tell whether a user had a server that came up before this state of the store."""
        return uid is not None and any(
            start.uid == uid and start.ending is Ending.READY and start.generation < generation
            for start in self.starts
        )

    def failures(self, active: ActiveState) -> tuple[Start, ...]:
        """Return the starts that speak against the active profile."""
        if active.profile is None:
            return ()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        # A step in times to come: the clock was set back since, and says nothing.
        is_known = not is_before(now, active.activated_at)
        return failures_against(
            self.starts,
            settings_digest(active.profile.settings),
            activated_at=active.activated_at if is_known else "",
            generation=active.generation,
        )

    def uncounted(self, active: ActiveState) -> tuple[Start, ...]:
        """Return failures under the active profile that do not count because of whose they are."""
        if active.profile is None:
            return ()
        digest = settings_digest(active.profile.settings)
        return uncounted_failures(self.starts, digest, generation=active.generation)

    def roll_back_if_due(self, active: ActiveState, limit: int) -> RolledBack | None:
        """Leave the active profile once enough starts have failed under it.

        Args:
            active: what the store says now.
            limit: how many are enough; 0 for never.

        Raises:
            NccltuneError: the store cannot be changed.
        """
        failures = self.failures(active)
        if active.profile is None or not limit or len(failures) < limit:
            return None
        digest = settings_digest(active.profile.settings)
        # First the step, then the note of it: between the two another profile is active, so that
        # the same starts can never lead to a second step.
        is_known_bad = active.previous is not None and self._is_bad(active.previous, digest)
        take = deactivate if is_known_bad else rollback
        step = take(reason="daemon", expected=active)
        done = RolledBack(
            profile_name=active.profile.name,
            digest=digest,
            returned_to=step.name,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            failure_count=len(failures),
            ending=str(failures[-1].ending),
            generation=active.generation,
        )
        self.rollbacks = [*self.rollbacks, done][-MAX_ROLLBACKS:]
        self.starts = [
            replace(start, is_spent=True) if start.digest == digest else start
            for start in self.starts
        ]
        # The step is taken: a note that cannot be written, which adding starts has told already,
        # must not hide it.
        with suppress(NccltuneError):
            self._save()
        return done

    def _is_bad(self, name: str, digest: str) -> bool:
        """Whether a roll-back to this profile would return to what has failed already.

        Args:
            name: of the profile.
            digest: of the one that has failed just now, which the other may equal.
        """
        try:
            other = settings_digest(find_profile(name).profile.settings)
        except NccltuneError:
            return False
        left = [each for each in self.rollbacks if each.digest == other]
        has_served_since = any(
            start.digest == other
            and start.is_trusted
            and start.ending is Ending.READY
            and left
            and not _is_earlier(start, left[-1])
            for start in self.starts
        )
        return other == digest or (bool(left) and not has_served_since)

    def _save(self) -> None:
        document = {
            "schema": SCHEMA,
            "starts": [asdict(start) for start in self.starts],
            "rollbacks": [each.to_json() for each in self.rollbacks],
        }
        if not self.folder.exists():
            return  # a volume is missing: nothing of ours may stand in its place
        text = json.dumps(document, indent=1) + "\n"
        write_atomic(self.folder / FILE_NAME, text, mode=0o600)


def _is_earlier(start: Start, done: RolledBack) -> bool:
    """Whether a start was before a roll-back, by the time of day only where need be."""
    if start.generation and done.generation:
        return start.generation <= done.generation
    return is_before(start.launched_at, done.at)


def _kept(starts: list[Start]) -> list[Start]:
    """Leave out the oldest of the largest group until the rest has room.

    Those that do not count push out none that do, nor each other's.
    """
    counts = Counter(map(_group, starts))
    surplus: Counter[Hashable] = Counter()

    def left(groups: Iterable[Hashable]) -> Counter[Hashable]:
        return Counter({each: counts[each] - surplus[each] for each in groups})

    others = {_group(start) for start in starts if not start.is_trusted}
    while (found := left(others)).total() > MAX_OTHERS:
        surplus[found.most_common(1)[0][0]] += 1
    while (found := left(counts)).total() > MAX_STARTS:
        [(group, count)] = found.most_common(1)
        if count <= KEPT_OF_EACH:
            break
        surplus[group] += 1
    kept = []
    for start in starts:
        if surplus[_group(start)] > 0:
            surplus[_group(start)] -= 1
        else:
            kept.append(start)
    return kept[-MAX_STARTS:]


def _group(start: Start) -> Hashable:
    """Return what a start shares room with: its command and profile, or its user's others."""
    return (start.command_digest, start.digest) if start.is_trusted else start.uid


def _checked(kind: type[T], rows: Iterable[object]) -> list[T]:
    """Build records from what a file holds, keys of later versions left out."""
    types = get_type_hints(kind)  # the annotations are text, which takes a while to look up
    return [_built(kind, types, each) for each in rows]


def _built(kind: type[T], types: Mapping[str, type], data: object) -> T:
    if not isinstance(data, Mapping):
        raise TypeError(f"{kind.__name__}: {data!r}")
    values: dict[str, object] = {}
    for name, expected in types.items():
        if name not in data:
            continue
        value = Ending(data[name]) if expected is Ending else data[name]
        if not isinstance(value, expected):
            raise TypeError(f"{kind.__name__}.{name}: {value!r}")
        values[name] = value
    return kind(**values)  # type: ignore[arg-type]  # as just checked
