"""Takes records of launches from processes that may not write into the store themselves."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nccltune.live.launch_inbox import MAX_MESSAGE_BYTES, parse_message
from nccltune.live.procfs import PROC_ROOT, read_stat, read_status, read_uid
from nccltune.live.server_facts import read_boot_id

if TYPE_CHECKING:
    from nccltune.store import LaunchRecord

logger = logging.getLogger("nccltuned")

_CREDENTIALS = struct.Struct("3i")  # process, user and group id: unix(7)
_MAX_AT_ONCE = 64
MAX_PER_MINUTE = 60
"""Of one user: each is a write to disk, and a crash loop makes a few."""

_ROOT_UID = 0
MAX_USERS_PER_MINUTE = 256
"""With a range of numbers of his own, one user may be thousands."""


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
        """Yield records of launches that their senders may speak for, with the sender's user."""
        if self._socket is None:
            return
        for _ in range(_MAX_AT_ONCE):
            try:
                message, ancillary, flags, _address = self._socket.recvmsg(
                    MAX_MESSAGE_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:
                return  # nothing more, for now
            sender = _sender_of(ancillary)
            if sender is None or flags & socket.MSG_TRUNC or not self._has_room(sender.uid):
                continue
            record = parse_message(message)
            if record is not None and self._is_senders_own(record, sender):
                yield replace(record, uid=sender.uid)
            else:
                logger.debug("no record of a launch of the sender's: uid=%s", sender.uid)

    def _has_room(self, uid: int) -> bool:
        """Count a message of a user, and tell whether there were not too many lately."""
        minute = int(time.monotonic() // 60.0)
        if minute != self._minute:
            self._minute = minute
            self._counts.clear()
        if uid not in self._counts and len(self._counts) >= MAX_USERS_PER_MINUTE:
            return False
        self._counts[uid] = self._counts.get(uid, 0) + 1
        return self._counts[uid] <= MAX_PER_MINUTE

    def _is_senders_own(self, record: LaunchRecord, sender: _Sender) -> bool:
        """Whether the launch is of a process that is there, and the sender's.

        In a container it has another number there than here.
        """
        if record.boot_id != read_boot_id(self.root):
            return False
        for pid in self._candidates(record, sender):
            fields = read_stat(pid, self.root)
            if fields is None or int(fields[19]) != record.started_ticks:
                continue
            numbers = read_status(pid, self.root).get("NSpid", "").split()
            is_it = record.pid == pid or str(record.pid) in numbers
            if is_it and sender.uid in (_ROOT_UID, os.geteuid(), read_uid(pid, self.root)):
                return True
        return False

    def _candidates(self, record: LaunchRecord, sender: _Sender) -> Iterator[int]:
        yield record.pid
        yield sender.pid
        yield from (int(name) for name in os.listdir(self.root) if name.isdecimal())  # noqa: PTH208

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with suppress(OSError):
                self.path.unlink()


class _Sender(NamedTuple):
    """Who sent a message, by the kernel's word; no number where its process is not seen here."""

    pid: int
    uid: int


def _sender_of(ancillary: list[tuple[int, int, bytes]]) -> _Sender | None:
    for level, kind, content in ancillary:
        is_it = (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        if is_it and len(content) >= _CREDENTIALS.size:
            pid, uid, _gid = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
            return _Sender(pid, uid)
    return None
