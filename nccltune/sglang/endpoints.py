"""Asks a server over HTTP: is it up, what is it, how is it set up.

Standard library only, no proxies: the server is on this host. A certificate is not checked, for it
is made out to the server's public name, and nothing secret is sent.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nccltune.errors import ServerError, UsageProblem

if TYPE_CHECKING:
    from nccltune.sglang.command import LaunchCommand

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000
HEALTH_TIMEOUT_S = 30.0
"""SGLang sleeps 1 s before it answers ``/health`` at all, and gives up by itself after 20 s."""

KEY_VARIABLE = "NCCLTUNE_API_KEY"
"""Holds the key of a server that runs; on a command line everybody on the host could read it."""

_PORTS = {"http": 80, "https": 443}
_ANY_ADDRESS = {"": DEFAULT_HOST, "0.0.0.0": DEFAULT_HOST, "::": "::1"}  # noqa: S104 - replaced
_MAX_ANSWER_BYTES = 16 * 2**20


class Health(StrEnum):
    """What a server says of itself."""

    REFUSED = "refused"
    """Nobody listens: it still loads and captures."""
    STARTING = "starting"
    """503: it listens, and its warm-up request runs; or it is about to end."""
    UP = "up"
    SILENT = "silent"
    """It takes the connection and does not answer in time."""
    STRANGE = "strange"
    """Something answers, and not as SGLang does."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens, as it is reached from this host."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    is_tls: bool = False
    api_key: str = ""

    @property
    def url(self) -> str:
        """The address as text.

        >>> Endpoint("::1", 30000).url
        'http://[::1]:30000'
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a server."""

    status: int
    body: bytes


def endpoint_of(command: LaunchCommand) -> Endpoint:
    """Return where a launch will listen.

    Raises:
        UsageProblem: its port is none.
    """
    text = command.value("port") or str(DEFAULT_PORT)
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageProblem(f"--port {text}: not a TCP port", code="bad_launch")
    host = command.value("host") or DEFAULT_HOST
    return Endpoint(
        host=_ANY_ADDRESS.get(host, host),
        port=int(text),
        is_tls=command.has("ssl_certfile"),
        api_key=command.value("api_key") or "",
    )


def endpoint_at(url: str, *, api_key: str = "") -> Endpoint:
    """Return the endpoint of an address such as ``http://0.0.0.0:30000``.

    Raises:
        UsageProblem: it is no such address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode() if url.isprintable() else ""
    except ValueError:
        parts, port, host = urlsplit(""), 0, ""
    default_port = _PORTS.get(parts.scheme)
    if default_port is None or not host or port == 0:
        shown = _without_user(url)
        raise UsageProblem(
            f"{shown!r} is no server's address; write http://127.0.0.1:30000", code="bad_url"
        )
    host = _ANY_ADDRESS.get(host, host)
    is_tls = parts.scheme == "https"
    endpoint = Endpoint(host, default_port if port is None else port, is_tls, api_key)
    more = {
        "a user": parts.username is not None or parts.password is not None,
        "a path": parts.path not in ("", "/"),
        "a query": "?" in url,
        "a fragment": "#" in url,
    }
    if extra := [name for name, is_there in more.items() if is_there]:
        raise UsageProblem(
            f"the address has {' and '.join(extra)}, and servers are asked at their root, as "
            f"nobody: write {endpoint.url}",
            code="bad_url",
        )
    return endpoint


def _without_user(url: str) -> str:
    """Leave out what may be a password."""
    start, at, rest = url.rpartition("@")
    scheme, slashes, _user = start.rpartition("//")
    return f"{scheme}{slashes}{rest}" if at else url


def ask(
    endpoint: Endpoint,
    path: str,
    *,
    body: Mapping[str, object] | None = None,
    timeout_s: float = HEALTH_TIMEOUT_S,
) -> Answer:
    """Send one request and return the whole answer.

    Args:
        endpoint: the server.
        path: what is asked.
        body: sent as JSON; None for a plain question.
        timeout_s: for all of it, however slowly it comes.

    Raises:
        OSError: nobody listens, or no answer came in time (TimeoutError).
        http.client.HTTPException: what came is no HTTP.
    """
    connection = connection_to(endpoint, timeout_s)
    cut = threading.Event()

    def give_up() -> None:
        cut.set()
        with suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)  # ends every wait of the thread that reads

    end_s = time.monotonic() + timeout_s
    try:
        connection.connect()
        opened: socket.socket = connection.sock
        timer = threading.Timer(max(0.0, end_s - time.monotonic()), give_up)
        timer.daemon = True
        timer.start()
        try:
            send(connection, endpoint, path, body)
            with connection.getresponse() as response:
                answer = Answer(response.status, response.read(_MAX_ANSWER_BYTES))
        except (OSError, ValueError, http.client.HTTPException):
            if cut.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
    finally:
        connection.close()
    if cut.is_set():  # an answer without a length ends where it is cut
        raise TimeoutError
    return answer


def connection_to(endpoint: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection that is not opened yet; no wait on it is longer than ``timeout_s``."""
    if not endpoint.is_tls:
        return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(
        endpoint.host, endpoint.port, timeout=timeout_s, context=context
    )


