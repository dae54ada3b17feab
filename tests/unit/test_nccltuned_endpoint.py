"""Metrics over HTTP: what is answered, and what clients cannot do to the service."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import pytest

from nccltune.errors import HostError, UsageProblem
from nccltuned.endpoint import (
    MetricsEndpoint,
    check_address,
    open_endpoint,
    parse_loopback,
    passed_sockets,
    respond,
)

TEXT = "nccltune_up 1\n"


def serve(endpoint: MetricsEndpoint, rounds: int = 10) -> None:
    """Do what the service's loop does."""
    for _ in range(rounds):
        poll = select.poll()
        for number, events in endpoint.interests().items():
            poll.register(number, events)
        for number, _events in poll.poll(0):
            endpoint.handle(number)


def open_unix(path: Path) -> MetricsEndpoint:
    endpoint = open_endpoint(f"unix:{path}", lambda: TEXT, [])
    assert endpoint is not None
    return endpoint


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5.0)
    client.connect(str(path))
    return client


def everything(client: socket.socket) -> bytes:
    content = b""
    while part := client.recv(65536):
        content += part
    return content


def test_endpoint_on_a_unix_socket_answers_and_closes(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    endpoint = open_unix(path)
    with connect(path) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        serve(endpoint)
        answer = everything(client)

    assert answer.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    assert answer.endswith(TEXT.encode())
    endpoint.close()
    assert not path.exists()


def test_endpoint_on_a_loopback_port_answers() -> None:
    endpoint = open_endpoint("127.0.0.1:0", lambda: TEXT, [])
    assert endpoint is not None
    with socket.create_connection(endpoint.listeners[0].getsockname(), timeout=5.0) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        serve(endpoint)

        assert everything(client).endswith(TEXT.encode())
    endpoint.close()


def test_endpoint_on_passed_sockets_goes_before_the_address(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "passed.sock"))
    listener.listen()

    endpoint = open_endpoint("127.0.0.1:1", lambda: TEXT, [listener])

    assert endpoint is not None
    assert endpoint.listeners == [listener]
    endpoint.close()


def test_endpoint_that_is_off_is_none() -> None:
    assert open_endpoint("off", lambda: TEXT, []) is None


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /metrics?x=1 HTTP/1.1\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"\xff\x00 garbage", b"400"),
    ],
)
def test_respond_names_the_status(request_text: bytes, status: bytes) -> None:
    assert respond(request_text, lambda: TEXT).split()[1] == status


def test_respond_to_head_has_no_body() -> None:
    answer = respond(b"HEAD /metrics HTTP/1.1\r\n\r\n", lambda: TEXT)

    assert answer.endswith(b"\r\n\r\n")
    assert f"Content-Length: {len(TEXT)}".encode() in answer


def test_endpoint_waits_for_a_request_that_comes_in_pieces(tmp_path: Path) -> None:
    endpoint = open_unix(tmp_path / "m.sock")
    with connect(tmp_path / "m.sock") as client:
        client.sendall(b"GET /met")
        serve(endpoint)
        client.sendall(b"rics HTTP/1.1\r\n\r\n")
        serve(endpoint)

        assert b"200 OK" in everything(client)
    endpoint.close()


def test_endpoint_drops_a_client_whose_request_is_too_long(tmp_path: Path) -> None:
    endpoint = open_unix(tmp_path / "m.sock")
    with connect(tmp_path / "m.sock") as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 9000)
        serve(endpoint)

    assert len(endpoint.interests()) == 1
    endpoint.close()


def test_endpoint_sends_a_large_answer_to_a_slow_reader_without_blocking(tmp_path: Path) -> None:
    large = "x" * 3_000_000
    endpoint = open_endpoint(f"unix:{tmp_path}/m.sock", lambda: large, [])
    assert endpoint is not None
    with connect(tmp_path / "m.sock") as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        serve(endpoint)
        content = b""
        while not content.endswith(b"x" * 10) or len(content) < len(large):
            client.setblocking(False)
            try:
                content += client.recv(1 << 20)
            except BlockingIOError:
                serve(endpoint, rounds=1)

        assert content.endswith(large.encode())
    endpoint.close()


def test_endpoint_gives_up_clients_that_say_nothing(tmp_path: Path) -> None:
    endpoint = open_unix(tmp_path / "m.sock")
    with connect(tmp_path / "m.sock") as client:
        serve(endpoint)
        deadline_s = endpoint.next_deadline_s()
        assert deadline_s is not None
        endpoint.drop_slow(deadline_s)

        assert everything(client) == b""
    assert endpoint.next_deadline_s() is None
    endpoint.close()


def test_endpoint_keeps_few_clients_and_drops_the_oldest(tmp_path: Path) -> None:
    endpoint = open_unix(tmp_path / "m.sock")
    clients = []
    for _ in range(40):
        clients.append(connect(tmp_path / "m.sock"))
        serve(endpoint, rounds=1)

    assert len(endpoint.interests()) == 1 + 16
    assert clients[0].recv(1) == b""
    for client in clients:
        client.close()
    endpoint.close()


def test_endpoint_survives_a_client_that_leaves_in_between(tmp_path: Path) -> None:
    endpoint = open_unix(tmp_path / "m.sock")
    client = connect(tmp_path / "m.sock")
    client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    client.close()

    serve(endpoint)

    assert len(endpoint.interests()) == 1
    endpoint.close()


def test_endpoint_takes_over_a_socket_that_a_dead_service_left(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()

    open_unix(path).close()


def test_endpoint_takes_no_socket_from_a_service_that_lives(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    first = open_unix(path)

    with pytest.raises(HostError, match="in use"):
        open_unix(path)
    first.close()


def test_endpoint_takes_no_other_file_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    path.write_text("mine", encoding="utf-8")

    with pytest.raises(HostError):
        open_unix(path)
    assert path.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    "address",
    ["", "9469", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "localhost:1", "unix:", "unix:x"],
)
def test_check_address_that_makes_no_sense_is_refused(address: str) -> None:
    with pytest.raises(UsageProblem):
        check_address(address)


@pytest.mark.parametrize("address", ["0.0.0.0:9469", "[::]:9469", "192.0.2.1:9469"])
def test_check_address_that_others_reach_is_refused_and_names_the_way(address: str) -> None:
    with pytest.raises(UsageProblem, match=r"nccltuned\.socket"):
        check_address(address)


@pytest.mark.parametrize("address", ["off", "unix:/run/x.sock", "127.0.0.1:9469", "[::1]:0"])
def test_check_address_that_is_good_passes(address: str) -> None:
    check_address(address)


def test_parse_loopback_splits_host_and_port() -> None:
    assert parse_loopback("[::1]:9469") == ("::1", 9469)


def test_passed_sockets_for_another_process_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")

    assert passed_sockets() == []
    assert "LISTEN_FDS" not in os.environ
