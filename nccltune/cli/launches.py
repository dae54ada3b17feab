"""Shows the launches of ``bench`` and ``recording make`` in the view of a search."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from nccltune.cli.live import KEPT, Wording
from nccltune.search.result import Progress, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from nccltune.measurement import Launch, Outcome
    from nccltune.search.result import SearchObserver

BENCH_WORDING = Wording(dict.fromkeys(Stage, "measuring"), "launch", "Ctrl-C stops.")
RECORDING_WORDING = replace(BENCH_WORDING, footer=KEPT)


class SeriesFollower:
    """Turns "launch 3 of 16 ended" into what a view of a search takes.

    Args:
        observer: the view.
        time_limit_s: of the series; None for none.
        clock: in seconds.
    """

    def __init__(
        self,
        observer: SearchObserver,
        *,
        time_limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = observer
        self._time_limit_s = time_limit_s
        self._clock = clock
        self._began_s = clock()
        self._counts: Counter[Outcome] = Counter()
        self.latest: Launch | None = None

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        limit_s = self._time_limit_s
        return limit_s is not None and self._clock() - self._began_s >= limit_s

    def note(self, idx: int, total: int, launch: Launch) -> None:
        """Pass a finished launch on; ``idx`` counts from 0."""
        self.latest = launch
        self._counts[launch.outcome] += 1
        elapsed_s = self._clock() - self._began_s
        remaining_s = elapsed_s / (idx + 1) * (total - idx - 1)
        if self._time_limit_s is not None:
            remaining_s = min(remaining_s, max(0.0, self._time_limit_s - elapsed_s))
        self._observer.update(
            Progress(
                stage=Stage.SEARCH,
                settings=launch.settings,
                trial_idx=idx + 1,
                trial_total=total,
                elapsed_s=elapsed_s,
                remaining_s=remaining_s,
                best_score_ratio=None,
                best_settings={},
                outcome_counts=dict(self._counts),
                launch=launch,
            )
        )
