"""Notes at once which process of a server is the first to end, while somebody talks to it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from nccltune.live.procfs import read_stat

if TYPE_CHECKING:
    from nccltune.live.scanner import Server

_FLAGS_FIELD = 6
_PF_EXITING = 0x4


class ServerParts(NamedTuple):
    """The processes without which a server cannot answer: name -> process id.

    Attributes:
        roots: those that started the ranks; one for each "node".
    """

    roots: Mapping[str, int]
    ranks: Mapping[str, int]


def parts_of(servers: Sequence[Server]) -> ServerParts:
    """Name the processes of a server, which may be several "nodes"."""
    name = "the server's own process" if len(servers) == 1 else "the server process {}"
    return ServerParts(
        {name.format(each.root.pid): each.root.pid for each in servers if each.root is not None},
        {f"rank {rank.name}": rank.process.pid for each in servers for rank in each.ranks},
    )


class Vigil:
    """Watches processes in a thread of its own, which sleeps until one ends.

    Args:
        parts: what to watch.
        on_fall: called in that thread when the first has ended.

    Attributes:
        fallen: name of the process that ended first; empty as long as none has.
    """

    def __init__(self, parts: ServerParts, on_fall: Callable[[], None] = lambda: None) -> None:
        self.fallen = ""
        self._parts, self._on_fall = parts, on_fall
        self._fell = threading.Event()
        self._names: dict[int, str] = {}
        self._gone: list[str] = []
        for name, pid in {**parts.roots, **parts.ranks}.items():
            try:
                self._names[os.pidfd_open(pid)] = name
            except OSError:
                self._gone.append(name)
        self._stop_receiving, self._stop_sending = os.pipe()
        self._thread = threading.Thread(target=self._run, name="vigil", daemon=True)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a process has ended; tells whether one has."""
        return self._fell.wait(timeout_s)

    def __enter__(self) -> Vigil:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Watch no longer."""
        with suppress(OSError):
            os.write(self._stop_sending, b"x")
        self._thread.join()
        for descriptor in (*self._names, self._stop_receiving, self._stop_sending):
            os.close(descriptor)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (*self._names, self._stop_receiving):
            poll.register(descriptor, select.POLLIN)
        if not self._gone:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._stop_receiving in ready:
                return
            self._gone = [self._names[descriptor] for descriptor in ready]
        self.fallen = self._first(self._gone)
        self._fell.set()
        self._on_fall()

    def _first(self, gone: Sequence[str]) -> str:
        """Name what ended first: a server that is killed takes its ranks along, before it is gone.

        The kernel ends them while it takes their parent down.
        """
        for name, pid in self._parts.roots.items():
            if name in gone or _is_ending(pid):
                return name
        return gone[0]


def _is_ending(pid: int) -> bool:
    fields = read_stat(pid)
    return fields is None or bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)
