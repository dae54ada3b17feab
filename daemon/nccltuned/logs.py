"""What a starting server writes, kept within reach until it is ready or has died.

Its standard output is opened while it lives, when it is a file. A pipe or a terminal cannot be read
by anybody else; what systemd keeps is read by ``unit_log``.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from nccltune.live.procfs import PROC_ROOT, is_exhausted
from nccltuned.log_file import (
    BANNER_BYTES,
    TAIL_BYTES,
    Glance,
    Inode,
    LogFile,
    LogText,
    find_args,
)
from nccltuned.outputs import OUTPUTS, flags_of, written_files

NEW_S = 60.0
"""Up to this age a log that was cut for a start is read from its beginning."""

SEEN_AT_ONCE_S = 2.0
"""Up to this age a start is taken to have written nothing yet: it is being loaded."""

MAX_ENDS = 100
_LAST_BYTES = 512


@dataclass(slots=True)
class LogFiles:
    """All files that a process writes to.

    Attributes:
        is_all: nothing that it writes goes elsewhere.
    """

    files: list[LogFile] = field(default_factory=list)
    is_all: bool = False

    @property
    def is_seen(self) -> bool:
        """Whether something of this start was read while it lived."""
        return any(file.is_seen for file in self.files)

    @property
    def has_args(self) -> bool:
        """Whether the arguments of this start were seen while it lived."""
        return any(file.has_args for file in self.files)

    def are_written_by(self, pid: int, root: Path = PROC_ROOT) -> bool:
        """Tell whether another process writes into one of these files."""
        inodes = {file.inode for file in self.files}
        return not inodes.isdisjoint(written_files(pid, root))

    def look(self, words: bytes) -> Glance:
        """Tell what was written since this was asked last; looks at every file."""
        found = [file.look(words) for file in self.files]
        return Glance(any(one.has_words for one in found), any(one.has_moved for one in found))

    def go_on_from(self, earlier: LogFiles) -> None:
        """Keep what the same process was followed with before it became what it is."""
        begun = {file.inode: file for file in earlier.files if not file.is_lost}
        for idx, file in enumerate(self.files):
            if (before := begun.get(file.inode)) is not None:
                self.files[idx] = before
                earlier.files[earlier.files.index(before)] = file  # closed with the others there

    def read(self) -> LogText:
        """Return what was written since; nothing where there is no file that still tells."""
        found = [file.read() for file in self.files]
        text = "\n".join(filter(None, (each.text for each in found)))
        is_whole = self.is_all and bool(found) and all(each.is_whole for each in found)
        return LogText(text, is_whole)

    def drop(self, inodes: Collection[Inode]) -> bool:
        """Let go of some of the files; True where any of these was one of them."""
        dropped = [file for file in self.files if file.inode in inodes]
        for file in dropped:
            os.close(file.descriptor)
            self.files.remove(file)
        self.is_all = self.is_all and not dropped
        return bool(dropped)

    def close(self) -> None:
        """Let go of the files."""
        for file in self.files:
            os.close(file.descriptor)
        self.files.clear()


@dataclass(slots=True)
class LogEnds:
    """Where earlier starts had got to in files that later ones may write on into.

    So it is in a loop with one ``> server.log`` around it: no start cuts the file, and none has it
    to itself.
    """

    _ends: dict[Inode, tuple[int, bytes]] = field(default_factory=dict)

    def note(self, logs: LogFiles) -> None:
        """Remember where files end, now that a start is ready or dead."""
        for file in logs.files:
            size = os.fstat(file.descriptor).st_size
            self._ends.pop(file.inode, None)
            if not file.is_lost:
                self._ends[file.inode] = (size, _before(file.descriptor, size))
        for inode in list(self._ends)[:-MAX_ENDS]:
            del self._ends[inode]

    def find(self, inode: Inode, descriptor: int) -> int | None:
        """Return where an earlier start had got to; None if there was none, or it was cut since."""
        if inode not in self._ends:
            return None
        size, last = self._ends[inode]
        return size if _before(descriptor, size) == last else None


def _before(descriptor: int, size: int) -> bytes:
    """Return the bytes before some place in a file."""
    begin = max(0, size - _LAST_BYTES)
    try:
        return os.pread(descriptor, size - begin, begin)
    except OSError:
        return b""


def open_logs(
    pid: int, *, age_s: float, root: Path = PROC_ROOT, ends: LogEnds | None = None
) -> LogFiles:
    """Open the files behind a process's standard output and error; none where there are none.

    Args:
        pid: the process.
        age_s: of the start; a file that was truncated for a new one is read whole.
        root: where procfs is mounted.
        ends: of earlier starts.

    Raises:
        OSError: there are no descriptors left.
    """
    logs = LogFiles()
    written = written_files(pid, root)
    for inode, numbers in written.items():
        try:
            is_appending = bool(flags_of(pid, numbers[0], root) & os.O_APPEND)
            descriptor = _open(pid, numbers[0], inode, root)
        except OSError as error:
            if is_exhausted(error):
                logs.close()
                raise
            continue
        logs.files.append(_begin(descriptor, inode, age_s, ends, is_appending=is_appending))
    is_open = len(logs.files) == len(written)
    logs.is_all = is_open and sum(map(len, written.values())) == len(OUTPUTS)
    return logs


def _begin(
    descriptor: int, inode: Inode, age_s: float, ends: LogEnds | None, *, is_appending: bool
) -> LogFile:
    """Find out where in a file a start begins that is seen for the first time."""
    is_early = age_s < NEW_S
    size = os.fstat(descriptor).st_size
    try:
        args = find_args(descriptor, time.time() - age_s)
        has_any = BANNER_BYTES.search(os.pread(descriptor, TAIL_BYTES, 0)) is not None
    except OSError:
        args, has_any = None, True
    end = None if ends is None else ends.find(inode, descriptor)
    if args is not None:
        return LogFile(descriptor, args, inode, is_early=is_early, has_args=True, is_seen=True)
    # What a start has written before it was seen is passed over with the rest.
    is_all_to_come = age_s < (NEW_S if size == 0 else SEEN_AT_ONCE_S)
    if is_appending or not is_early:
        return LogFile(descriptor, size, inode, is_early=is_all_to_come)
    if end is not None:
        return LogFile(descriptor, end, inode, is_shared=end > 0, is_early=True)
    # In a loop with one file around it they are an earlier start's: nobody saw where that ended.
    if has_any:
        return LogFile(descriptor, size, inode, is_early=is_all_to_come)
    return LogFile(descriptor, 0, inode, is_early=True)


def _open(pid: int, number: int, inode: Inode, root: Path) -> int:
    """Open the file behind an output for reading, if it still is the one that was seen."""
    path = f"{root}/{pid}/fd/{number}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != inode:
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor
