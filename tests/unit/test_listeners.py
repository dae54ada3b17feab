"""Who listens on a port, and what is below a process: this very process is the example."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from pathlib import Path

import pytest

from nccltune.live.listeners import descendants, listens, sockets_at, sockets_of


def test_listens_knows_our_own_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        assert listens([os.getpid()], port) is True
        assert listens([os.getppid()], port) in (False, None)
        assert listens([], port) is False


def test_listens_on_ipv6_is_found_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        assert listens([os.getpid()], listening.getsockname()[1]) is True


def test_listens_on_a_port_that_nobody_shows_is_not_known() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))

        assert listens([os.getpid()], bound.getsockname()[1]) is None


def test_listens_without_procfs_is_not_known(tmp_path: Path) -> None:
    assert listens([os.getpid()], 80, root=tmp_path) is None


NET = Path("/proc/net")


@pytest.mark.parametrize(
    ("bound", "asked", "is_there"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.2", True),
        ("0.0.0.0", "::1", False),
        ("::1", "::1", True),
        ("::1", "127.0.0.1", False),
        ("::", "::1", True),
        ("::", "127.0.0.1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
    ],
)
def test_sockets_at_an_address_are_those_that_take_its_connections(
    bound: str, asked: str, is_there: bool
) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((bound, 0))
        listening.listen()
        port = listening.getsockname()[1]

        found = sockets_at(ip_address(asked), port, NET)

        assert bool(found) is is_there
        assert found <= sockets_of(os.getpid())


def test_socket_on_the_very_address_comes_before_one_on_all() -> None:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("0.0.0.0", 0))
        port = one.getsockname()[1]
        other.bind(("127.0.0.1", port))
        one.listen()
        other.listen()

        exact = sockets_at(ip_address("127.0.0.1"), port, NET)
        every = sockets_at(ip_address("127.0.0.2"), port, NET)

        assert (len(exact), len(every)) == (1, 1)
        assert exact != every


def write_stat(root: Path, pid: int, parent: int, *, state: str = "S", name: str = "x") -> None:
    folder = root / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} ({name}) {state} {parent}" + " 0" * 20)


def test_descendants_are_found_at_any_depth_parents_first(tmp_path: Path) -> None:
    write_stat(tmp_path, 10, 1)
    write_stat(tmp_path, 11, 10, name="a) S 1 (b")
    write_stat(tmp_path, 12, 11)
    write_stat(tmp_path, 20, 1)
    write_stat(tmp_path, 13, 10, state="Z")
    (tmp_path / "self").mkdir()
    (tmp_path / "14").mkdir()

    assert descendants(10, root=tmp_path) == [11, 12]
    assert descendants(20, root=tmp_path) == []
