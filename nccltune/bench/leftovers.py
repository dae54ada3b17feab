"""What killed ranks leave on the host, and how it is taken away: NCCL's shared memory, our folders.

NCCL unlinks its segments in ``/dev/shm`` once both ends hold them. A rank that dies before that, or
in the middle of a collective, leaves its own (seen on 2x H200 with 2.28.9), and enough of them
stop every later job on the host.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM_DIR = Path("/dev/shm")  # noqa: S108 - NCCL's own place
PROC_DIR = Path("/proc")
SEGMENT_PREFIX = "nccl-"
FOLDER_PREFIX = "nccltune-"


def list_segments(shm_dir: Path = SHM_DIR) -> frozenset[str]:
    """Name the segments of NCCL that this user owns."""
    names = set()
    with suppress(OSError):
        for entry in os.scandir(shm_dir):
            with suppress(OSError):
                if entry.name.startswith(SEGMENT_PREFIX) and entry.stat().st_uid == os.getuid():
                    names.add(entry.name)
    return frozenset(names)


def remove_segments(
    before: frozenset[str], shm_dir: Path = SHM_DIR, proc_dir: Path = PROC_DIR
) -> tuple[str, ...]:
    """Remove segments that appeared since ``before`` and that no process has mapped.

    A segment that some process maps belongs to another job that began in the meantime.

    Returns:
        The names removed.
    """
    fresh = list_segments(shm_dir) - before
    if not fresh:
        return ()
    idle = fresh - _mapped(fresh, shm_dir, proc_dir)
    for name in idle:
        with suppress(OSError):
            (shm_dir / name).unlink()
    return tuple(sorted(idle))


def _mapped(names: frozenset[str], shm_dir: Path, proc_dir: Path) -> set[str]:
    """Return those of the segments that a process maps; all, where that cannot be read."""
    found: set[str] = set()
    try:
        processes = [entry for entry in proc_dir.iterdir() if entry.name.isdigit()]
    except OSError:
        return set(names)
    for process in processes:
        with suppress(OSError):
            maps = (process / "maps").read_text(errors="replace")
            found |= {name for name in names if f"{shm_dir}/{name}" in maps}
    return found


def make_folder() -> Path:
    """Make a temporary folder named after this process, and remove those of processes gone."""
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not (PROC_DIR / pid).exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Make a folder for files, and remove it with them at the end.

    ``shutil.rmtree`` may close a descriptor twice where Ctrl-C meets it, and then fails in place of
    the interrupt.
    """
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        with suppress(OSError):
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
