"""Whether a server's own process listens on its port, asked of procfs and not of the server.

SGLang takes its port only after every rank has loaded its weights and captured its graphs. The
kernel's tables are read in the network namespace of the server, so that containers, and a service
that has no network itself, make no difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nccltune.live.listeners import listening_sockets, sockets_of
from nccltune.live.procfs import PROC_ROOT, is_exhausted

_AGAIN_S = 10.0


@dataclass(slots=True)
class PortWatch:
    """Asks again and again, and reads the kernel's tables only when there is reason to.

    They take some milliseconds to read, whatever is in them: so only where the process has a socket
    that it did not have before, and now and then, for a socket may begin to listen late.
    """

    root: Path = PROC_ROOT
    clock: Callable[[], float] = time.monotonic
    _sockets: frozenset[str] = frozenset()
    _is_listening: bool = False
    _read_at_s: float = 0.0

    def is_listening(self, pid: int, port: int, *, is_due: bool = False) -> bool | None:
        """Tell whether a process listens on a TCP port; None where one may not look into it.

        Args:
            pid: the process.
            port: the port.
            is_due: there is reason to believe it, so that what was read before is no answer.
        """
        try:
            sockets = sockets_of(pid, self.root)
        except PermissionError:
            return None
        except OSError as error:
            if is_exhausted(error):
                raise
            return False
        now_s = self.clock()
        is_due = is_due or now_s - self._read_at_s >= _AGAIN_S
        if sockets != self._sockets or (sockets and is_due and not self._is_listening):
            listening = listening_sockets(self.root / str(pid) / "net", port)
            self._is_listening = not sockets.isdisjoint(listening)
            self._sockets, self._read_at_s = sockets, now_s
        return self._is_listening
