"""Files as another process sees them, and never with a right that its user lacks.

A look at somebody's server follows names that he chose, often with root's rights. So every path is
walked step by step from the process's own root folder, links included, and each step is allowed or
refused by the mode bits for that user. Nothing that is found is run or loaded.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nccltune.live.procfs import PROC_ROOT, read_status, user_of
from nccltune.regular_files import check_regular, read_open

MAX_READ_BYTES = 2**20
"""Of one file, whatever its reader would take."""

MAX_NAMES = 10_000
"""Of one folder."""

_MAX_LINKS = 40
_MAX_STEPS = 256
_READ, _SEARCH, _EXECUTE = 4, 1, 1
_CAPABILITIES_ABOVE_MODES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: linux/capability.h."""

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Rights:
    """What a process may do with files.

    Attributes:
        uid: of its user; None where that is not sure, and then it may do nothing.
        groups: all of its groups.
        is_above_modes: it is root's, with a capability that goes before mode bits.
    """

    uid: int | None
    groups: frozenset[int] = frozenset()
    is_above_modes: bool = False

    def allow(self, descriptor: int, wanted: int) -> bool:
        """Tell whether the process may read a file, or search a folder, that is open here."""
        status = os.fstat(descriptor)
        if self.is_above_modes or self.uid is None:
            return self.is_above_modes
        if status.st_uid == self.uid:
            return status.st_mode >> 6 & wanted == wanted
        bits = status.st_mode >> (3 if status.st_gid in self.groups else 0)
        return bits & wanted == wanted and not _has_list(descriptor)


def rights_of(pid: int, root: Path = PROC_ROOT) -> Rights:
    """Read what a process may do; nothing where that cannot be told."""
    facts = read_status(pid, root)
    try:
        groups = {int(facts["Gid"].split()[3]), *map(int, facts.get("Groups", "").split())}
        capabilities = int(facts.get("CapEff", "0"), 16)
    except (KeyError, ValueError, IndexError):
        return Rights(None)
    uid = user_of(pid, root)
    # In a user namespace anybody has every capability, and is another number than 0 here.
    is_above = uid == 0 and bool(capabilities & _CAPABILITIES_ABOVE_MODES)
    return Rights(uid, frozenset(groups), is_above)


class _Place(NamedTuple):
    """What a path leads to: open as a place, not for reading."""

    descriptor: int
    path: Path


@dataclass(frozen=True, slots=True)
class ProcessFiles:
    """The files of one process.

    Attributes:
        root_path: leads to its root folder.
        working_path: its working folder, as it would name it.
    """

    rights: Rights
    root_path: Path
    working_path: Path = Path("/")

    @classmethod
    def of(cls, pid: int, root: Path = PROC_ROOT) -> ProcessFiles:
        """Return what a process sees; nothing at all where one may not look into it."""
        folder = root / str(pid)
        try:
            working = Path(os.readlink(folder / "cwd"))  # noqa: PTH115 - it is no path of ours
        except OSError:
            working = Path("/")
        return cls(rights_of(pid, root), folder / "root", working)

    @property
    def may_run(self) -> bool:
        """Never: what is found belongs to somebody else."""
        return False

    @property
    def name(self) -> Hashable:
        """Equal for processes that see the same."""
        try:
            status = self.root_path.stat()
        except OSError:
            return (self.rights, None)
        return (self.rights, status.st_dev, status.st_ino)

    def stat(self, path: Path) -> os.stat_result | None:
        """Return what a path leads to; None where nothing can be seen there."""
        with suppress(OSError, ValueError), self._at(path) as place:
            return os.fstat(place.descriptor)
        return None

    def may_execute(self, path: Path) -> bool:
        """Tell whether a path leads to a program that the process may start."""
        with suppress(OSError, ValueError), self._at(path) as place:
            mode = os.fstat(place.descriptor).st_mode
            # Root too needs one of the bits.
            is_program = stat.S_ISREG(mode) and bool(mode & 0o111)
            return is_program and self.rights.allow(place.descriptor, _EXECUTE)
        return False

    def resolve(self, path: Path) -> Path:
        """Return a path without links; the path itself where it cannot be followed."""
        with suppress(OSError, ValueError), self._at(path) as place:
            return place.path
        return path

    def names(self, folder: Path) -> list[str]:
        """Return what lies in a folder, in order; nothing where it cannot be listed."""
        with suppress(OSError, ValueError), self._at(folder) as place:
            self._check(place, _READ)
            with os.scandir(f"/proc/self/fd/{place.descriptor}") as entries:
                return sorted(entry.name for entry in islice(entries, MAX_NAMES))
        return []

    def open(self, path: Path) -> int:
        """Open a regular file for reading; the caller closes the descriptor.

        Raises:
            OSError: it cannot be read by the process, or is no regular file.
        """
        try:
            with self._at(path) as place:
                # Looked at before it is opened: opening a device or a pipe does something.
                check_regular(os.fstat(place.descriptor), path)
                self._check(place, _READ)
                return os.open(f"/proc/self/fd/{place.descriptor}", _OPEN)
        except ValueError:
            raise _refusal(errno.ENOENT, path) from None

    def read(self, path: Path, limit_bytes: int) -> bytes:
        """Return the content of a regular file.

        Raises:
            OSError: it cannot be read by the process, is no regular file, or is larger than the
                limit.
        """
        descriptor = self.open(path)
        try:
            # The kernel's own files tell no size, and judge by other things than modes.
            if not os.fstat(descriptor).st_size:
                return b""
            return read_open(descriptor, min(limit_bytes, MAX_READ_BYTES), path)
        finally:
            os.close(descriptor)

    def _check(self, place: _Place, wanted: int) -> None:
        if not self.rights.allow(place.descriptor, wanted):
            raise _refusal(errno.EACCES, place.path)

    @contextmanager
    def _at(self, path: Path) -> Iterator[_Place]:
        """Walk to a place, as the process itself would, with its own root and no more rights."""
        with ExitStack() as opened:
            yield self._walk(self.working_path / path, opened)

    def _walk(self, path: Path, opened: ExitStack) -> _Place:
        top = _opened(os.open(self.root_path, os.O_PATH | os.O_CLOEXEC), opened)
        folders = [_Place(top, Path("/"))]
        found: _Place | None = None
        left = [*reversed(path.parts)]
        link_count = step_count = 0
        while left:
            part = left.pop()
            step_count += 1
            if found is not None:
                raise _refusal(errno.ENOTDIR, found.path)
            if step_count > _MAX_STEPS or link_count > _MAX_LINKS:
                raise _refusal(errno.ELOOP, path)
            if part == "/":
                folders = folders[:1]
                continue
            self._check(folders[-1], _SEARCH)
            if part == "..":
                folders = folders[:-1] or folders
                continue
            place = _Place(
                _opened(os.open(part, _STEP, dir_fd=folders[-1].descriptor), opened),
                folders[-1].path / part,
            )
            mode = os.fstat(place.descriptor).st_mode
            if stat.S_ISLNK(mode):
                link_count += 1
                target = Path(os.readlink("", dir_fd=place.descriptor))
                left += reversed(target.parts)
            elif stat.S_ISDIR(mode):
                folders.append(place)
            else:
                found = place
        return found or folders[-1]


def _opened(descriptor: int, opened: ExitStack) -> int:
    opened.callback(os.close, descriptor)
    return descriptor


def _has_list(descriptor: int) -> bool:
    """Whether an access list makes mode bits mean something else; then nothing is allowed."""
    try:
        names = os.listxattr(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False  # a file system without any
    return "system.posix_acl_access" in names


def _refusal(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
