"""Processes as procfs shows them: command line, user, and their real environment.

Nothing here changes a process. What one may not look at is said to be unreadable, never guessed.
Where descriptors have run out nothing can be said of any process, and the OSError goes through.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PROC_ROOT = Path("/proc")

TITLE_PREFIX = "sglang::"
"""SGLang's processes call themselves so: ``sglang::scheduler_TP0``, ``sglang::detokenizer``."""

_MAX_READ_BYTES = 256 * 1024
"""Of a file of a process, which may be megabytes of what its user likes."""

_MAX_COMMAND_BYTES = 32 * 1024
"""A command line that is longer is no server's, and is not looked at."""

_ZOMBIE_STATES = (b"Z", b"X")
_PF_EXITING = 0x4  # Linux, include/linux/sched.h
_PF_FORKNOEXEC = 0x40  # the same; kernels that are not Linux itself, gVisor say, show no flags


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
        is_fork: it has called no ``exec`` since its fork, so that command line and title are its
            parent's, unless it has set a title itself. False where the kernel does not tell.
    """

    pid: int
    parent_pid: int
    started_ticks: int
    session: int
    argv: tuple[str, ...]
    is_fork: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """What names it as long as the host is up."""
        return self.pid, self.started_ticks

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


def is_exhausted(error: OSError) -> bool:
    """Tell whether descriptors have run out, which says nothing of what was looked at."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def read_process(pid: int, root: Path = PROC_ROOT) -> Process | None:
    """Read one process; None where it has ended, be it as a zombie that nobody has fetched.

    One that is ending counts as ended: command line and environment are empty by then, while GPUs
    may take it seconds to let go of. Only ``read_stat`` tells when that is over.
    """
    fields = _stat_before_end(pid, root)
    if fields is None:
        return None
    words = read_command_line(pid, root)
    if not words and _stat_before_end(pid, root) is None:
        return None  # it has ended in between
    return Process(
        pid=pid,
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        started_ticks=int(fields[19]),
        argv=split_command_line(words),
        # Told before the words were read: without it, they could not be its parent's any more.
        is_fork=bool(int(fields[6]) & _PF_FORKNOEXEC),
    )


def _stat_before_end(pid: int, root: Path) -> list[bytes] | None:
    fields = read_stat(pid, root)
    return None if fields is None or int(fields[6]) & _PF_EXITING else fields


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
    return found is not None and found.key == process.key


def read_environ(process: Process, root: Path = PROC_ROOT) -> EnvironReading:
    """Read the environment that a process was started with, its own changes since not among it."""
    path = root / str(process.pid) / "environ"
    try:
        content = _begin_of(path)
        if not content:
            # Within ``exec`` a process has neither words nor environment for a moment. It has
            # words again a moment before its environment, hence that is asked for again behind.
            if not read_command_line(process.pid, root):
                return EnvironReading(None, Unreadable.GONE)
            content = _begin_of(path)
    except PermissionError:
        return EnvironReading(None, Unreadable.FORBIDDEN)
    except OSError as error:
        if is_exhausted(error):
            raise
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


def _begin_of(path: Path) -> bytes:
    """Read an environment, and of a larger one enough to see that."""
    with path.open("rb") as file:
        return file.read(_MAX_READ_BYTES + 1)


def started_at_s(process: Process, *, now_s: float, boottime_s: float) -> float:
    """Return when a process was started, in seconds since 1970.

    Args:
        process: the process.
        now_s: the time of day.
        boottime_s: ``CLOCK_BOOTTIME`` at that moment.
    """
    return now_s - boottime_s + process.started_ticks / os.sysconf("SC_CLK_TCK")


def read_uid(pid: int, root: Path = PROC_ROOT) -> int | None:
    """Return whose process it is; None where it has ended."""
    try:
        return (root / str(pid)).stat().st_uid
    except OSError:
        return None


def split_command_line(content: bytes) -> tuple[str, ...]:
    """Split it into words; what stands behind a title is padding, or what is left of the old."""
    words = content.removesuffix(b"\0").split(b"\0") if content else []
    if words and words[0].startswith(os.fsencode(TITLE_PREFIX)):
        words = [words[0].rstrip()]
    return tuple(os.fsdecode(word) for word in words)


def read_command_line(pid: int, root: Path) -> bytes:
    """Return a process's command line; empty where it has ended, or where it is overlong."""
    content = _read(pid, "cmdline", root, _MAX_COMMAND_BYTES + 1) or b""
    return content if len(content) <= _MAX_COMMAND_BYTES else b""


def _read(pid: int, name: str, root: Path, limit_bytes: int = _MAX_READ_BYTES) -> bytes | None:
    """Read a small file of a process; None where the process is gone or hidden.

    Plain descriptors, because the service does this for every new process of a host.
    """
    try:
        descriptor = os.open(f"{root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if is_exhausted(error):
            raise
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
