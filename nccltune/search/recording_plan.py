"""Making a recording: a designed set of candidates, each measured whole, between baselines.

Unlike a search it does not look for the best: it covers the space, so that searches can be compared
on it later. Failures are kept too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nccltune.measurement import Bench, Launch, Outcome, PayloadRequest, Settings
from nccltune.recording import candidate_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nccltune.recording import RecordingWriter, SettingsKey
    from nccltune.search.space import Space

BASELINE_EVERY = 10
HOST_FAULT_LIMIT = 3

OnLaunch = Callable[[int, int, Launch], None]
"""Called after every launch: how many candidates are done, how many there are, the launch."""


def plan_candidates(
    space: Space,
    count: int,
    seed: int,
    *,
    own: Sequence[Settings],
    folk: Settings,
    held: Sequence[Settings],
) -> list[Settings]:
    """Return all that a recording is to hold beside the defaults, each once in whatever spelling.

    Args:
        space: in which further candidates are designed.
        count: how many there are to be; fewer where the space has no more.
        seed: of the design.
        own: what the operator gave. All of it is planned, first, and spelled as it was given.
        folk: the folk profile's, planned where ``count`` leaves a place.
        held: what the recording has already, all of it planned.
    """
    kept = _distinct([*own, *held])
    planned = _distinct([*kept, folk, *design_candidates(space, count, seed)])
    return planned[: max(count, len(kept))]


def _distinct(candidates: Iterable[Settings]) -> list[Settings]:
    """Keep the first of those that a search counts once, and nothing that is the defaults."""
    found: dict[SettingsKey, Settings] = {}
    for settings in candidates:
        found.setdefault(candidate_key(settings), settings)
    found.pop((), None)
    return list(found.values())


def design_candidates(space: Space, count: int, seed: int) -> list[dict[str, str]]:
    """Return distinct candidates: every choice alone, then pairs and triples drawn at random.

    The order is random too, so that a recording that ends early is no worse a sample.
    """
    rng = random.Random(seed)
    alone = [space.settings({name: choice}) for name, choice in space.single_choices()]
    chosen: dict[SettingsKey, dict[str, str]] = {}
    draws = map(space.settings, itertools.islice(space.sparse_params(rng), 100 * count))
    for settings in itertools.chain(alone, draws):
        if len(chosen) >= count:
            break
        if settings:
            chosen.setdefault(candidate_key(settings), settings)
    designed = list(chosen.values())
    rng.shuffle(designed)
    return designed


def record(
    bench: Bench,
    candidates: Sequence[Settings],
    requests: Sequence[PayloadRequest],
    writer: RecordingWriter,
    *,
    is_over: Callable[[], bool],
    on_launch: OnLaunch = lambda done, total, launch: None,
) -> int:
    """Measure every candidate that the writer does not hold yet, with the baseline in between.

    Returns:
        How many launches were added.
    """
    waiting = writer.missing(candidates)
    added = faults = 0
    for idx, settings in enumerate(waiting):
        due = [{}, settings] if idx % BASELINE_EVERY == 0 else [settings]
        for one in due:
            if is_over():
                return added
            started_at = datetime.now(UTC)
            launch = bench.launch(one, requests)
            on_launch(idx, len(waiting), launch)
            if launch.outcome in (Outcome.HOST_BUSY, Outcome.HOST_FAILED):
                faults += 1
                if faults >= HOST_FAULT_LIMIT:
                    return added
                continue
            faults = 0
            writer.append(launch, started_at=started_at)
            added += 1
    return added
