"""Who listens on a port, and what is below a process: this very process is the example."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from nccltune.live.listeners import descendants, listens


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
