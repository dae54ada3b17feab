"""Writes a file so that a reader or a power cut sees the old text or the new one, never a mix."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from nccltune.errors import FileError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace ``path`` by ``text`` in one step, and have it on disk before returning.

    Raises:
        FileError: the folder is missing or read-only, or the disk is full. The old file is then
            as it was, and nothing new is left beside it.
    """
    content = text.encode("utf-8")
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=".nccltune-", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        _fill(descriptor, content, mode)
        temporary.replace(path)
        temporary = None
        _sync_dir(path.parent)
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def make_dir(path: Path) -> None:
    """Create a folder and the folders above it; one that exists is fine.

    Raises:
        FileError: something that is no folder stands in the way, or the place is read-only.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(path, error) from error


def _fill(descriptor: int, content: bytes, mode: int) -> None:
    """Write all of ``content`` and force it to disk; closes the descriptor in any case."""
    try:
        # Explicit, because the umask of a service would otherwise decide who can read a profile.
        os.fchmod(descriptor, mode)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_dir(folder: Path) -> None:
    """Force the new directory entry to disk, without which a rename may be lost in a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a folder; the file itself is complete.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _refusal(path: Path, error: OSError) -> FileError:
    cause = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_SPACE:
        return FileError(
            path, f"cannot be written ({cause}); free some space and try again", code="disk_full"
        )
    return FileError(path, f"cannot be written ({cause})", code="cannot_write")
