"""The lock that one measuring command on a host holds: search and verify disturb each other.

Two of them: one in the state folder, and one for the whole host, for somebody else's state folder
is another. That one is no more than a file that everybody may open, and it is locked, not written:
nobody can take it away from another, and whoever cannot open it measures without.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nccltune.errors import BusyError, FileError
from nccltune.paths import state_dir

LOCK_NAME = "search.lock"
SEARCH, VERIFY = "search", "verify"
_SHARED = Path("/tmp/nccltune.lock")  # noqa: S108 - opened as one that anybody may have made
_DRIVER = Path("/dev/nvidiactl")


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
        with _whole_host():
            yield


def shared_path() -> Path | None:
    """Return the lock of the whole host; None where there are no GPUs to be disturbed on."""
    return _SHARED if _DRIVER.exists() else None


@contextmanager
def _whole_host() -> Iterator[None]:
    path = shared_path()
    descriptor = None if path is None else _open_shared(path)
    if descriptor is None:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                "another search or verify is running on this host, with another state folder "
                f"({_holder(descriptor)}); wait for it, or stop it",
                code="host_busy",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def _open_shared(path: Path) -> int | None:
    """Open the file of the lock, or make it; None where that is not for us to do."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    for more in (0, os.O_CREAT | os.O_EXCL, 0):  # made by somebody else in between
        try:
            descriptor = os.open(path, flags | more, 0o644)
        except (FileNotFoundError, FileExistsError):
            continue
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            if more:
                os.fchmod(descriptor, 0o644)  # whatever the umask is
            return descriptor
        os.close(descriptor)
        return None
    return None


def _holder(descriptor: int) -> str:
    """Name who holds a lock, as far as the kernel tells."""
    inode = os.fstat(descriptor).st_ino
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for fields in map(str.split, lines):
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return f"process {fields[4]}"
    return "process unknown"


def _busy(text: str, what: str) -> BusyError:
    pid, _, holder = text.strip().partition(" ")
    holder = holder or SEARCH
    another = f"another {holder}" if holder == what else f"a {holder}"
    message = (
        f"{another} (process {pid or 'unknown'}) is running on this host; wait for it, or stop it"
    )
    return BusyError(message, code=f"{holder}_running")
