"""Questions to a server over HTTP, and every way in which it may not answer them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nccltune.errors import ServerError, UsageProblem
from nccltune.sglang.command import parse_launch
from nccltune.sglang.endpoints import (
    Endpoint,
    Health,
    endpoint_at,
    endpoint_of,
    is_answered,
    read_health,
    read_server_info,
)

Answers = dict[str, tuple[int, bytes]]


@contextmanager
def server(answers: Answers, seen: list[str] | None = None) -> Iterator[Endpoint]:
    """Answer paths as told; whatever else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if seen is not None:
                seen.append(f"{self.path} {self.headers.get('Authorization', '')}".strip())
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Endpoint(port=listening.server_port)
        finally:
            listening.shutdown()
            thread.join()


@contextmanager
def bare_server(answer: bytes) -> Iterator[Endpoint]:
    """Take one connection, send these bytes, and hold it open where there are none."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept: list[socket.socket] = []

        def serve() -> None:
            connection, _ = listening.accept()
            kept.append(connection)
            if answer:
                connection.recv(4096)
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield Endpoint(port=listening.getsockname()[1])
        thread.join()
        for connection in kept:
            connection.close()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(*flags: str) -> Endpoint:
    return endpoint_of(parse_launch(["sglang", "serve", "--model-path", "/m", *flags]))


def test_endpoint_of_a_launch_without_flags_is_sglangs_own() -> None:
    assert launch() == Endpoint("127.0.0.1", 30000)


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (("--port", "30123"), "http://127.0.0.1:30123"),
        (("--host", "0.0.0.0", "--port=8000"), "http://127.0.0.1:8000"),
        (("--host", "::"), "http://[::1]:30000"),
        (("--host", "10.0.0.7"), "http://10.0.0.7:30000"),
        (("--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"), "https://127.0.0.1:30000"),
    ],
)
def test_endpoint_of_a_launch_is_as_it_is_reached_from_here(
    flags: tuple[str, ...], url: str
) -> None:
    assert launch(*flags).url == url


@pytest.mark.parametrize("port", ["http", "0", "65536", "-1"])
def test_endpoint_of_a_launch_with_no_port_is_refused(port: str) -> None:
    with pytest.raises(UsageProblem, match="not a TCP port"):
        launch(f"--port={port}")


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://0.0.0.0:30000", Endpoint("127.0.0.1", 30000)),
        ("https://[::1]:8443", Endpoint("::1", 8443, is_tls=True)),
        ("http://localhost", Endpoint("localhost", 80)),
    ],
)
def test_endpoint_at_an_address_is_read(url: str, endpoint: Endpoint) -> None:
    assert endpoint_at(url) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "localhost:30000",
            "ftp://h:1",
            "http://h:99999",
            "http://h:0",
            "http://",
            "http://h\n",
        ),
        *("http://h\udcff:1", f"http://{'a' * 70}:1", "http://a..b:1", "user:sesame@h:1"),
    ],
)
def test_endpoint_at_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageProblem, match="no server's address") as raised:
        endpoint_at(url)

    assert raised.value.code == "bad_url"
    assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://127.0.0.1:1/v1", "a path"),
        ("http://127.0.0.1:1//", "a path"),
        ("http://127.0.0.1:1?x=1", "a query"),
        ("http://127.0.0.1:1/?", "a query"),
        ("http://127.0.0.1:1/#x", "a fragment"),
        ("http://me:sesame@127.0.0.1:1", "a user"),
        ("http://me@127.0.0.1:1/v1?x", "a user and a path and a query"),
    ],
)
def test_part_of_an_address_that_would_be_dropped_is_refused(url: str, named: str) -> None:
    with pytest.raises(UsageProblem) as raised:
        endpoint_at(url)

    assert raised.value.code == "bad_url"
    assert f"the address has {named}, and" in str(raised.value)
    assert str(raised.value).endswith("write http://127.0.0.1:1")
    assert "sesame" not in str(raised.value)


def test_root_path_is_no_part_of_an_address() -> None:
    assert endpoint_at("http://127.0.0.1:1/") == Endpoint("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("answers", "health"),
    [
        ({"/ready": (200, b"")}, Health.UP),
        ({"/ready": (503, b"")}, Health.STARTING),
        ({"/health": (200, b"")}, Health.UP),
        ({"/health": (503, b"")}, Health.STARTING),
        ({}, Health.STRANGE),
        ({"/health": (500, b"")}, Health.STRANGE),
        ({"/health": (401, b"")}, Health.STRANGE),
    ],
)
def test_health_is_read_with_and_without_the_quick_question(
    answers: Answers, health: Health
) -> None:
    with server(answers) as endpoint:
        assert read_health(endpoint) is health


def test_health_where_nobody_listens_is_refused(closed_port: int) -> None:
    assert read_health(Endpoint(port=closed_port)) is Health.REFUSED


def test_health_without_an_answer_in_time_is_silent() -> None:
    with bare_server(b"") as endpoint:
        assert read_health(endpoint, timeout_s=0.05) is Health.SILENT


def test_health_of_what_speaks_no_http_is_strange() -> None:
    with bare_server(b"SSH-2.0-OpenSSH_9.2\r\n") as endpoint:
        assert read_health(endpoint) is Health.STRANGE


@contextmanager
def dripping_server(head: bytes) -> Iterator[Endpoint]:
    """Send a byte every few milliseconds behind a beginning, for ever."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(head)
                while not is_over.wait(0.01):
                    connection.sendall(b" ")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint(port=listening.getsockname()[1])
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1",
    ],
    ids=["status line", "header", "endless body", "long body", "chunk"],
)
def test_answer_that_drips_is_given_up_in_time(head: bytes) -> None:
    with (
        dripping_server(head) as endpoint,
        pytest.raises(ServerError, match=r"no answer within 0\.2 s") as raised,
    ):
        read_server_info(endpoint, timeout_s=0.2)

    assert raised.value.code == "no_answer"


