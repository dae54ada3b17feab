"""Reads files that other people name: only regular ones, and never more than makes sense.

A pipe in a file's place would block for ever, and a device such as ``/dev/zero`` never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    # Opened once and judged by descriptor, so that nobody swaps it in between.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(status: os.stat_result, path: Path) -> None:
    """Refuse what is no regular file.

    Raises:
        OSError: ``strerror`` says what it is.
    """
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file; that of ``/dev/null``, which is one for this, is empty.

    Raises:
        OSError: it cannot be read, is no regular file, or (``EFBIG``) is larger than the limit;
            ``strerror`` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        is_device = stat.S_ISCHR(status.st_mode)
        if is_device and status.st_rdev == Path(os.devnull).stat().st_rdev:
            return b""
        check_regular(status, path)
        return read_open(descriptor, limit_bytes, path)
    finally:
        os.close(descriptor)


def read_open(descriptor: int, limit_bytes: int, path: Path) -> bytes:
    """Return the content of a file that is open.

    Raises:
        OSError: it cannot be read, or (``EFBIG``) is larger than the limit.
    """
    with open(descriptor, "rb", closefd=False) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(limit_bytes)}", str(path))
    return content


def _size(limit_bytes: int) -> str:
    return f"{limit_bytes >> 20} MiB" if limit_bytes >= 1 << 20 else f"{limit_bytes >> 10} KiB"
