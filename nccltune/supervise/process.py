"""One command in a process group of its own, from its start until nothing of it is left.

Processes that leave the group are found all the same: their orphans become children of this
process, and whatever is below it that was not there before belongs to the command.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from nccltune.children import hand_down
from nccltune.errors import ServerError
from nccltune.live.listeners import descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_TIMEOUT_S = 5.0
_RETRY_S = 0.01
_SIGNAL_EXIT_BASE = 128


class ServerProcess:
    """A running command.

    It is sent SIGTERM when this process dies, however that happens: start it from a thread that
    lives as long as it should.

    Attributes:
        pid: of the command itself, and of its process group.
        streams: where its output is read: its stdout and stderr, or one for both.
        process_fd: becomes readable when the command has ended.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], *, has_one_stream: bool
    ) -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        own_pid = os.getpid()
        self._others = set(descendants(own_pid))

        def die_with_parent() -> None:
            hand_down()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != own_pid:
                os._exit(_SIGNAL_EXIT_BASE + signal.SIGTERM)

        self._popen = _start(
            argv,
            env=dict(environ),
            # A process group in the background that reads from the terminal would be stopped.
            stdin=subprocess.DEVNULL if _is_terminal(0) else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if has_one_stream else subprocess.PIPE,
            bufsize=0,
            # What was handed down to this process is handed on, as by exec.
            close_fds=False,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        self.pid = self._popen.pid
        self.process_fd = os.pidfd_open(self.pid)
        both = (self._popen.stdout, self._popen.stderr)
        self.streams = tuple(stream.fileno() for stream in both if stream is not None)

    @property
    def status(self) -> int | None:
        """How it ended, as ``Popen.returncode`` has it; None while it runs."""
        return self._popen.poll()

    def pids(self) -> list[int]:
        """Return every process of the command that runs."""
        return [self.pid, *descendants(self.pid)]

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, which tells its children what they need to know."""
        with suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def reap(self) -> None:
        """Fetch children that have ended; the command itself is left to ``status``.

        Also those that were there before it: the kernel tells of one at a time, and one that nobody
        fetches would hide the command's orphans.
        """
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == self.pid:
                return
            with suppress(ChildProcessError):
                os.waitpid(found.si_pid, os.WNOHANG)
            self._others.discard(found.si_pid)  # the number may be the command's next

    def rest(self) -> list[int]:
        """Return every process that the command has started and that is still there."""
        return [pid for pid in descendants(os.getpid()) if pid not in self._others]

    def signal_rest(self, number: int) -> None:
        """Send a signal to everything that the command has started."""
        for pid in self.rest():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def kill_all(self) -> int:
        """Kill what is left of the command, wait until it is gone, and return its status."""
        end_s = time.monotonic() + _END_TIMEOUT_S
        while True:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            left = self.rest()
            self.signal_rest(signal.SIGKILL)
            status = self.status
            self.reap()
            if (status is not None and not left) or time.monotonic() > end_s:
                return -signal.SIGKILL if status is None else status
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Let go of the streams, once nothing of the command is left."""
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        os.close(self.process_fd)


def exit_code_of(status: int) -> int:
    """Return the exit status that a shell shows for a command that ended so.

    >>> exit_code_of(3), exit_code_of(-9)
    (3, 137)
    """
    return status if status >= 0 else _SIGNAL_EXIT_BASE - status


def describe_status(status: int) -> str:
    """Say how a process ended.

    >>> describe_status(1), describe_status(-9)
    ('status 1', 'SIGKILL')
    """
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _start(argv: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
    try:
        try:
            return subprocess.Popen(list(argv), **options)  # type: ignore[call-overload,no-any-return]
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
        # A script without its first line is the shell's, as for execvp.
        return subprocess.Popen(["/bin/sh", *argv], **options)  # type: ignore[call-overload,no-any-return]
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ServerError(f"{argv[0]}: cannot be started: {reason}", code="cannot_start") from None


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