@pytest.mark.parametrize("status", [401, 403])
def test_server_that_wants_a_key_is_named_so(status: int) -> None:
    with server({"/server_info": (status, b"{}")}) as endpoint:
        with pytest.raises(ServerError, match=r"wants a key .*NCCLTUNE_API_KEY") as raised:
            read_server_info(endpoint)
        assert raised.value.code == "wants_key"
        with pytest.raises(ServerError, match="does not take this API key") as raised:
            read_server_info(Endpoint(port=endpoint.port, api_key="sesame"))
    assert "sesame" not in str(raised.value)


def test_question_carries_the_key_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:3128")
    seen: list[str] = []
    with server({"/ready": (200, b"")}, seen) as endpoint:
        with_key = Endpoint(port=endpoint.port, api_key="secret")

        assert read_health(with_key) is Health.UP

    assert seen == ["/ready Bearer secret"]


def test_is_answered_tells_a_taken_port_from_a_free_one(closed_port: int) -> None:
    with server({}) as endpoint:
        assert is_answered(endpoint)
    assert not is_answered(Endpoint(port=closed_port))


def test_information_is_the_object_that_was_sent() -> None:
    with server({"/server_info": (200, json.dumps({"tp_size": 2}).encode())}) as endpoint:
        assert read_server_info(endpoint) == {"tp_size": 2}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((404, b""), "status 404"),
        ((200, b"<html>"), "not with a JSON object"),
        ((200, b"[1]"), "not with a JSON object"),
        ((200, b"[" * 100_000), "not with a JSON object"),
    ],
)
def test_information_that_is_none_is_refused(answer: tuple[int, bytes], problem: str) -> None:
    with (
        server({"/server_info": answer}) as endpoint,
        pytest.raises(ServerError, match=problem) as raised,
    ):
        read_server_info(endpoint)

    assert raised.value.code == "bad_answer"


def test_information_from_nobody_is_refused(closed_port: int) -> None:
    with pytest.raises(ServerError, match="refused") as raised:
        read_server_info(Endpoint(port=closed_port))

    assert raised.value.code == "no_answer"
