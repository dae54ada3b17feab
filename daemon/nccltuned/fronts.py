"""Where a server stands among processes: programs in front of it, and who writes its log.

``timeout 600 sglang serve ...`` and ``nccltune launch -- sglang serve ...`` are given the server's
words. One that passes output on writes the log, and its last words are of the server's end. Between
it and the server there may be others without these words: ``conda run`` starts a script of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nccltune.live.procfs import read_process
from nccltune.live.scanner import find_servers, is_launch
from nccltuned.logs import LogEnds, LogFiles, open_logs
from nccltuned.outputs import outputs_of
from nccltuned.pending import tokens_of

if TYPE_CHECKING:
    from nccltune.live.procfs import Process
    from nccltuned.log_file import Inode

MAX_ANCESTORS = 32
_PROGRAM, _VERIFY = "nccltune", "verify"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server stands among processes.

    Attributes:
        process: the server, or a program that will start it or become it.
        above: what it was started by, the nearest first.
        fronts: those of them that are given its words.
        outputs: where it and its fronts write to.
    """

    process: Process
    above: tuple[Process, ...] = ()
    fronts: tuple[Process, ...] = ()
    outputs: frozenset[Inode] = frozenset()

    @property
    def writers(self) -> tuple[Process, ...]:
        """Whoever may write its log, the server first."""
        return self.process, *self.fronts

    @property
    def is_of_verify(self) -> bool:
        """Whether ``nccltune verify`` has started it, which is to judge it itself."""
        return any(_is_verify(front.argv) for front in self.fronts)

    def is_below(self, process: Process) -> bool:
        """Tell whether a process has started it, be it by way of others."""
        return any(each.key == process.key for each in self.above)

    def stands_for(self, process: Process) -> bool:
        """Tell whether this is one start with that of a program above it."""
        is_server = is_launch(self.process.argv) and not is_launch(process.argv)
        is_front = any(each.key == process.key for each in self.fronts)
        return is_front or (is_server and self.is_below(process))

    def is_beside(self, other: Place) -> bool:
        """Tell whether these are two servers, neither of which has started the other."""
        are_servers = is_launch(self.process.argv) and is_launch(other.process.argv)
        is_kin = self.is_below(other.process) or other.is_below(self.process)
        return are_servers and not is_kin


def place_of(process: Process, root: Path) -> Place:
    """Find out where a process stands, now that it lives."""
    words = tokens_of(process.argv)
    above = tuple(_ancestors(process, root))
    fronts = tuple(each for each in above if words and tokens_of(each.argv) == words)
    outputs = (outputs_of(each.pid, root) for each in (process, *fronts))
    return Place(process, above, fronts, frozenset().union(*outputs))


def _ancestors(process: Process, root: Path) -> Iterator[Process]:
    for _ in range(MAX_ANCESTORS):
        parent = read_process(process.parent_pid, root)
        if parent is None:
            return
        yield parent
        process = parent


def _is_verify(argv: Sequence[str]) -> bool:
    names = [PurePath(word).name for word in argv]
    if _PROGRAM not in names:
        return False
    words = (word for word in argv[names.index(_PROGRAM) + 1 :] if not word.startswith("-"))
    return next(words, "") == _VERIFY


def open_first_log(
    place: Place, *, age_s: float, root: Path, ends: LogEnds
) -> tuple[LogFiles, Process | None]:
    """Open a server's log, be it that of a program in front of it, which is returned then.

    Args:
        place: the server's.
        age_s: see ``open_logs``, and the rest.

    Raises:
        OSError: there are no descriptors left.
    """
    for each in place.writers:
        logs = open_logs(each.pid, age_s=age_s, root=root, ends=ends)
        if logs.files:
            return logs, None if each is place.process else each
    return LogFiles(), None


def has_successor(process: Process, logs: LogFiles, root: Path) -> bool:
    """Whether a later server writes into the same file already.

    Scripts start servers again and again into one file, and what the next one writes must not be
    held against this one.
    """
    if not logs.files:
        return False
    roots = [server.root for server in find_servers(root) if server.root is not None]
    return any(
        logs.are_written_by(each.pid, root)
        for later in roots
        if later.started_ticks > process.started_ticks
        for each in place_of(later, root).writers
    )
