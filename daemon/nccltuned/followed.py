"""Which starts are followed, which are settled, and how they stand to each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.live.procfs import Process, is_running
from nccltune.live.scanner import is_launch

if TYPE_CHECKING:
    from nccltuned.fronts import Place
    from nccltuned.pending import Pending

Key = tuple[int, int]


@dataclass(slots=True)
class Followed:
    """All processes of this boot that are or were followed, as long as they are there.

    Attributes:
        pending: starts that are going on, by their process.
        settled: processes of which nothing more is to be learnt as long as they are what they were.
    """

    pending: dict[Key, Pending] = field(default_factory=dict)
    settled: dict[Key, Place] = field(default_factory=dict)

    def has(self, process: Process) -> bool:
        """Tell whether a process is known as what it is now."""
        place = self.settled.get(process.key)
        is_settled = place is not None and (
            is_launch(place.process.argv) or not is_launch(process.argv)
        )
        return is_settled or process.key in self.pending

    def has_below(self, process: Process) -> bool:
        """Tell whether a server that a program has started is known, and stands for it."""
        places = (*(pending.place for pending in self.pending.values()), *self.settled.values())
        return not is_launch(process.argv) and any(place.stands_for(process) for place in places)

    def add(self, pending: Pending) -> None:
        """Follow a start from now on."""
        self.settled.pop(pending.process.key, None)
        self.pending[pending.process.key] = pending

    def forget(self, pending: Pending) -> None:
        """Follow a start no longer."""
        pending.let_go()
        self.pending.pop(pending.process.key, None)

    def settle(self, place: Place) -> None:
        """Follow a process no longer, and not again."""
        pending = self.pending.get(place.process.key)
        if pending is not None:
            self.forget(pending)
        self.settled[place.process.key] = place

    def settle_above(self, place: Place) -> None:
        """Follow no program beside the server that it has started."""
        for process in place.above:
            pending = self.pending.get(process.key)
            if pending is not None and place.stands_for(pending.process):
                self.settle(pending.place)

    def drop_ended(self, root: Path) -> None:
        """Forget settled processes that are gone."""
        for key, place in list(self.settled.items()):
            if not is_running(place.process, root):
                del self.settled[key]

    def succeeded_by(self, place: Place) -> Iterator[Pending]:
        """Yield dead starts whose program in front has started another server since."""
        for pending in list(self.pending.values()):
            if pending.died_at_s is not None and pending.front and place.is_below(pending.front):
                yield pending

    def part_logs(self, new: Pending) -> None:
        """Read no log that a new start and another server write at the same time."""
        for place in self.settled.values():
            if place.is_beside(new.place):
                new.lose_logs(place.outputs)
        for each in self.pending.values():
            if each.died_at_s is None and each.place.is_beside(new.place):
                each.lose_logs(new.place.outputs)
                new.lose_logs(each.place.outputs)
