"""What a starting server writes, kept within reach until it is ready or has died.

Its standard output is opened while it lives, when it is a file; where systemd keeps the log, the
journal is asked once it is dead. A pipe or a terminal cannot be read by anybody else.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from nccltune.live.failed_starts import SERVER_ARGS
from nccltune.live.procfs import PROC_ROOT

TAIL_BYTES = 512 * 1024
"""What is read of a log's end: a failing start of 8 ranks fills some ten KiB."""

JOURNAL_LINES = 2000
JOURNAL_TIMEOUT_S = 20.0
MAX_ENDS = 100
_OUTPUTS = (1, 2)
_HEAD_BYTES = 512
_ARGS = SERVER_ARGS.encode()
OWN_WORDS = b"nccltune: "
_INVOCATION = re.compile(r"[0-9a-f]{32}")


class Glance(NamedTuple):
    """What a look at a log says.

    Attributes:
        has_words: the words that were looked for are new in it.
        has_moved: somebody else than ``nccltune launch`` wrote into it, which goes on saying that
            nothing moves.
    """

    has_words: bool = False
    has_moved: bool = False


@dataclass(slots=True)
class LogFile:
    """One file that a process writes to, and that the next start may write to as well.

    Attributes:
        inode: device and number, which name the file.
        begin_bytes: its size when it was first seen: what stood there before is of earlier starts.
        head: the first bytes from there. When they are others, the file was cut and written anew,
            which scripts that start a server again and again do: it tells nothing of this start
            any more.
        is_shared: an earlier server may have written on after ``begin_bytes``, so that only what
            follows this one's arguments counts.
        is_whole: it begins with the file, or with what an earlier server is known to have written,
            so that this one's arguments are the last that are seen while it lives.
        has_args: this one's arguments were seen while it lived.
    """

    descriptor: int
    begin_bytes: int
    inode: tuple[int, int]
    head: bytes = b""
    is_shared: bool = False
    is_whole: bool = False
    has_args: bool = False
    is_lost: bool = False
    _looked_at: int = 0
    _end: int = 0

    def look(self, words: bytes) -> Glance:
        """Tell what was written since the last look; cheap to do often."""
        content = self._content(max(self.begin_bytes, self._looked_at))
        if content is None:
            return Glance()
        begin, text = content
        new = text[max(0, self._end - begin) :]
        self._end = begin + len(text)
        # The words may be half written now.
        overlap = max(len(words), len(_ARGS))
        self._looked_at = max(begin, self._end - overlap)
        place = text.rfind(_ARGS)
        if place >= 0 and begin + place >= self.begin_bytes:
            self.has_args, self.is_shared = True, False
            if self.is_whole:
                self.begin_bytes, self.head = begin + place, b""
        has_moved = any(line and not line.startswith(OWN_WORDS) for line in new.split(b"\n"))
        return Glance(words in text, has_moved)

    def read(self) -> str:
        """Return what was written since it was first seen; empty where that is lost."""
        content = self._content(self.begin_bytes)
        text = "" if content is None else content[1].decode("utf-8", "replace")
        if not self.is_shared:
            return text
        _earlier, mark, own = text.partition(SERVER_ARGS)
        return mark + own

    def _content(self, begin_bytes: int) -> tuple[int, bytes] | None:
        """Return the end of the file and where that begins; None where it is another file now."""
        try:
            head = os.pread(self.descriptor, _HEAD_BYTES, self.begin_bytes)
            size = os.fstat(self.descriptor).st_size
            begin = max(begin_bytes, size - TAIL_BYTES)
            text = os.pread(self.descriptor, TAIL_BYTES, begin)
        except OSError:
            return None
        is_cut = size < max(self.begin_bytes, self._looked_at)
        if self.is_lost or is_cut or not head.startswith(self.head):
            self.is_lost = True
            return None
        self.head = head
        return begin, text


