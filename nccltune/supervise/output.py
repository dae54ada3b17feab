"""Hands a command's output on, byte by byte as it came, and reads it on the way."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from nccltune.sglang.log_stages import LogLine, LogReader

STDOUT, STDERR = 1, 2
_CHUNK_BYTES = 64 * 1024
_FINAL = frozenset({errno.EPIPE, errno.EBADF, errno.EIO})
"""Nobody will ever read this again: the reader, the descriptor or the terminal is gone."""


class Sink(Protocol):
    """Takes the output; called from the thread that reads it."""

    def write(self, descriptor: int, data: bytes) -> None:
        """Take what came for stdout (1) or stderr (2)."""


class PassThrough:
    """Writes what comes to this process's own stdout and stderr.

    A reader that goes away does not stop the server: the rest is dropped. What finds no room, on a
    disk that is full, is dropped until there is some, and a line in its place says how much.
    """

    def __init__(self) -> None:
        self._gone: set[int] = set()
        self._gaps: dict[int, _Gap] = {}
        self._in_line: set[int] = set()

    def write(self, descriptor: int, data: bytes) -> None:
        """Write as much of it as can be written."""
        if descriptor in self._gone:
            return
        gap = self._gaps.pop(descriptor, None)
        if gap is not None:
            start = "\n" if descriptor in self._in_line else ""
            _, problem = _write(descriptor, f"{start}{gap.format()}\n".encode())
            if problem is not None:
                self._drop(descriptor, problem, gap.lost_bytes + len(data))
                return
            self._in_line.discard(descriptor)
        written, problem = _write(descriptor, data)
        if written:
            is_in_line = not data[:written].endswith(b"\n")
            (self._in_line.add if is_in_line else self._in_line.discard)(descriptor)
        if problem is not None:
            self._drop(descriptor, problem, len(data) - written)

    def _drop(self, descriptor: int, problem: OSError, lost_bytes: int) -> None:
        if problem.errno in _FINAL:
            self._gone.add(descriptor)
        else:
            self._gaps[descriptor] = _Gap(lost_bytes, os.strerror(problem.errno or 0))


class _Gap(NamedTuple):
    """What could not be written since the last time that something could."""

    lost_bytes: int
    cause: str

    def format(self) -> str:
        """Return the line that stands in its place."""
        return f"nccltune: {self.lost_bytes} bytes of output are missing here ({self.cause})"


def _write(descriptor: int, data: bytes) -> tuple[int, OSError | None]:
    """Write what can be written; returns how much that was, and why it was not all."""
    written = 0
    while written < len(data):
        try:
            written += os.write(descriptor, memoryview(data)[written:])
        except BlockingIOError:  # somebody else's O_NONBLOCK on the same terminal
            select.select([], [descriptor], [], 1.0)
        except OSError as error:
            return written, error
    return written, None


class OutputPump:
    """A thread that reads a command's streams until all of them have ended.

    Args:
        streams: descriptor to read -> 1 or 2, where it belongs.
        process_fd: readable when the command has ended.
        sink: takes the bytes.
        on_line: takes the lines, in this thread.
        on_exit: called once when the command has ended, in this thread.

    Attributes:
        fault: the last fault of our own; the output went on.
    """

    def __init__(
        self,
        streams: Mapping[int, int],
        process_fd: int,
        *,
        sink: Sink,
        on_line: Callable[[LogLine], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._targets = dict(streams)
        self._process_fd = process_fd
        self._sink = sink
        self._on_line = on_line
        self._on_exit = on_exit
        self.fault: Exception | None = None
        self._writing_since_s: float | None = None
        self._readers = {descriptor: LogReader() for descriptor in streams}
        self._stop_receiving, self._stop_sending = os.pipe()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def blocked_s(self) -> float:
        """Return how long nobody has taken the output; a server that waits for that is no stall."""
        since_s = self._writing_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def finish(self, timeout_s: float) -> None:
        """Wait for the end of the streams, and stop reading after that time in any case."""
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        os.write(self._stop_sending, b"x")
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._stop_receiving)
            os.close(self._stop_sending)

    def _run(self) -> None:
        poll = select.poll()
        waiting = {*self._targets, self._process_fd}
        for descriptor in (*waiting, self._stop_receiving):
            poll.register(descriptor, select.POLLIN)
        while waiting:
            ready = {descriptor for descriptor, _ in poll.poll()}
            for descriptor in sorted(ready & waiting):
                if descriptor == self._process_fd:
                    self._on_exit()
                elif self._pass_on(descriptor):
                    continue
                waiting.discard(descriptor)
                poll.unregister(descriptor)
            if self._stop_receiving in ready and not ready & waiting:
                break
        for reader in self._readers.values():
            self._tell(reader.finish())

    def _pass_on(self, descriptor: int) -> bool:
        """Move one piece; tells whether there may be more."""
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return False
        self._writing_since_s = time.monotonic()
        try:
            self._sink.write(self._targets[descriptor], data)
        except Exception as error:  # noqa: BLE001 - a server whose output nobody takes stands still
            self.fault = error
        self._writing_since_s = None
        self._tell(self._readers[descriptor].feed(data))
        return True

    def _tell(self, lines: Iterable[LogLine]) -> None:
        try:
            for line in lines:
                self._on_line(line)
        except Exception as error:  # noqa: BLE001 - as above
            self.fault = error


def has_one_stream() -> bool:
    """Tell whether this process's stdout and stderr are the same, so that their order matters."""
    try:
        out, error = os.fstat(STDOUT), os.fstat(STDERR)
    except OSError:
        return False
    return (out.st_dev, out.st_ino, out.st_rdev) == (error.st_dev, error.st_ino, error.st_rdev)
