"""One step at a time: the lock of the state folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nccltune.errors import BusyError, FileError

LOCK_NAME = "state.lock"
WAIT_S = 5.0
_POLL_S = 0.05


@contextmanager
def state_lock(folder: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock; it goes with the process that holds it, however that ends.

    Raises:
        BusyError: somebody else still holds it after ``wait_s``.
        FileError: the folder cannot be written.
    """
    path = folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise FileError(path, f"cannot be written ({cause})", code="cannot_write") from None
    try:
        _take(descriptor, path, wait_s)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise BusyError(
                    f"{path}: another nccltune changes the store right now; try again",
                    code="store_busy",
                ) from None
            time.sleep(_POLL_S)
        except OSError as error:
            # A file system without locks: steps are single renames all the same.
            del error
            return
        else:
            return