@dataclass(slots=True)
class LogFiles:
    """All files that a process writes to."""

    files: list[LogFile] = field(default_factory=list)

    @property
    def is_seen(self) -> bool:
        """Whether something of this start was read while it lived."""
        return any(file.head for file in self.files)

    def are_written_by(self, pid: int, root: Path = PROC_ROOT) -> bool:
        """Tell whether another process writes into one of these files."""
        inodes = {file.inode for file in self.files}
        return any(inode in inodes for inode in _outputs_of(pid, root))

    @property
    def has_args(self) -> bool:
        """Whether the arguments of this start were seen while it lived."""
        return any(file.has_args for file in self.files)

    def look(self, words: bytes) -> Glance:
        """Tell what was written since this was asked last; looks at every file."""
        found = [file.look(words) for file in self.files]
        return Glance(any(one.has_words for one in found), any(one.has_moved for one in found))

    def go_on_from(self, earlier: LogFiles) -> None:
        """Begin where the same process was followed from before it became what it is."""
        begun = {file.inode: file for file in earlier.files}
        for file in self.files:
            if (before := begun.get(file.inode)) is not None and not before.is_lost:
                file.begin_bytes, file.is_shared = before.begin_bytes, before.is_shared

    def read(self) -> str:
        """Return what was written since; empty where there is no file, or none that still tells."""
        return "\n".join(filter(None, (file.read() for file in self.files)))

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

    _ends: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)

    def note(self, logs: LogFiles) -> None:
        """Remember where files end, now that a start is ready or dead."""
        for file in logs.files:
            size = os.fstat(file.descriptor).st_size
            self._ends.pop(file.inode, None)
            if not file.is_lost:
                self._ends[file.inode] = (size, _before(file.descriptor, size))
        for inode in list(self._ends)[:-MAX_ENDS]:
            del self._ends[inode]

    def find(self, inode: tuple[int, int], descriptor: int) -> int | None:
        """Return where an earlier start had got to; None if there was none, or it was cut since."""
        size, last = self._ends.get(inode, (0, b""))
        return size if last and _before(descriptor, size) == last else None


def _before(descriptor: int, size: int) -> bytes:
    """Return the bytes before some place in a file."""
    begin = max(0, size - _HEAD_BYTES)
    try:
        return os.pread(descriptor, size - begin, begin)
    except OSError:
        return b""


def open_logs(
    pid: int, *, is_new: bool, root: Path = PROC_ROOT, ends: LogEnds | None = None
) -> LogFiles:
    """Open the files behind a process's standard output and error; none where there are none.

    Args:
        pid: the process.
        is_new: it was started just now, so that a file that was truncated for it is read whole.
        root: where procfs is mounted.
        ends: of earlier starts.
    """
    logs = LogFiles()
    for inode, number in _outputs_of(pid, root).items():
        with suppress(OSError):
            is_appending = bool(_flags_of(pid, number, root) & os.O_APPEND)
            path = f"{root}/{pid}/fd/{number}"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != inode:
                os.close(descriptor)
                continue
            if is_appending or not is_new:
                logs.files.append(LogFile(descriptor, status.st_size, inode))
                continue
            end = None if ends is None else ends.find(inode, descriptor)
            is_shared = end is not None
            logs.files.append(LogFile(descriptor, end or 0, inode, b"", is_shared, is_whole=True))
    return logs


def _outputs_of(pid: int, root: Path) -> dict[tuple[int, int], int]:
    """Return the regular files behind a process's standard output and error, each once.

    They are looked at before they are opened: a pipe would block, and a terminal would be taken.
    """
    found: dict[tuple[int, int], int] = {}
    for number in _OUTPUTS:
        with suppress(OSError):
            # Path would not follow the link as only the kernel can.
            status = os.stat(f"{root}/{pid}/fd/{number}")  # noqa: PTH116
            if stat.S_ISREG(status.st_mode):
                found.setdefault((status.st_dev, status.st_ino), number)
    return found


def _flags_of(pid: int, number: int, root: Path) -> int:
    """Return how a process opened one of its files."""
    text = (root / str(pid) / "fdinfo" / str(number)).read_text(encoding="ascii")
    match = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
    return int(match[1], 8) if match else 0


def is_invocation(text: str) -> bool:
    """Tell whether this is the id of a systemd unit's run."""
    return _INVOCATION.fullmatch(text) is not None


def is_journal(pid: int, environ: Mapping[str, str], root: Path = PROC_ROOT) -> bool:
    """Tell whether a process's output goes to the journal, as ``JOURNAL_STREAM`` says it does.

    A terminal multiplexer may run in a unit too, and hand its id to everything typed into it.
    """
    stream = environ.get("JOURNAL_STREAM", "")
    for number in _OUTPUTS:
        with suppress(OSError):
            status = os.stat(f"{root}/{pid}/fd/{number}")  # noqa: PTH116 - as above
            if stream == f"{status.st_dev}:{status.st_ino}":
                return True
    return False


def read_journal(invocation_id: str, since: str) -> str:
    """Read what one run of a systemd unit has logged; empty where the journal does not tell.

    Blocks: call it in a child.

    Args:
        invocation_id: names the run.
        since: ISO 8601 with its time zone; what was before it belongs to an earlier server.
    """
    import subprocess

    # Journal entries may be stamped a moment before the process that is their cause.
    since_s = datetime.fromisoformat(since).timestamp() - 1.0
    words = ["journalctl", "--quiet", "--no-pager", "--output=cat", "--all"]
    words += [f"--lines={JOURNAL_LINES}", f"--since=@{since_s:.0f}"]
    words.append(f"_SYSTEMD_INVOCATION_ID={invocation_id}")
    try:
        done = subprocess.run(words, capture_output=True, timeout=JOURNAL_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout[-TAIL_BYTES:].decode("utf-8", "replace")
