"""Notices that something has changed, cheaply: servers, their ranks, and the files of the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.live.scanner import Server, ServerScanner
from nccltune.paths import STATE_NAME
from nccltune.store.launches import HANDED_OVER_NAME, LAUNCHES_NAME
from nccltune.store.policy import POLICY_NAME

if TYPE_CHECKING:
    from nccltune.store import ActiveState

Signature = tuple[object, ...]


@dataclass(slots=True)
class ServerWatch:
    """Looks for servers, and tells whether they are the same as before."""

    scanner: ServerScanner = field(default_factory=ServerScanner)
    servers: tuple[Server, ...] = ()
    _signature: Signature | None = None

    def look(self) -> bool:
        """Look again; True if a server or a rank has come or gone."""
        self.servers = self.scanner.scan()
        signature = tuple(_of_server(server) for server in self.servers)
        is_changed = signature != self._signature
        self._signature = signature
        return is_changed


def _of_server(server: Server) -> Signature:
    root = server.root
    ranks = tuple((rank.process.pid, rank.process.started_ticks) for rank in server.ranks)
    return (None if root is None else (root.pid, root.started_ticks), ranks)


@dataclass(slots=True)
class StoreWatch:
    """Tells whether files of the store have been written, without reading them."""

    folder: Path
    _signatures: dict[str, Signature] = field(default_factory=dict)

    def has_changed(self, name: str, paths: Iterable[Path]) -> bool:
        """Tell whether a group of files is another one than the last time it was asked for."""
        signature = tuple(_of_file(path) for path in paths)
        is_changed = self._signatures.get(name) != signature
        self._signatures[name] = signature
        return is_changed

    def has_decision_changed(self, active: ActiveState | None) -> bool:
        """Tell whether what launches get may have changed."""
        paths = [self.folder / STATE_NAME, self.folder / POLICY_NAME]
        if active is not None:
            paths.append(active.path)
        return self.has_changed("decision", paths)

    def has_launches_changed(self) -> bool:
        """Tell whether there are new launches."""
        paths = [self.folder / LAUNCHES_NAME, self.folder / HANDED_OVER_NAME]
        return self.has_changed("launches", paths)


def _of_file(path: Path) -> Signature:
    try:
        status = path.stat()
    except OSError as error:
        return (error.errno,)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid)
