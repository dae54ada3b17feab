"""What procfs tells of a process, at every moment of its life."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nccltune.live import procfs
from nccltune.live.procfs import (
    Process,
    Unreadable,
    is_running,
    read_environ,
    read_process,
    read_stat,
    started_at_s,
)
from tests.support.fake_proc import FakeProc

MODULE = ("python", "-m", "sglang.launch_server", "--model-path", "/m")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc.with_init(tmp_path)


def test_read_process_with_brackets_in_its_name_reads_the_right_fields(proc: FakeProc) -> None:
    proc.add(100, ["x", "", "y", ""], parent=7, ticks=123, name="a) S (b")

    process = read_process(100, proc.root)

    assert process == Process(100, 7, 123, 100, ("x", "", "y", ""))


@pytest.mark.parametrize("state", ["Z", "X"])
def test_read_process_that_nobody_has_fetched_is_gone(proc: FakeProc, state: str) -> None:
    proc.add(100, MODULE, state=state)

    assert read_process(100, proc.root) is None


def test_read_process_that_is_not_there_is_none(proc: FakeProc) -> None:
    assert read_process(4242, proc.root) is None


@pytest.mark.parametrize(
    "end",
    [
        lambda proc: proc.remove(100),
        lambda proc: proc.begin_to_end(100),
        lambda proc: proc.add(100, [], state="Z"),
    ],
    ids=["ended", "ending", "zombie"],
)
def test_read_process_that_ends_before_its_words_are_read_is_none(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch, end: Callable[[FakeProc], None]
) -> None:
    real = procfs.read_command_line

    def read_command_line(pid: int, root: Path) -> bytes:
        end(proc)
        return real(pid, root)

    proc.add(100, MODULE)
    monkeypatch.setattr(procfs, "read_command_line", read_command_line)

    assert read_process(100, proc.root) is None


def _words(pid: int, root: Path) -> object:
    return read_environ(Process(pid, 1, 5000, pid, MODULE), root)


@pytest.mark.parametrize("read", [read_process, read_stat, procfs.read_status, _words])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_process_that_cannot_be_looked_at_for_want_of_descriptors_is_not_told_to_be_gone(
    proc: FakeProc,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[int, Path], object],
    number: int,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "too many")

    proc.add(100, MODULE)
    monkeypatch.setattr("os.open", refuse)
    monkeypatch.setattr("pathlib.Path.open", refuse)

    with pytest.raises(OSError, match="too many"):
        read(100, proc.root)


def test_is_running_tells_a_later_process_of_the_same_number(proc: FakeProc) -> None:
    proc.add(100, MODULE, ticks=10)
    process = read_process(100, proc.root)
    assert process is not None
    proc.add(100, MODULE, ticks=99)

    assert not is_running(process, proc.root)


def _environ(proc: FakeProc, content: bytes) -> tuple[object, str]:
    proc.add(100, MODULE)
    (proc.root / "100/environ").write_bytes(content)
    process = read_process(100, proc.root)
    assert process is not None
    reading = read_environ(process, proc.root)
    return reading.values, reading.problem


def test_read_environ_returns_the_first_of_two_equal_names(proc: FakeProc) -> None:
    values, problem = _environ(proc, b"A=1\0A=2\0B=x=y\0broken\0=odd\0C=\0")

    assert values == {"A": "1", "B": "x=y", "C": ""}
    assert problem == ""


@pytest.mark.parametrize(
    "content", [b"\0" * 300, b"ler_TP0\0\0\0\0\0\0"], ids=["zeros", "end_of_title"]
)
def test_read_environ_that_a_title_overwrote_is_unreadable(proc: FakeProc, content: bytes) -> None:
    values, problem = _environ(proc, content)

    assert values is None
    assert problem == Unreadable.WIPED
    assert "SPT_NOENV" in problem


def test_read_environ_of_a_process_started_with_nothing_is_empty(proc: FakeProc) -> None:
    assert _environ(proc, b"") == ({}, "")


@pytest.mark.parametrize("is_over", [False, True], ids=["all_the_time", "at_first"])
def test_read_environ_amid_exec_is_not_one_without_anything(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch, *, is_over: bool
) -> None:
    proc.add(100, MODULE, environ={"NCCL_ALGO": "ring"})
    process = read_process(100, proc.root)
    assert process is not None
    proc.begin_exec(100)
    real = procfs.read_command_line

    def read_command_line(pid: int, root: Path) -> bytes:
        if is_over:
            proc.add(100, MODULE, environ={"NCCL_ALGO": "tree"})
        return real(pid, root)

    monkeypatch.setattr(procfs, "read_command_line", read_command_line)

    reading = read_environ(process, proc.root)

    values = {"NCCL_ALGO": "tree"} if is_over else None
    assert (reading.values, reading.problem) == (values, "" if is_over else Unreadable.GONE)


def test_read_environ_of_a_process_that_is_ending_is_gone(proc: FakeProc) -> None:
    proc.add(100, MODULE, environ={"NCCL_ALGO": "ring"})
    process = read_process(100, proc.root)
    assert process is not None
    proc.begin_to_end(100)

    reading = read_environ(process, proc.root)
    assert (reading.values, reading.problem) == (None, Unreadable.GONE)


def test_read_process_that_has_lost_its_words_has_ended() -> None:
    code = "held = b'x' * 2**29; print(1, flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_process(process.pid) is not None
        process.kill()
        # As a server's does, its memory takes a while to be let go of.
        while read_stat(process.pid) is not None:
            if not Path(f"/proc/{process.pid}/cmdline").read_bytes():
                assert read_process(process.pid) is None


def test_read_environ_that_is_not_text_keeps_every_byte(proc: FakeProc) -> None:
    values, _ = _environ(proc, b"A=\xff\0")

    assert values == {"A": "\udcff"}


def test_read_environ_of_another_users_process_says_so(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _mode: str) -> None:
        raise PermissionError

    proc.add(100, MODULE)
    process = read_process(100, proc.root)
    assert process is not None
    monkeypatch.setattr(Path, "open", refuse)

    assert read_environ(process, proc.root).problem == Unreadable.FORBIDDEN


def test_read_environ_of_a_process_that_was_replaced_meanwhile_is_not_taken(
    proc: FakeProc,
) -> None:
    proc.add(100, MODULE, ticks=1, environ={"A": "1"})
    process = read_process(100, proc.root)
    assert process is not None
    proc.add(100, MODULE, ticks=2, environ={"A": "2"})

    assert read_environ(process, proc.root).problem == Unreadable.GONE


def test_started_at_is_now_less_the_age_of_the_process() -> None:
    process = Process(1, 0, 50_00, 1, ())

    assert started_at_s(process, now_s=1000.0, boottime_s=60.0) == pytest.approx(990.0)


def test_environ_that_is_larger_than_a_servers_is_unreadable(proc: FakeProc) -> None:
    proc.add(100, MODULE, environ={"A": "x" * 300_000})
    process = read_process(100, proc.root)
    assert process is not None

    assert read_environ(process, proc.root).problem == Unreadable.LARGE
