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

if TYPE_CHECKING:
    from nccltune.recording import RecordingWriter
    from nccltune.search.space import Space

BASELINE_EVERY = 10
HOST_FAULT_LIMIT = 3

OnLaunch = Callable[[int, int, Launch], None]
"""Called after every launch: how many candidates are done, how many there are, the launch."""


def design_candidates(space: Space, count: int, seed: int) -> list[dict[str, str]]:
    """Return distinct candidates: every choice alone, then pairs and triples drawn at random.

    The order is random too, so that a recording that ends early is no worse a sample.
    """
    rng = random.Random(seed)
    alone = [space.settings({name: choice}) for name, choice in space.single_choices()]
    chosen: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    draws = map(space.settings, itertools.islice(space.sparse_params(rng), 100 * count))
    for settings in itertools.chain(alone, draws):
        if len(chosen) >= count:
            break
        if settings:
            chosen.setdefault(tuple(sorted(settings.items())), settings)
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
    waiting = [one for one in candidates if not writer.count(one)]
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