def send(
    connection: http.client.HTTPConnection,
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, object] | None = None,
) -> None:
    """Send a request, with a body as POST, and leave the answer to be read."""
    headers = {"Connection": "close"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    content = None if body is None else json.dumps(body).encode()
    if content is not None:
        headers["Content-Type"] = "application/json"
    connection.request("GET" if content is None else "POST", path, content, headers)


def wants_key(endpoint: Endpoint, status: int) -> str:
    """Word the refusal of a server that was given no key, or a wrong one (status 401 or 403)."""
    if endpoint.api_key:
        return f"the server does not take this API key (status {status})"
    return f"the server wants a key (status {status}): give it in {KEY_VARIABLE}"


def read_health(endpoint: Endpoint, timeout_s: float = HEALTH_TIMEOUT_S) -> Health:
    """Ask whether a server takes requests.

    ``/ready`` answers at once, and older releases do not have it; ``/health`` generates a token.
    """
    try:
        answer = ask(endpoint, "/ready", timeout_s=timeout_s)
        if answer.status not in (200, 503):
            answer = ask(endpoint, "/health", timeout_s=timeout_s)
    except TimeoutError:
        return Health.SILENT
    except ConnectionError:
        return Health.REFUSED
    except (OSError, http.client.HTTPException):
        return Health.STRANGE
    if answer.status == 200:
        return Health.UP
    return Health.STARTING if answer.status == 503 else Health.STRANGE


def is_answered(endpoint: Endpoint, timeout_s: float = 1.0) -> bool:
    """Tell whether anybody takes connections there."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def read_server_info(
    endpoint: Endpoint, timeout_s: float = HEALTH_TIMEOUT_S
) -> Mapping[str, object]:
    """Return how a running server has resolved its flags, and its state.

    Raises:
        ServerError: it does not answer, or not with that.
    """
    return _read_object(endpoint, "/server_info", timeout_s)


def _read_object(endpoint: Endpoint, path: str, timeout_s: float) -> Mapping[str, object]:
    where = f"{endpoint.url}{path}"
    try:
        answer = ask(endpoint, path, timeout_s=timeout_s)
    except TimeoutError:
        raise ServerError(f"{where}: no answer within {timeout_s:g} s", code="no_answer") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServerError(f"{where}: {str(reason).lower()}", code="no_answer") from None
    if answer.status in (401, 403):
        raise ServerError(f"{where}: {wants_key(endpoint, answer.status)}", code="wants_key")
    if answer.status != 200:
        raise ServerError(f"{where}: answered with status {answer.status}", code="bad_answer")
    try:
        content = json.loads(answer.body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ServerError(f"{where}: answered, and not with a JSON object", code="bad_answer")
    return content
