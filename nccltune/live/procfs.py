"""Running SGLang servers as procfs shows them: processes, ranks, and their real environment.

Nothing here changes a process. What one may not look at is said to be unreadable, never guessed.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePath

from nccltune.errors import UsageProblem
from nccltune.sglang.argv import split_launch

PROC_ROOT = Path("/proc")

TITLE_PREFIX = "sglang::"
"""SGLang's processes call themselves so: ``sglang::scheduler_TP0``, ``sglang::detokenizer``."""

SCHEDULER_TITLE = "sglang::scheduler"
"""Beginning of a rank's title (``srt/managers/scheduler.py``, 0.5.10 to 0.5.23)."""

_NAME_MARK = b"sglang"
_MAX_READ_BYTES = 256 * 1024
"""Of a file of a process, which may be megabytes of what its user likes."""

_MAX_COMMAND_BYTES = 32 * 1024
"""A command line that is longer is no server's, and is not looked at."""

_MAX_WRAPPER_WORDS = 64

MAX_SERVERS_OF_USER = 64
MAX_RANKS_OF_SERVER = 64
"""What is looked at of one user and one server: whoever starts more for fun stops nobody else."""

_INTERPRETER_OPTIONS_WITH_VALUE = frozenset({"-X", "-W"})
_ZOMBIE_STATES = (b"Z", b"X")
_PF_EXITING = 0x4  # Linux, include/linux/sched.h


class Unreadable(StrEnum):
    """Why an environment cannot be told."""

    LARGE = "its environment is larger than a server's"
    WIPED = "its title overwrote the environment (SPT_NOENV=1 at start prevents that)"
    FORBIDDEN = "this user may not read another user's process"
    GONE = "the process has ended"


@dataclass(frozen=True, slots=True)
class Process:
    """One process; process id and start name it for as long as the host is up.

    Attributes:
        started_ticks: clock ticks from boot to its start.
        argv: its command line; where it has set a title, that alone.
    """

    pid: int
    parent_pid: int
    started_ticks: int
    session: int
    argv: tuple[str, ...]

    @property
    def title(self) -> str:
        """The title that it gave itself, else its first word."""
        return self.argv[0] if self.argv else ""


@dataclass(frozen=True, slots=True)
class EnvironReading:
    """An environment as procfs shows it: what the process was started with.

    Attributes:
        values: None where it cannot be read, and ``problem`` says why.
    """

    values: Mapping[str, str] | None
    problem: str = ""


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


def read_process(pid: int, root: Path = PROC_ROOT) -> Process | None:
    """Read one process; None where it has ended, be it as a zombie that nobody has fetched.

    One that is ending counts as ended: command line and environment are empty by then, while GPUs
    may take it seconds to let go of. Only ``read_stat`` tells when that is over.
    """
    fields = read_stat(pid, root)
    if fields is None or int(fields[6]) & _PF_EXITING:
        return None
    return Process(
        pid=pid,
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        started_ticks=int(fields[19]),
        argv=_words(_read_command(pid, root)),
    )


def read_stat(pid: int, root: Path = PROC_ROOT) -> list[bytes] | None:
    """Return what ``stat`` says of a process, from its state on; None where it has ended."""
    text = _read(pid, "stat", root) or b""
    # The name in brackets may hold anything, blanks and brackets too.
    fields = text[text.rfind(b")") + 2 :].split()
    return None if len(fields) < 20 or fields[0] in _ZOMBIE_STATES else fields


def read_status(pid: int, root: Path = PROC_ROOT) -> dict[str, str]:
    """Return the lines of a process's ``status`` by their names; none where it has ended."""
    text = (_read(pid, "status", root) or b"").decode("utf-8", "replace")
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def user_of(pid: int, root: Path = PROC_ROOT) -> int | None:
    """Return the user that a process acts for; None where that is not sure, or it has ended.

    A program such as sudo is root's as soon as it runs, and its command line is still the choice
    of whoever called it.
    """
    uids = set(read_status(pid, root).get("Uid", "").split())
    try:
        mode = (root / str(pid) / "exe").stat().st_mode
    except OSError:
        return None
    is_lent = bool(mode & (stat.S_ISUID | stat.S_ISGID))
    return int(uids.pop()) if len(uids) == 1 and not is_lent else None


def is_running(process: Process, root: Path = PROC_ROOT) -> bool:
    """Tell whether this very process is still there, and no later one of the same number."""
    found = read_process(process.pid, root)
    return found is not None and found.started_ticks == process.started_ticks


