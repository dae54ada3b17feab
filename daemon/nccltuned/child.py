"""Runs one reading in a process of its own, so that a driver that hangs cannot hang the service.

The child is a fork: what it imports and maps is gone with it, and the service stays small.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_MAX_ANSWER_BYTES = 8 * 2**20
_MAX_DATA_BYTES = 512 * 2**20
"""Of memory of its own: files that are mapped, such as the driver's library, are not counted."""

_MAX_CPU_S = 60
_FIRST_DESCRIPTOR = 3
_STUCK_S = 5.0


@dataclass(slots=True)
class ChildCall:
    """One call that runs, or has run.

    Attributes:
        descriptor: becomes readable when there is something to ``feed``.
        deadline_s: on the monotonic clock; the child dies then.
        ended_at_s: when it was killed, on the same clock.
    """

    pid: int
    descriptor: int
    deadline_s: float
    ended_at_s: float = 0.0
    _parts: list[bytes] = field(default_factory=list)
    _size_bytes: int = 0
    _is_reaped: bool = False

    def feed(self) -> bool:
        """Take what the child has written; True once it has no more to say."""
        try:
            part = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return False
        self._parts.append(part)
        self._size_bytes += len(part)
        is_over = not part or self._size_bytes > _MAX_ANSWER_BYTES
        if is_over:
            self.end()
        return is_over

    def answer(self) -> object | None:
        """Return what the call returned; None where the child died before it could tell."""
        try:
            answer: object = json.loads(b"".join(self._parts))
        except ValueError:
            return None
        return answer

    def end(self) -> None:
        """Kill the child if it lives, and let go of it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if not self._is_reaped:
            self.ended_at_s = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> bool:
        """Fetch the child's end; False where the kernel still holds it, in a driver most often."""
        if not self._is_reaped:
            try:
                found, _status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                found = self.pid
            self._is_reaped = found == self.pid
        return self._is_reaped


def call_in_child(function: Callable[[], object], *, timeout_s: float) -> ChildCall:
    """Start a call; what it returns must be something that JSON can hold.

    Raises:
        OSError: the system has no process or descriptor left.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid == 0:
        _answer(function, writer)
    os.close(writer)
    return ChildCall(pid, reader, time.monotonic() + timeout_s)


def _answer(function: Callable[[], object], writer: int) -> None:
    """Be the child: never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO):
            signal.signal(number, signal.SIG_DFL)
        _limit()
        os.set_blocking(writer, True)
        os.closerange(_FIRST_DESCRIPTOR, writer)
        os.closerange(writer + 1, writer + 256)
        content = json.dumps(function()).encode()
        while content:
            content = content[os.write(writer, content) :]
        status = 0
    finally:
        # Whatever went wrong, nothing of the service's own may run here a second time.
        os._exit(status)


def _limit() -> None:
    """Bound what the child may use: it follows names and numbers that other users chose."""
    # Loaded here, for the service itself does without.
    import resource

    for kind, limit in (
        (resource.RLIMIT_DATA, _MAX_DATA_BYTES),
        (resource.RLIMIT_CPU, _MAX_CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):  # not allowed, or less already
            resource.setrlimit(kind, (limit, limit))


@dataclass(slots=True)
class Calls:
    """All calls that are at work, and who waits for each."""

    _running: dict[int, tuple[ChildCall, Callable[[object], None]]] = field(default_factory=dict)
    _unreaped: list[ChildCall] = field(default_factory=list)

    @property
    def is_stuck(self) -> bool:
        """Whether the kernel still holds a child long after it was killed."""
        self._unreaped = [call for call in self._unreaped if not call.reap()]
        now_s = time.monotonic()
        return any(now_s - call.ended_at_s > _STUCK_S for call in self._unreaped)

    def start(
        self, function: Callable[[], object], done: Callable[[object], None], *, timeout_s: float
    ) -> None:
        """Start a call; ``done`` gets what it returns, or None where it died or was too slow."""
        try:
            call = call_in_child(function, timeout_s=timeout_s)
        except OSError:
            done(None)
            return
        self._running[call.descriptor] = (call, done)

    def descriptors(self) -> tuple[int, ...]:
        """Return what to poll for reading."""
        return tuple(self._running)

    def next_deadline_s(self) -> float | None:
        """Return when the first call is given up, on the monotonic clock."""
        return min((call.deadline_s for call, _done in self._running.values()), default=None)

    def handle(self, number: int) -> bool:
        """Go on with one descriptor; False where it is none of these."""
        if number not in self._running:
            return False
        call, done = self._running[number]
        if call.feed():
            self._finish(number)
            done(call.answer())
        return True

    def expire(self, now_s: float) -> None:
        """Give up calls whose time is over."""
        for number, (call, done) in list(self._running.items()):
            if call.deadline_s <= now_s:
                self._finish(number)
                done(None)

    def close(self) -> None:
        """Kill whatever is at work."""
        for number in list(self._running):
            self._finish(number)

    def _finish(self, number: int) -> None:
        call, _done = self._running.pop(number)
        call.end()
        if not call.reap():
            self._unreaped.append(call)
