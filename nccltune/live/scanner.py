"""Running SGLang servers among the processes of this host: what started them, and their ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from nccltune.errors import UsageProblem
from nccltune.live.procfs import (
    PROC_ROOT,
    TITLE_PREFIX,
    Process,
    read_command_line,
    read_process,
    read_uid,
)
from nccltune.sglang.argv import split_launch

SCHEDULER_TITLE = "sglang::scheduler"
"""Beginning of a rank's title (``srt/managers/scheduler.py``, 0.5.10 to 0.5.23)."""

_NAME_MARK = b"sglang"
_MAX_WRAPPER_WORDS = 64

MAX_SERVERS_OF_USER = 64
MAX_RANKS_OF_SERVER = 64
"""What is looked at of one user and one server: whoever starts more for fun stops nobody else."""

_INTERPRETER_OPTIONS_WITH_VALUE = frozenset({"-X", "-W"})


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a server."""

    process: Process

    @property
    def name(self) -> str:
        """``TP0``, ``DP1_TP0``; ``scheduler`` where there is only one."""
        return self.process.title.removeprefix(SCHEDULER_TITLE).strip("_ ") or "scheduler"


@dataclass(frozen=True, slots=True)
class Server:
    """One SGLang server.

    Attributes:
        root: the process that started the ranks; None where it is gone and they live on.
        ranks: by name; none yet while it starts.
        is_launch: the root's command line is a launch command, and no program that embeds SGLang.
    """

    root: Process | None
    ranks: tuple[Rank, ...]
    is_launch: bool

    @property
    def pid(self) -> int:
        """Number to call it by: the root's, else the first rank's."""
        return self.root.pid if self.root is not None else self.ranks[0].process.pid


def is_launch(argv: tuple[str, ...]) -> bool:
    """Tell whether this command line is SGLang itself: no wrapper that starts it, no tool of ours.

    >>> is_launch(("python3", "-u", "-m", "sglang.launch_server", "--tp", "8"))
    True
    >>> is_launch(("python3", "/usr/bin/nccltune", "search", "--", "sglang", "serve"))
    False
    """
    try:
        start, _ = split_launch(argv[:_MAX_WRAPPER_WORDS])
    except UsageProblem:
        return False
    if start == 0:
        return True
    return PurePath(argv[0]).name.startswith(("python", "pypy")) and _is_options(argv[1:start])


def _is_options(words: Iterable[str]) -> bool:
    """Whether these are options of an interpreter only, and no script of its own."""
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            return False
        is_value = not is_value and word in _INTERPRETER_OPTIONS_WITH_VALUE
    return True


@dataclass(slots=True)
class ServerScanner:
    """Finds servers again and again, looking closely only at what is new.

    A process can turn into SGLang by ``exec``, which launchers do soon after their start: a process
    is looked at in every scan while it is young to the scanner, and all are in a full one.

    A child has its parent's words from fork to exec, and for good where it calls no exec: a
    compiler that a rank starts has the title of that rank for a moment. Such a copy is no rank and
    no server. It is told by its parent's words, and once that has ended by its never having called
    exec; a server that was restored from a checkpoint has not either, and is known by its ranks.
    """

    root: Path = PROC_ROOT
    young_scans: int = 12
    full_scans: int = 30
    _seen: dict[int, int] = field(default_factory=dict)
    _scan_count: int = 0

    def scan(self) -> tuple[Server, ...]:
        """Return every server, in the order of their process ids."""
        roots: dict[tuple[int, int], Process | None] = {}
        ranks: dict[tuple[int, int], list[Rank]] = {}
        launches: list[Process] = []
        for process in self._named():
            # Read after its child: one that has just become SGLang would still differ from it.
            parent = read_process(process.parent_pid, self.root)
            if parent is not None and parent.argv == process.argv:
                continue
            if process.title.startswith(SCHEDULER_TITLE):
                root = self._root_from(parent)
                if root is None and process.is_fork:
                    continue
                key = (0, process.session) if root is None else (root.pid, root.started_ticks)
                roots[key] = root
                ranks.setdefault(key, []).append(Rank(process))
            elif is_launch(process.argv) and not process.is_fork:
                launches.append(process)
        for process in launches:
            roots.setdefault((process.pid, process.started_ticks), process)
        servers = [
            Server(
                root=root,
                ranks=_sorted(ranks.get(key, ()))[:MAX_RANKS_OF_SERVER],
                is_launch=root is not None and is_launch(root.argv),
            )
            for key, root in roots.items()
        ]
        return tuple(sorted(self._not_too_many(servers), key=lambda server: server.pid))

    def _not_too_many(self, servers: Iterable[Server]) -> Iterator[Server]:
        """Yield the oldest of each user's servers."""
        counts: Counter[int | None] = Counter()
        for server in sorted(servers, key=_begun_ticks):
            uid = read_uid(server.pid, self.root)
            counts[uid] += 1
            if counts[uid] <= MAX_SERVERS_OF_USER:
                yield server

    def _named(self) -> Iterator[Process]:
        """Yield processes whose command line names SGLang at all."""
        is_full = self._scan_count % self.full_scans == 0
        self._scan_count += 1
        with os.scandir(self.root) as entries:
            present = {int(entry.name) for entry in entries if entry.name.isdigit()}
        for pid in self._seen.keys() - present:
            del self._seen[pid]
        for pid in sorted(present):
            seen_count = self._seen.get(pid, 0)
            if seen_count >= self.young_scans and not is_full:
                continue
            if _NAME_MARK in read_command_line(pid, self.root):
                self._seen.pop(pid, None)
                # Words and parent belong together, hence both are read now.
                if (process := read_process(pid, self.root)) is not None:
                    yield process
            else:
                self._seen[pid] = seen_count + 1

    def _root_from(self, parent: Process | None) -> Process | None:
        """Climb from a rank's parent to what started it; None where that has ended."""
        process = parent
        while process is not None and process.title.startswith(TITLE_PREFIX):
            process = read_process(process.parent_pid, self.root)
        # Orphans are taken over by the first process of their container or host.
        if process is None or (process.pid == 1 and not is_launch(process.argv)):
            return None
        return process


def find_servers(root: Path = PROC_ROOT) -> tuple[Server, ...]:
    """Find every SGLang server that this process can see."""
    return ServerScanner(root).scan()


def _begun_ticks(server: Server) -> int:
    return (server.root or server.ranks[0].process).started_ticks


def _sorted(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Order by name, numbers by their value: ``TP10`` after ``TP9``."""
    return tuple(sorted(ranks, key=lambda rank: (len(rank.name), rank.name, rank.process.pid)))