def read_environ(process: Process, root: Path = PROC_ROOT) -> EnvironReading:
    """Read the environment that a process was started with, its own changes since not among it."""
    try:
        with (root / str(process.pid) / "environ").open("rb") as file:
            content = file.read(_MAX_READ_BYTES + 1)
    except PermissionError:
        return EnvironReading(None, Unreadable.FORBIDDEN)
    except OSError:
        return EnvironReading(None, Unreadable.GONE)
    if len(content) > _MAX_READ_BYTES:
        return EnvironReading(None, Unreadable.LARGE)
    if not is_running(process, root):
        return EnvironReading(None, Unreadable.GONE)
    values: dict[str, str] = {}
    for entry in content.split(b"\0"):
        name, separator, value = entry.partition(b"=")
        if separator and name:
            values.setdefault(os.fsdecode(name), os.fsdecode(value))
    # Started with nothing at all is an answer; an area without one entry is what a title left.
    if content and not values:
        return EnvironReading(None, Unreadable.WIPED)
    return EnvironReading(values)


def started_at_s(process: Process, *, now_s: float, boottime_s: float) -> float:
    """Return when a process was started, in seconds since 1970.

    Args:
        process: the process.
        now_s: the time of day.
        boottime_s: ``CLOCK_BOOTTIME`` at that moment.
    """
    return now_s - boottime_s + process.started_ticks / os.sysconf("SC_CLK_TCK")


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
    """

    root: Path = PROC_ROOT
    young_scans: int = 12
    full_scans: int = 30
    _seen: dict[int, int] = field(default_factory=dict)
    _scan_count: int = 0

    def scan(self) -> tuple[Server, ...]:
        """Return every server, in the order of their process ids."""
        named = dict(self._named())
        launches = {pid: argv for pid, argv in named.items() if is_launch(argv)}
        roots: dict[int, Process] = {}
        ranks: dict[tuple[int, int], list[Rank]] = {}
        for pid, argv in named.items():
            if argv[0].startswith(SCHEDULER_TITLE) and (rank := read_process(pid, self.root)):
                root = self._root_of(rank)
                key = (0, rank.session) if root is None else (root.pid, root.started_ticks)
                if root is not None:
                    roots[root.pid] = root
                ranks.setdefault(key, []).append(Rank(rank))
        for pid in launches.keys() - roots.keys():
            process = read_process(pid, self.root)
            # A child between fork and exec shows its parent's command line.
            if process is not None and launches.get(process.parent_pid) != process.argv:
                roots[pid] = process
                ranks.setdefault((pid, process.started_ticks), [])
        servers = [
            Server(
                root=roots.get(pid),
                ranks=_sorted(found)[:MAX_RANKS_OF_SERVER],
                is_launch=pid in launches,
            )
            for (pid, _), found in ranks.items()
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

    def _named(self) -> Iterator[tuple[int, tuple[str, ...]]]:
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
            content = _read_command(pid, self.root)
            if _NAME_MARK in content:
                self._seen.pop(pid, None)
                yield pid, _words(content)
            else:
                self._seen[pid] = seen_count + 1

    def _root_of(self, rank: Process) -> Process | None:
        """Climb from a rank to what started it; None where that has ended."""
        process: Process | None = rank
        while process is not None and process.title.startswith(TITLE_PREFIX):
            process = read_process(process.parent_pid, self.root)
        # Orphans are taken over by the first process of their container or host.
        if process is None or (process.pid == 1 and not is_launch(process.argv)):
            return None
        return process


def find_servers(root: Path = PROC_ROOT) -> tuple[Server, ...]:
    """Find every SGLang server that this process can see."""
    return ServerScanner(root).scan()


def read_uid(pid: int, root: Path = PROC_ROOT) -> int | None:
    """Return whose process it is; None where it has ended."""
    try:
        return (root / str(pid)).stat().st_uid
    except OSError:
        return None


def _begun_ticks(server: Server) -> int:
    return (server.root or server.ranks[0].process).started_ticks


def _sorted(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Order by name, numbers by their value: ``TP10`` after ``TP9``."""
    return tuple(sorted(ranks, key=lambda rank: (len(rank.name), rank.name, rank.process.pid)))


def _words(content: bytes) -> tuple[str, ...]:
    """Split a command line; what stands behind a title is padding, or what is left of the old."""
    words = content.removesuffix(b"\0").split(b"\0") if content else []
    if words and words[0].startswith(os.fsencode(TITLE_PREFIX)):
        words = [words[0].rstrip()]
    return tuple(os.fsdecode(word) for word in words)


def _read_command(pid: int, root: Path) -> bytes:
    content = _read(pid, "cmdline", root, _MAX_COMMAND_BYTES + 1) or b""
    return content if len(content) <= _MAX_COMMAND_BYTES else b""


def _read(pid: int, name: str, root: Path, limit_bytes: int = _MAX_READ_BYTES) -> bytes | None:
    """Read a small file of a process; None where the process is gone or hidden.

    Plain descriptors, because the service does this for every new process of a host.
    """
    try:
        descriptor = os.open(f"{root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = b""
        while part := os.read(descriptor, limit_bytes - len(content)):
            content += part
    except OSError:
        return None
    else:
        return content
    finally:
        os.close(descriptor)
