"""How far each rank has come within a command, so that a hang can be put down to its cause.

A collective makes all ranks wait for the slowest, so that one rank that hangs makes all of them
late. Each notes its step before it may have to wait, in a file of its own that is read only once
the deadline has passed. Nothing is noted while a graph is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

Note = Callable[[str], None]
"""Called with what a rank is about to do; all ranks make the same notes within a command."""


@dataclass(frozen=True, slots=True)
class Step:
    """Where a rank is.

    Attributes:
        number: counts the notes within a command; 0 before its first.
        what: the rank's own words for it; empty at 0.
    """

    number: int = 0
    what: str = ""


class StepFile:
    """A rank's notes; only the last is kept.

    Args:
        path: the file; made if it is not there.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._number = 0

    def note(self, what: str) -> None:
        """Keep what comes next."""
        self._write(self._number + 1, what)

    def rest(self) -> None:
        """Forget the command that is over, before its answer: the next begins at 0."""
        if self._number:
            self._write(0, "")

    def _write(self, number: int, what: str) -> None:
        self._number = number
        with suppress(OSError):  # a full disk is no fault of the settings
            os.pwrite(self._descriptor, f"{number} {what}\n".encode(), 0)


def read_step(path: Path) -> Step:
    """Return a rank's last step; number 0 where none can be read."""
    try:
        number, _, what = path.read_text(errors="replace").partition("\n")[0].partition(" ")
        return Step(int(number), what)
    except (OSError, ValueError):
        return Step()
