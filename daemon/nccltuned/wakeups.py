"""What wakes the service before its time: signals, and changes in the state folder."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_WATCHED = (
    fcntl.DN_MODIFY | fcntl.DN_CREATE | fcntl.DN_DELETE | fcntl.DN_RENAME | fcntl.DN_MULTISHOT
)


@dataclass(frozen=True, slots=True)
class Woken:
    """Why the service was woken."""

    is_stop: bool = False
    is_reload: bool = False
    is_change: bool = False


@dataclass(slots=True)
class Wakeups:
    """Turns signals into bytes of a pipe, which a poll can wait for.

    Folders are watched by directory notification, which needs no library and reports by signal.
    Where the kernel or the file system has none, the service sees changes a little later.
    """

    reader: int = -1
    _writer: int = -1
    _folders: dict[str, tuple[int, int]] = field(default_factory=dict)

    def open(self) -> None:
        """Begin to take signals."""
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGIO):
            signal.signal(number, lambda _number, _frame: None)

    def take(self) -> Woken:
        """Return what has come since the last time."""
        numbers = b""
        with suppress(BlockingIOError):
            while part := os.read(self.reader, 512):
                numbers += part
        return Woken(
            is_stop=any(number in numbers for number in STOP_SIGNALS),
            is_reload=signal.SIGHUP in numbers,
            is_change=signal.SIGIO in numbers,
        )

    def watch(self, folders: Iterable[Path]) -> None:
        """Watch folders that exist, and those that have come, or come anew, since the last time."""
        for folder in folders:
            try:
                status = folder.stat()
            except OSError:
                self._forget(str(folder))
                continue
            known = self._folders.get(str(folder))
            if known is not None and known[1] == status.st_ino:
                continue
            self._forget(str(folder))
            with suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                self._folders[str(folder)] = (descriptor, status.st_ino)
                fcntl.fcntl(descriptor, fcntl.F_NOTIFY, _WATCHED)

    def close(self) -> None:
        """Let go of everything; signals are ignored from here on."""
        for folder in list(self._folders):
            self._forget(folder)
        signal.set_wakeup_fd(-1)
        for descriptor in (self.reader, self._writer):
            if descriptor >= 0:
                os.close(descriptor)
        self.reader = self._writer = -1

    def _forget(self, folder: str) -> None:
        known = self._folders.pop(folder, None)
        if known is not None:
            os.close(known[0])
