"""Datagrams to a service manager, as its socket receives them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nccltune.sdnotify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5.0)
        yield receiver


def notifier(manager: socket.socket, **more: str) -> Notifier:
    return Notifier.from_environ({"NOTIFY_SOCKET": manager.getsockname(), **more})


def test_ready_is_one_datagram_with_its_status(manager: socket.socket) -> None:
    assert notifier(manager).ready("serving on http://127.0.0.1:30000")

    assert manager.recv(4096) == b"READY=1\nSTATUS=serving on http://127.0.0.1:30000"


def test_status_is_one_line_whatever_it_holds(manager: socket.socket) -> None:
    notifier(manager).status("loading\nREADY=1\n weights")

    assert manager.recv(4096) == b"STATUS=loading READY=1 weights"


def test_extend_timeout_is_in_microseconds(manager: socket.socket) -> None:
    notifier(manager).extend_timeout(660.5)

    assert manager.recv(4096) == b"EXTEND_TIMEOUT_USEC=660500000"


def test_watchdog_and_stopping_are_sent(manager: socket.socket) -> None:
    notifier(manager).watchdog()
    notifier(manager).stopping()

    assert [manager.recv(4096), manager.recv(4096)] == [b"WATCHDOG=1", b"STOPPING=1"]


def test_abstract_socket_is_reached() -> None:
    name = f"nccltune-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        receiver.settimeout(5.0)

        Notifier.from_environ({"NOTIFY_SOCKET": f"@{name}"}).ready()

        assert receiver.recv(4096) == b"READY=1"


@pytest.mark.parametrize("address", ["", "vsock:2:9999", "relative/path"])
def test_notifier_without_a_socket_that_it_knows_is_silent(address: str) -> None:
    quiet = Notifier.from_environ({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})

    quiet.ready()

    assert not quiet.is_listened_to
    assert quiet.watchdog_s is None


def test_notifier_whose_manager_is_gone_costs_nothing(tmp_path: Path) -> None:
    assert not Notifier.from_environ({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()


@pytest.mark.parametrize(
    ("pid", "usec", "watchdog_s"),
    [
        ("own", "30000000", 30.0),
        ("", "30000000", 30.0),
        ("1", "30000000", None),
        ("own", "soon", None),
        ("own", "0", None),
        ("own", "", None),
    ],
)
def test_watchdog_is_ours_only_where_our_process_is_meant(
    manager: socket.socket, pid: str, usec: str, watchdog_s: float | None
) -> None:
    meant = str(os.getpid()) if pid == "own" else pid

    assert notifier(manager, WATCHDOG_PID=meant, WATCHDOG_USEC=usec).watchdog_s == watchdog_s


class WatchedSocket(socket.socket):
    """Remembers whether a call of it might wait."""

    waits: list[float | None] = []  # noqa: RUF012 - one list for all, cleared by the test

    def __exit__(self, *args: object) -> None:
        self.waits.append(self.gettimeout())
        super().__exit__(*args)


def test_manager_that_is_full_is_not_waited_for_and_hears_the_next_word(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as flood:
        flood.setblocking(False)
        flood.connect(manager.getsockname())
        with suppress(BlockingIOError):
            while True:
                flood.send(b"STATUS=much")
        WatchedSocket.waits.clear()
        monkeypatch.setattr("nccltune.sdnotify.socket.socket", WatchedSocket)

        assert not notifier(manager).ready()

        assert WatchedSocket.waits == [0.0]
        manager.recv(4096)
        assert notifier(manager).ready()
