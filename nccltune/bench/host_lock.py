"""The lock that one measuring command on a host holds: search and verify disturb each other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nccltune.errors import BusyError, FileError
from nccltune.paths import state_dir

LOCK_NAME = "search.lock"
SEARCH, VERIFY = "search", "verify"


def host_lock_path() -> Path:
    """Return where the lock of this user's state folder is."""
    return state_dir() / "studies" / LOCK_NAME


@contextmanager
def host_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock; it goes with the process that holds it, however that ends.

    Args:
        path: the lock.
        what: is about to measure: ``search`` or ``verify``.

    Raises:
        BusyError: somebody else holds it.
        FileError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+")
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise _busy(handle.read(), what) from error
        except OSError as error:
            raise FileError(path, f"cannot be locked: {error.strerror}") from error
        handle.truncate(0)
        handle.write(str(os.getpid()) if what == SEARCH else f"{os.getpid()} {what}")
        handle.flush()
        yield


def _busy(text: str, what: str) -> BusyError:
    pid, _, holder = text.strip().partition(" ")
    holder = holder or SEARCH
    another = f"another {holder}" if holder == what else f"a {holder}"
    message = (
        f"{another} (process {pid or 'unknown'}) is running on this host; wait for it, or stop it"
    )
    return BusyError(message, code=f"{holder}_running")
