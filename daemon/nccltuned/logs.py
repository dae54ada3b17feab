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

from nccltune.procfs import PROC_ROOT

TAIL_BYTES = 512 * 1024
"""What is read of a log's end: a failing start of 8 ranks fills some ten KiB."""

JOURNAL_LINES = 2000
JOURNAL_TIMEOUT_S = 20.0
_OUTPUTS = (1, 2)
_INVOCATION = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class LogFiles:
    """Files that a process writes to.

    Attributes:
        descriptors: to the files, with their size when they were first seen: what stood there
            before belongs to earlier starts.
    """

    descriptors: list[tuple[int, int]] = field(default_factory=list)
    _looked_at: dict[int, int] = field(default_factory=dict)

    def has_new(self, words: bytes) -> bool:
        """Tell whether these words were written since this was asked last; cheap to ask often."""
        return any(
            self._has_new(descriptor, begin_bytes, words)
            for descriptor, begin_bytes in self.descriptors
        )

    def _has_new(self, descriptor: int, begin_bytes: int, words: bytes) -> bool:
        begin = self._looked_at.get(descriptor, begin_bytes)
        try:
            size = os.fstat(descriptor).st_size
            if size < begin:  # cut since
                begin = 0
            begin = max(begin, size - TAIL_BYTES)
            content = os.pread(descriptor, TAIL_BYTES, begin)
        except OSError:
            return False
        # The words may be half written now.
        self._looked_at[descriptor] = max(begin, begin + len(content) - len(words))
        return words in content

    def read(self) -> str:
        """Return what was written since; empty where there is no file."""
        return "\n".join(
            _read_tail(descriptor, begin_bytes) for descriptor, begin_bytes in self.descriptors
        )

    def close(self) -> None:
        """Let go of the files."""
        for descriptor, _begin_bytes in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def open_logs(pid: int, *, is_new: bool, root: Path = PROC_ROOT) -> LogFiles:
    """Open the files behind a process's standard output and error; none where there are none.

    Args:
        pid: the process.
        is_new: it was started just now, so that a file that was truncated for it is read whole.
        root: where procfs is mounted.
    """
    logs = LogFiles()
    seen: set[tuple[int, int]] = set()
    for number in _OUTPUTS:
        with suppress(OSError):
            path = f"{root}/{pid}/fd/{number}"
            # Looked at before it is opened: a pipe would block, and a terminal would be taken.
            status = os.stat(path)  # noqa: PTH116 - follows the link that only the kernel can
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            is_appending = bool(_flags_of(pid, number, root) & os.O_APPEND)
            begin_bytes = status.st_size if is_appending or not is_new else 0
            logs.descriptors.append((descriptor, begin_bytes))
    return logs


def _flags_of(pid: int, number: int, root: Path) -> int:
    """Return how a process opened one of its files."""
    text = (root / str(pid) / "fdinfo" / str(number)).read_text(encoding="ascii")
    match = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
    return int(match[1], 8) if match else 0


def _read_tail(descriptor: int, begin_bytes: int) -> str:
    try:
        size = os.fstat(descriptor).st_size
        # A file that was cut since is read from its new start.
        begin = begin_bytes if size >= begin_bytes else 0
        begin = max(begin, size - TAIL_BYTES)
        content = os.pread(descriptor, TAIL_BYTES, begin)
    except OSError:
        return ""
    return content.decode("utf-8", "replace")


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
