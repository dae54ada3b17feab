"""Where stand-in ranks wait for each other, as real ones do inside a collective.

Rank 0 listens on an address that the kernel chooses, so that nothing is left behind; the others
join. A rank that is gone makes the others wait for ever, as NCCL does.
"""

from __future__ import annotations

import signal
import socket


class Rendezvous:
    """A meeting point of all ranks.

    Args:
        name: what ``open_rendezvous`` returned to rank 0.
        listener: its socket, on rank 0.
    """

    def __init__(self, name: bytes, listener: socket.socket | None, world_size: int) -> None:
        if listener is not None:
            self._is_first = True
            self._peers = [listener.accept()[0] for _ in range(world_size - 1)]
            return
        self._is_first = False
        self._peers = [socket.socket(socket.AF_UNIX)]
        self._peers[0].connect(name)

    def meet(self) -> None:
        """Wait until every rank has come here."""
        try:
            if not self._is_first:
                self._peers[0].send(b".")
            is_met = all(peer.recv(1) for peer in self._peers)
            if self._is_first and is_met:
                for peer in self._peers:
                    peer.send(b".")
        except OSError:
            is_met = False
        if not is_met:
            signal.pause()


def open_rendezvous(world_size: int) -> tuple[bytes, socket.socket]:
    """Return a new meeting point's name, and the socket that rank 0 has to keep for it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(world_size)
    name: bytes = listener.getsockname()
    return name, listener
