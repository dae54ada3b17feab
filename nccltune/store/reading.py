"""Reads small files that decide what root's servers get, and refuses those in other hands."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nccltune.errors import FileError

MAX_BYTES = 2**20


def read_text(path: Path, *, check_owner: bool = True, max_bytes: int = MAX_BYTES) -> str:
    """Read one file whole.

    Raises:
        FileError: it is missing, unreadable, no regular file, far too large, not UTF-8, or, for
            root, in other hands (see ``check_ownership``).
    """
    try:
        content = read_bytes(path, check_owner=check_owner, max_bytes=max_bytes)
    except OSError as error:
        raise unreadable(path, error) from None
    return decode(path, content)


def read_optional_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str | None:
    """Read one file whole; None where there is none.

    Raises:
        FileError: as for ``read_text``; a link that leads nowhere is no missing file.
    """
    try:
        content = read_bytes(path, check_owner=True, max_bytes=max_bytes)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.lexists(path):
            raise unreadable(path, error) from None
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    return decode(path, content)


def read_bytes(path: Path, *, check_owner: bool, max_bytes: int) -> bytes:
    """Read one file whole.

    Raises:
        OSError: the system does not hand it over.
        FileError: it is no regular file, far too large, or in other hands.
    """
    # Opened once and judged by descriptor, so that nobody swaps it in between; O_NONBLOCK because
    # a pipe in its place would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileError(path, "is not a regular file", code="not_a_file")
        if check_owner and os.geteuid() == 0:
            _refuse_other_hands(path, status)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        limit = f"{max_bytes // 2**20} MiB"
        raise FileError(path, f"is larger than {limit}, which no such file is", code="too_large")
    return content


def check_ownership(path: Path, *, reader_uid: int | None = None) -> None:
    """Refuse, for root, a file that somebody else could have written.

    A profile decides what root's servers get in their environment. Users who are not root are
    their own judges.

    Args:
        path: the file; a link is judged by what it leads to.
        reader_uid: on whose behalf; this process's effective user if None.

    Raises:
        FileError: it belongs to another user, or others may write it or swap it.
    """
    if (os.geteuid() if reader_uid is None else reader_uid) != 0:
        return
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    _refuse_other_hands(path, status)


def json_files(folder: Path) -> list[Path]:
    """Return the JSON files of a folder by name, hidden ones left out; none where it is missing.

    Raises:
        FileError: it is no folder, or cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from None
    return [path for path in paths if path.suffix == ".json" and path.name[0] != "."]


def unreadable(path: Path, error: OSError) -> FileError:
    """Build the error for a file that the system does not hand over."""
    cause = os.strerror(error.errno) if error.errno else str(error)
    return FileError(path, f"cannot be read ({cause})", code="cannot_read")


def decode(path: Path, content: bytes) -> str:
    """Return the text of a file.

    Raises:
        FileError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FileError(path, "is not UTF-8 text", line=line, code="bad_encoding") from None


def _refuse_other_hands(path: Path, status: os.stat_result) -> None:
    if status.st_mode & stat.S_IWOTH:
        reason = "anyone can write it, and root will not use it; run chmod o-w on it"
        raise FileError(path, reason, code="unsafe_owner")
    if status.st_mode & stat.S_IWGRP and status.st_gid != 0:
        reason = (
            f"group {status.st_gid} can write it, and root will not use it; run chmod g-w on it"
        )
        raise FileError(path, reason, code="unsafe_owner")
    if status.st_uid != 0:
        reason = f"belongs to user {status.st_uid}, and root will not use it; run chown root on it"
        raise FileError(path, reason, code="unsafe_owner")
    folder = path.resolve().parent
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        reason = f"anyone can swap files in {folder}, and root will not use them; chmod o-w it"
        raise FileError(path, reason, code="unsafe_owner")
