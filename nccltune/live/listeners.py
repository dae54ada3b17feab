"""Who listens on a TCP port of this host: an older server on the same port answers for a new one.

Read from procfs. Where it does not tell (another network namespace, another user's process), the
answer is None, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

PROC_ROOT = Path("/proc")
_LISTEN = "0A"


def listens(pids: Iterable[int], port: int, root: Path = PROC_ROOT) -> bool | None:
    """Tell whether one of these processes listens on a port."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port, root)}
    if not sockets:
        return None
    is_hidden = False
    for pid in pids:
        try:
            with os.scandir(root / str(pid) / "fd") as entries:
                if any(_target(entry.path) in sockets for entry in entries):
                    return True
        except PermissionError:
            is_hidden = True
        except OSError:
            continue  # it has ended
    return None if is_hidden else False


def descendants(pid: int, root: Path = PROC_ROOT) -> list[int]:
    """Return every process below one, parents before their children."""
    children: dict[int, list[int]] = {}
    with os.scandir(root) as entries:
        for number in (int(entry.name) for entry in entries if entry.name.isdecimal()):
            if (parent := _parent(number, root)) is not None:
                children.setdefault(parent, []).append(number)
    found = list(children.get(pid, ()))
    for child in found:
        found.extend(children.get(child, ()))
    return found


def _parent(pid: int, root: Path) -> int | None:
    """Return the parent of a process that still runs; None for one that waits to be fetched."""
    try:
        stat = (root / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold anything.
    fields = stat[stat.rfind(b")") + 2 :].split()
    return None if len(fields) < 2 or fields[0] in (b"Z", b"X") else int(fields[1])


def _target(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - the target is no path
    except OSError:
        return ""


def _listening(port: int, root: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            text = (root / "net" / name).read_text(encoding="ascii")
        except OSError:
            continue
        for line in text.splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:
                continue
            if int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
