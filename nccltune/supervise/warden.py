"""A process beside us that ends a command's process group when we die, however that happens.

SIGKILL leaves us no time to end what we have started. The command itself is told of our death by
the kernel, but not what it has started: a script in front of a server ends, and the server stays.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

GRACE_S = 30.0
"""For a server to finish its requests after we have died."""

_POLL_S = 0.1
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Warden:
    """Forks at once, so that the caller must have no other threads; to be used as a context.

    It learns of our death by the end of a pipe, and leaves with the context.
    """

    def __init__(self) -> None:
        receiving, self._sending = os.pipe()
        self._pid = 0
        try:
            self._pid = os.fork()
        except OSError:  # no process to be had: the command will need one more
            os.close(receiving)
            return
        if self._pid == 0:
            _stand_by(receiving)
        os.close(receiving)

    def watch(self, group: int) -> None:
        """Name the process group that is to end with us."""
        with suppress(OSError):
            os.write(self._sending, f"{group}\n".encode())

    def __enter__(self) -> Warden:
        """Do nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let it go: nothing of the command is left."""
        if self._pid:
            # Killed by somebody and fetched since, its number may be another process's by now.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
        os.close(self._sending)


def _stand_by(receiving: int) -> NoReturn:
    """Wait for our parent's end, and see to the group's."""
    try:
        # Away from the terminal, the pipes and the files of our parent, whose end others wait for.
        os.setsid()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        _close_all_but(receiving)
        text = b""
        while piece := os.read(receiving, 64):
            text += piece
        if text:
            _end_group(int(text))
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        if int(name) != kept:
            with suppress(OSError):
                os.close(int(name))


def _end_group(group: int) -> None:
    end_s = time.monotonic() + GRACE_S
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < end_s:
            os.killpg(group, 0)
            time.sleep(_POLL_S)
        os.killpg(group, signal.SIGKILL)
