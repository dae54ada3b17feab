"""Reads files that other people name: only regular ones, and never more than makes sense.

A pipe in a file's place would block for ever, and a device such as ``/dev/zero`` never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file; that of ``/dev/null``, which is one for this, is empty.

    Raises:
        OSError: it cannot be read, is no regular file, or (``EFBIG``) is larger than the limit;
            ``strerror`` says which.
    """
    # Opened once and judged by descriptor, so that nobody swaps it in between.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        mode = status.st_mode
        if stat.S_ISCHR(mode) and status.st_rdev == Path(os.devnull).stat().st_rdev:
            return b""
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {limit_bytes >> 20} MiB", str(path))
    return content
