"""Whether a server listens, by the kernel's own tables."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

import nccltuned.listening as listening
from nccltuned.listening import PortWatch
from tests.support.fake_proc import FakeProc


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    fake = FakeProc(tmp_path)
    fake.add(100, ["sglang", "serve"])
    return fake


def test_is_listening_sees_a_socket_of_the_process(proc: FakeProc) -> None:
    proc.listen(100, 30000)

    assert PortWatch(proc.root).is_listening(100, 30000) is True
    assert PortWatch(proc.root).is_listening(100, 30001) is False


def test_is_listening_takes_no_socket_of_another_process(proc: FakeProc) -> None:
    proc.listen(100, 30000, is_own=False)

    assert PortWatch(proc.root).is_listening(100, 30000) is False


def test_is_listening_that_may_not_be_looked_into_is_unknown(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: object) -> None:
        raise PermissionError

    proc.listen(100, 30000)
    monkeypatch.setattr(os, "scandir", refuse)

    assert PortWatch(proc.root).is_listening(100, 30000) is None


def test_is_listening_of_a_process_that_is_gone_is_false(proc: FakeProc) -> None:
    assert PortWatch(proc.root).is_listening(4242, 30000) is False


def test_is_listening_without_descriptors_is_no_answer(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    proc.listen(100, 30000)
    for target in ("os.scandir", "pathlib.Path.open"):
        with monkeypatch.context() as patch:
            patch.setattr(target, refuse)
            with pytest.raises(OSError, match="too many"):
                PortWatch(proc.root).is_listening(100, 30000)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def test_is_listening_reads_the_real_tables(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        port = listener.getsockname()[1]
        now_s = [0.0]
        watch = PortWatch(clock=lambda: now_s[0])
        assert watch.is_listening(os.getpid(), port) is False
        listener.listen()
        now_s[0] += 10.0

        assert watch.is_listening(os.getpid(), port) is True
        assert PortWatch().is_listening(os.getppid(), port) is not True


def test_watch_reads_the_tables_again_for_a_new_socket_alone(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def read(_folder: Path, port: int) -> list[str]:
        reads.append(port)
        return []

    monkeypatch.setattr(listening, "listening_sockets", read)
    now_s = [100.0]
    watch = PortWatch(proc.root, clock=lambda: now_s[0])
    proc.listen(100, 30000)
    for _ in range(3):
        watch.is_listening(100, 30000)
    assert len(reads) == 1

    (proc.root / "100/fd/8").symlink_to("socket:[9]")
    watch.is_listening(100, 30000)
    assert len(reads) == 2
    now_s[0] += 10.0
    watch.is_listening(100, 30000)
    assert len(reads) == 3
    watch.is_listening(100, 30000, is_due=True)  # its log has just said that it is up

    assert len(reads) == 4


def test_watch_of_a_process_without_sockets_never_reads_them(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "listening_sockets", pytest.fail)
    (proc.root / "100/fd").mkdir()

    assert PortWatch(proc.root).is_listening(100, 30000) is False
