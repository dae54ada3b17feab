"""Answers ``GET /metrics`` on a Unix socket, a loopback port, or a socket that systemd opened.

As little HTTP as Prometheus needs, inside the service's one loop: a client that is slow, or says
nothing, costs a descriptor for a few seconds and nothing else.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from nccltune.errors import HostError, UsageProblem

OFF = "off"
_UNIX_PREFIX = "unix:"
_FIRST_PASSED_DESCRIPTOR = 3  # sd_listen_fds(3)
_MAX_REQUEST_BYTES = 8192
_MAX_CONNECTIONS = 16
_CONNECTION_S = 5.0
_BACKLOG = 16


@dataclass(slots=True)
class _Connection:
    """One client: what it has said, and what it still has to be told."""

    socket: socket.socket
    deadline_s: float
    request: bytes = b""
    response: bytes = b""


@dataclass(slots=True)
class MetricsEndpoint:
    """Sockets and clients; ``format_metrics`` is asked anew for each of them."""

    listeners: list[socket.socket]
    format_metrics: Callable[[], str]
    unix_path: Path | None = None
    _connections: dict[int, _Connection] = field(default_factory=dict)

    def interests(self) -> dict[int, int]:
        """Return what to poll for: descriptor and events."""
        wanted = {listener.fileno(): select.POLLIN for listener in self.listeners}
        for number, connection in self._connections.items():
            wanted[number] = select.POLLOUT if connection.response else select.POLLIN
        return wanted

    def next_deadline_s(self) -> float | None:
        """Return when the slowest client is given up, on the monotonic clock."""
        deadlines = [connection.deadline_s for connection in self._connections.values()]
        return min(deadlines, default=None)

    def handle(self, number: int) -> bool:
        """Go on with one descriptor; False where it is none of these."""
        for listener in self.listeners:
            if listener.fileno() == number:
                self._accept(listener)
                return True
        connection = self._connections.get(number)
        if connection is None:
            return False
        try:
            is_over = self._go_on(connection)
        except BlockingIOError:
            return True
        except OSError:
            is_over = True
        if is_over:
            self._drop(number)
        return True

    def drop_slow(self, now_s: float) -> None:
        """Give up clients whose time is over."""
        for number, connection in list(self._connections.items()):
            if connection.deadline_s <= now_s:
                self._drop(number)

    def close(self) -> None:
        """Let go of everything, and take the Unix socket away."""
        for number in list(self._connections):
            self._drop(number)
        for listener in self.listeners:
            listener.close()
        self.listeners.clear()
        if self.unix_path is not None:
            with suppress(OSError):
                self.unix_path.unlink()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _address = listener.accept()
        except OSError:
            return  # it left again, or there are no descriptors: the next poll tries again
        client.setblocking(False)
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._drop(next(iter(self._connections)))
        self._connections[client.fileno()] = _Connection(client, time.monotonic() + _CONNECTION_S)

    def _go_on(self, connection: _Connection) -> bool:
        """Read the request or write the response; True when the client is done with."""
        if not connection.response:
            part = connection.socket.recv(4096)
            connection.request += part
            if not part or len(connection.request) > _MAX_REQUEST_BYTES:
                return True
            if b"\r\n\r\n" not in connection.request and b"\n\n" not in connection.request:
                return False
            connection.response = respond(connection.request, self.format_metrics)
        sent_count = connection.socket.send(connection.response)
        connection.response = connection.response[sent_count:]
        return not connection.response

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        with suppress(OSError):
            # Said before closing, or what the client has not read yet would be thrown away.
            connection.socket.shutdown(socket.SHUT_WR)
        connection.socket.close()


def respond(request: bytes, format_metrics: Callable[[], str]) -> bytes:
    """Return the whole answer to one request."""
    words = request.split(b"\n", maxsplit=1)[0].split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _response("400 Bad Request", "only HTTP/1 is spoken here\n")
    method, target = words[0], words[1].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", "only GET is answered\n")
    if target == b"/metrics":
        whole = _response("200 OK", format_metrics())
    elif target == b"/":
        whole = _response("200 OK", "nccltuned: see /metrics\n")
    else:
        whole = _response("404 Not Found", "there is only /metrics\n")
    return whole if method == b"GET" else whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _response(status: str, text: str) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def open_endpoint(
    address: str, format_metrics: Callable[[], str], passed: list[socket.socket]
) -> MetricsEndpoint | None:
    """Open the endpoint; sockets that systemd has opened go before the address.

    Args:
        address: ``unix:/PATH``, ``HOST:PORT`` on the loopback, or ``off``.
        format_metrics: gives the text.
        passed: see ``passed_sockets``.

    Raises:
        UsageProblem: the address makes no sense, or could be reached from other machines.
        HostError: the address is taken or not ours.
    """
    for listener in passed:
        listener.setblocking(False)
    if passed:
        return MetricsEndpoint(passed, format_metrics)
    if address == OFF:
        return None
    try:
        if address.startswith(_UNIX_PREFIX):
            path = Path(address.removeprefix(_UNIX_PREFIX))
            return MetricsEndpoint([_listen_unix(path)], format_metrics, path)
        return MetricsEndpoint([_listen_tcp(*parse_loopback(address))], format_metrics)
    except OSError as error:
        raise HostError(
            f"metrics cannot be served on {address}: {(error.strerror or str(error)).lower()}",
            code="metrics_address",
        ) from error


def check_address(address: str) -> None:
    """Refuse an address that makes no sense, before anything is opened.

    Raises:
        UsageProblem: as for ``parse_loopback``, or a Unix socket without a whole path.
    """
    if address == OFF:
        return
    if not address.startswith(_UNIX_PREFIX):
        parse_loopback(address)
    elif not address.startswith(f"{_UNIX_PREFIX}/"):
        raise UsageProblem(f"{address!r}: write unix:/PATH from / on", code="bad_address")


def parse_loopback(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``.

    >>> parse_loopback("127.0.0.1:9469"), parse_loopback("[::1]:0")
    (('127.0.0.1', 9469), ('::1', 0))

    Raises:
        UsageProblem: no such thing, or no loopback address.
    """
    # Not at the top: a service with a Unix socket, or with systemd's, never needs it.
    import ipaddress

    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    advice = f"{address!r}: write unix:/PATH, 127.0.0.1:PORT or {OFF}"
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise UsageProblem(advice, code="bad_address")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise UsageProblem(advice, code="bad_address") from None
    if not is_loopback:
        raise UsageProblem(
            f"{address!r} can be reached from other machines; to do that on purpose, open the "
            "socket in nccltuned.socket",
            code="bad_address",
        )
    return host, int(port)


def passed_sockets() -> list[socket.socket]:
    """Return the listening sockets that systemd handed over, and forget how it did."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    sockets = []
    for number in range(_FIRST_PASSED_DESCRIPTOR, _FIRST_PASSED_DESCRIPTOR + int(count)):
        os.set_inheritable(number, False)
        sockets.append(socket.socket(fileno=number))
    return sockets


def _listen_unix(path: Path) -> socket.socket:
    with _listening(socket.AF_UNIX) as listener:
        if _is_stale(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o666)  # to read metrics is to connect, which needs the right to write
    return listener


def _is_stale(path: Path) -> bool:
    """Whether a socket lies there that nobody listens on any more."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != 0


def _listen_tcp(host: str, port: int) -> socket.socket:
    with _listening(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    return listener


@contextmanager
def _listening(family: socket.AddressFamily) -> Iterator[socket.socket]:
    """Let a new socket listen once it has been bound; it is closed where that fails."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        yield listener
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
