"""What a process writes its output to, seen without opening it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.live.procfs import PROC_ROOT, is_exhausted

if TYPE_CHECKING:
    from nccltuned.log_file import Inode

OUTPUTS = (1, 2)


def outputs_of(pid: int, root: Path = PROC_ROOT) -> frozenset[Inode]:
    """Return where a process writes to, be it a pipe or systemd's socket, but no terminal."""
    found = (_output(pid, number, root) for number in OUTPUTS)
    return frozenset(
        (each.st_dev, each.st_ino)
        for each in found
        if each is not None and not stat.S_ISCHR(each.st_mode)
    )


def written_files(pid: int, root: Path) -> dict[Inode, list[int]]:
    """Return the regular files behind a process's standard output and error, and which is which.

    They are looked at before they are opened: a pipe would block, and a terminal would be taken.
    """
    found: dict[Inode, list[int]] = {}
    for number in OUTPUTS:
        status = _output(pid, number, root)
        if status is not None and stat.S_ISREG(status.st_mode):
            found.setdefault((status.st_dev, status.st_ino), []).append(number)
    return found


def _output(pid: int, number: int, root: Path) -> os.stat_result | None:
    """Look at what an output leads to; None where that is closed, or cannot be written to.

    Anybody who may read a log could open it as his output.
    """
    try:
        # Path would not follow the link as only the kernel can.
        status = os.stat(f"{root}/{pid}/fd/{number}")  # noqa: PTH116
        is_written = flags_of(pid, number, root) & os.O_ACCMODE != os.O_RDONLY
    except OSError as error:
        if is_exhausted(error):
            raise
        return None
    return status if is_written else None


def flags_of(pid: int, number: int, root: Path) -> int:
    """Return how a process opened one of its files."""
    text = (root / str(pid) / "fdinfo" / str(number)).read_text(encoding="ascii")
    match = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
    return int(match[1], 8) if match else 0
