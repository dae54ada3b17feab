"""Writes a file so that a reader or a power cut sees the old text or the new one, never a mix.

Files of our own by ``write_atomic``; what a person has named, be it a link or a device, by
``write_output``.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path

from nccltune.errors import FileError

DIR_MODE = 0o755
"""Of the folders that are made here: a server often runs as another user, and reads its profile."""

OUTPUT_WAIT_S = 2.0
"""So long whoever reads a pipe may take no more of it: a launch waits meanwhile."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NEW_MODE = 0o666  # less the umask
_MAX_LINKS = 40


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace ``path`` by ``text`` in one step, and have it on disk before returning.

    Raises:
        FileError: the folder is missing or read-only, or the disk is full. The old file is then
            as it was, and nothing new is left beside it.
    """
    # Explicit, because the umask of a service would otherwise decide who can read a profile.
    _replace(path, text.encode("utf-8"), mode, None)


def write_output(path: Path, text: str) -> None:
    """Write what a person has named: a file in one step, a device or a pipe as it stands.

    Links are followed. A file that is there keeps its mode and, where that is ours to say, its
    owner; the umask decides about a new one.

    Raises:
        FileError: it cannot be written, nobody reads the pipe, or it is a disk or a folder.
    """
    content = text.encode("utf-8")
    try:
        target = _destination(path)
        if isinstance(target, int):
            _write_all(target, content)
            return
        there = _status(target)
        if there is None or stat.S_ISREG(there.st_mode):
            _replace(target, content, None, there)
        elif stat.S_ISBLK(there.st_mode):
            raise FileError(path, "is a disk, which is not written over", code="cannot_write")
        else:
            _write_special(target, content)
    except OSError as error:
        raise _refusal(path, error) from error


def make_dir(path: Path) -> None:
    """Create a folder and the folders above it, for all to read; one that exists stays as it is.

    Raises:
        FileError: something that is no folder stands in the way, or the place is read-only.
    """
    try:
        missing = []
        for folder in (path, *path.parents):
            if folder.exists():
                break
            missing.append(folder)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
                folder.chmod(DIR_MODE)  # whatever the umask is
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise _refusal(path, error) from error


def _replace(path: Path, content: bytes, mode: int | None, like: os.stat_result | None) -> None:
    """Put a new file in the place of ``path``.

    Args:
        mode: of the new file; None for what ``like`` has, or else the umask says.
        like: the file that is there.
    """
    name = path.with_name(f".nccltune-{os.urandom(6).hex()}.tmp")
    temporary: Path | None = None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, _NEW_MODE if mode is None and like is None else 0o600)
        temporary = name
        _fill(descriptor, content, mode, like)
        temporary.replace(path)
        temporary = None
        _sync_dir(path.parent)
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _fill(descriptor: int, content: bytes, mode: int | None, like: os.stat_result | None) -> None:
    """Write all of ``content`` and force it to disk; closes the descriptor in any case."""
    try:
        if like is not None:
            with suppress(PermissionError):  # else it is ours from now on
                os.fchown(descriptor, like.st_uid, like.st_gid)
            mode = stat.S_IMODE(like.st_mode)
        if mode is not None:
            os.fchmod(descriptor, mode)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _destination(path: Path) -> Path | int:
    """Follow links to what is to be written; an open descriptor of ours is named by its number."""
    own = Path(f"/proc/{os.getpid()}/fd")
    current = path.absolute()
    for _ in range(_MAX_LINKS):
        folder = Path(os.path.realpath(current.parent))
        if folder == own and current.name.isdecimal():
            return int(current.name)
        current = folder / current.name
        try:
            text = os.readlink(current)  # noqa: PTH115 - what links in /proc say is no path
        except OSError:
            return current
        if folder.is_relative_to("/proc"):
            return current
        _refuse_others_link(current, folder)
        current = folder / text
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _refuse_others_link(link: Path, folder: Path) -> None:
    """Follow nobody else's link where everybody may put one, as Linux does (protected_symlinks)."""
    place, owner = folder.stat(), link.lstat().st_uid
    is_open = place.st_mode & stat.S_ISVTX and place.st_mode & stat.S_IWOTH
    if is_open and owner not in (os.geteuid(), place.st_uid):
        raise FileError(link, f"is a link of user {owner}", code="unsafe_owner")


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _write_special(path: Path, content: bytes) -> None:
    # O_NONBLOCK because nobody may be there to read a pipe, and a launch waits for its report.
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FileError(path, "nobody reads this pipe", code="cannot_write") from None
        raise
    try:
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    deadline_s = time.monotonic() + OUTPUT_WAIT_S
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    rest = memoryview(content)
    while rest:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        # A pipe that takes something takes this much, so that no write waits.
        rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]


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
