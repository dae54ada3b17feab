"""Tells systemd how a service is doing: one datagram each, and nothing where nobody listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"
OWN_VARIABLES = (SOCKET_VARIABLE, WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE)
"""For the service's own process: what it starts is not given them."""

_MAX_STATUS_CHARS = 500


@dataclass(frozen=True, slots=True)
class Notifier:
    """A line to the service manager.

    Attributes:
        address: of its socket; empty where this process is no such service.
        watchdog_s: it wants to hear of this process at least so often; None if it does not.
    """

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """Read what the service manager has set."""
        address = environ.get(SOCKET_VARIABLE, "")
        # systemd 253 and later may name a vsock, for virtual machines only.
        if not address.startswith(("/", "@")):
            return cls()
        return cls(address, _watchdog_s(environ))

    @property
    def is_listened_to(self) -> bool:
        """Whether anybody wants to know."""
        return bool(self.address)

    def ready(self, status: str = "") -> bool:
        """Say that the service does its work from now on; tells whether that was heard."""
        return self.send("READY=1", *_status(status))

    def status(self, text: str) -> None:
        """Show one line in ``systemctl status``."""
        self.send(*_status(text))

    def extend_timeout(self, duration_s: float) -> None:
        """Ask for more time to start or stop, from now on; it has to be asked for again in time."""
        self.send(f"EXTEND_TIMEOUT_USEC={int(duration_s * 1e6)}")

    def watchdog(self) -> None:
        """Say that this process still does its work."""
        self.send("WATCHDOG=1")

    def stopping(self, status: str = "") -> None:
        """Say that the service is about to end."""
        self.send("STOPPING=1", *_status(status))

    def send(self, *assignments: str) -> bool:
        """Send lines in one datagram; tells whether it was taken.

        It never waits: a manager that is gone or too busy costs the service nothing, and what has
        to be heard is said again.
        """
        if not self.address or not assignments:
            return False
        # A name that begins with @ is of the kernel's own kind, written with a zero byte.
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.connect(address)
                sender.send("\n".join(assignments).encode())
        except OSError:
            return False
        return True


def _status(text: str) -> list[str]:
    line = " ".join(text.split())[:_MAX_STATUS_CHARS]
    return [f"STATUS={line}"] if line else []


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    pid = environ.get(WATCHDOG_PID_VARIABLE, "")
    if pid and pid != str(os.getpid()):
        return None
    text = environ.get(WATCHDOG_VARIABLE, "")
    return int(text) / 1e6 if text.isascii() and text.isdecimal() and int(text) > 0 else None
