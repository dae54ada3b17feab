"""Takes records of launches from processes that may not write into the store themselves."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.live.launch_inbox import MAX_MESSAGE_BYTES, parse_message
from nccltune.live.procfs import PROC_ROOT, read_process
from nccltune.live.server_facts import read_uid

if TYPE_CHECKING:
    from nccltune.store import LaunchRecord

logger = logging.getLogger("nccltuned")

_CREDENTIALS = struct.Struct("3i")  # process, user and group id: unix(7)
_MAX_AT_ONCE = 64
MAX_PER_MINUTE = 60
"""Of one user: each is a write to disk, and a crash loop makes a few."""

_ROOT_UID = 0


@dataclass(slots=True)
class Inbox:
    """A datagram socket that everybody may write to.

    Attributes:
        root: where procfs is mounted.
    """

    path: Path
    root: Path = PROC_ROOT
    _socket: socket.socket | None = None
    _minute: int = 0
    _counts: dict[int, int] = field(default_factory=dict)

    def open(self) -> None:
        """Begin to listen; without that, launches of other users are seen by their processes alone.

        Raises:
            OSError: the folder cannot be written.
        """
        with suppress(FileNotFoundError):
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            listener.setblocking(False)
            listener.bind(str(self.path))
            self.path.chmod(0o666)
        except OSError:
            listener.close()
            raise
        self._socket = listener

    @property
    def descriptor(self) -> int:
        """What to poll for reading; -1 where it does not listen."""
        return -1 if self._socket is None else self._socket.fileno()

    def take(self) -> Iterator[LaunchRecord]:
        """Yield records of launches that their senders may speak for."""
        if self._socket is None:
            return
        for _ in range(_MAX_AT_ONCE):
            try:
                message, ancillary, flags, _address = self._socket.recvmsg(
                    MAX_MESSAGE_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:
                return  # nothing more, for now
            record = None if flags & socket.MSG_TRUNC else parse_message(message)
            uid = _sender_uid(ancillary)
            if record is None or uid is None:
                logger.debug("a message that is no record of a launch: uid=%s", uid)
            elif self._has_room(uid) and self._is_allowed(record, uid):
                yield record

    def _has_room(self, uid: int) -> bool:
        """Count a record of a user, and tell whether there were not too many lately."""
        minute = int(time.monotonic() // 60.0)
        if minute != self._minute:
            self._minute = minute
            self._counts.clear()
        self._counts[uid] = self._counts.get(uid, 0) + 1
        return self._counts[uid] <= MAX_PER_MINUTE

    def _is_allowed(self, record: LaunchRecord, uid: int) -> bool:
        """Whether a user may speak for a process: it is his, or nobody's any more."""
        process = read_process(record.pid, self.root)
        is_there = process is not None and process.started_ticks == record.started_ticks
        if uid in (_ROOT_UID, os.geteuid()) or not is_there:
            return True
        if read_uid(record.pid, self.root) == uid:
            return True
        logger.warning("a record of another user's launch: uid=%s pid=%s", uid, record.pid)
        return False

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with suppress(OSError):
                self.path.unlink()


def _sender_uid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """Return who sent a message, by the kernel's word."""
    for level, kind, content in ancillary:
        is_it = (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        if is_it and len(content) >= _CREDENTIALS.size:
            uid: int = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[1]
            return uid
    return None
