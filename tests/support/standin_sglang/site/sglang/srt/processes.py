"""Process titles, the parent's death, and the end of a whole tree."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
logger = logging.getLogger(__name__)


def kill_itself_when_parent_died() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_title(title: str) -> None:
    """Rename this process, which wipes its environment in procfs unless SPT_NOENV is set."""
    try:
        import setproctitle
    except ImportError:
        _set_title_here(title)
    else:
        setproctitle.setproctitle(title)


def _set_title_here(title: str) -> None:
    """Do what setproctitle 1.3.8 does: write over the memory that procfs shows."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(each) for each in fields[45:49])
    for name, value in os.environ.items():
        os.putenv(name, value)  # onto the heap, so that children still get it
    end = arg_end if os.environ.get("SPT_NOENV") else env_end
    encoded = title.encode()[: end - arg_start - 1]
    ctypes.memset(arg_start, 0, (arg_end if end == arg_end else env_start) - arg_start)
    if end == env_end:
        ctypes.memset(env_start, 0, env_end - env_start)
    ctypes.memmove(arg_start, encoded, len(encoded))
    ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode()[:15] + b"\0", 0, 0, 0)


def kill_process_tree(parent_pid: int, *, include_parent: bool) -> None:
    """Kill every process below one, and it too if wished."""
    logger.info(
        "kill_process_tree called: parent_pid=%s, include_parent=%s, pid=%s",
        parent_pid,
        include_parent,
        os.getpid(),
    )
    for pid in list(_below(parent_pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if include_parent:
        sys.stdout.flush()
        os.kill(parent_pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(entry.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = list(children.get(pid, ()))
    for child in found:
        found.extend(children.get(child, ()))
    return found
