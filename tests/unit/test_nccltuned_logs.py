"""What a starting server writes, read from outside."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nccltuned.logs import open_logs
from nccltuned.unit_log import is_invocation, is_journal, read_journal
from tests.support.fake_proc import FakeProc

APPENDING = os.O_WRONLY | os.O_APPEND


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    fake = FakeProc(tmp_path)
    fake.add(100, ["sglang", "serve"])
    return fake


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text("old line\n", encoding="utf-8")
    return path


def test_logs_of_a_file_that_was_cut_for_the_start_are_read_whole(
    proc: FakeProc, log_path: Path
) -> None:
    proc.write_to(100, log_path, flags=os.O_WRONLY | os.O_TRUNC)

    found = open_logs(100, age_s=0.0, root=proc.root)

    assert found.read().text == "old line\n"
    assert len(found.files) == 1
    found.close()


@pytest.mark.parametrize(("flags", "age_s"), [(APPENDING, 0.0), (os.O_WRONLY, 100.0)])
def test_logs_that_others_wrote_before_are_read_from_there_on(
    proc: FakeProc, log_path: Path, flags: int, age_s: float
) -> None:
    proc.write_to(100, log_path, flags=flags)
    found = open_logs(100, age_s=age_s, root=proc.root)
    with log_path.open("a", encoding="utf-8") as file:
        file.write("new line\n")

    assert found.read().text == "new line\n"
    found.close()


def test_logs_are_read_after_the_process_and_its_file_are_gone(
    proc: FakeProc, log_path: Path
) -> None:
    proc.write_to(100, log_path)
    found = open_logs(100, age_s=0.0, root=proc.root)
    proc.remove(100)
    log_path.unlink()

    assert found.read().text == "old line\n"
    found.close()
    assert found.read().text == ""


@pytest.mark.parametrize(
    "content", ["", "x\n", "new line, and one that is longer than what was there before\n"]
)
def test_logs_that_were_cut_and_written_anew_tell_nothing_any_more(
    proc: FakeProc, log_path: Path, content: str
) -> None:
    proc.write_to(100, log_path)
    found = open_logs(100, age_s=0.0, root=proc.root)
    found.look(b"ready")
    log_path.write_text(content, encoding="utf-8")

    assert found.read().text == ""
    log_path.write_text("old line\n", encoding="utf-8")
    assert found.read().text == ""
    found.close()


def test_logs_that_are_large_are_read_at_their_end(
    proc: FakeProc, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccltuned.log_file.TAIL_BYTES", 10)
    log_path.write_text("0123456789abcdef", encoding="utf-8")
    proc.write_to(100, log_path)
    found = open_logs(100, age_s=0.0, root=proc.root)

    assert found.read().text == "6789abcdef"
    found.close()


def test_logs_of_pipes_and_terminals_are_left_alone(proc: FakeProc, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    proc.write_to(100, pipe)

    assert open_logs(100, age_s=0.0, root=proc.root).files == []


def test_logs_of_a_process_that_ends_while_they_are_opened_are_not_left_open(
    proc: FakeProc, log_path: Path
) -> None:
    proc.write_to(100, log_path)
    for path in (proc.root / "100/fdinfo").iterdir():
        path.unlink()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - as short as it gets

    assert open_logs(100, age_s=0.0, root=proc.root).files == []
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_logs_for_which_there_are_no_descriptors_are_not_told_to_be_none(
    proc: FakeProc, log_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.write_to(100, log_path)
    (proc.root / "100/fd/2").unlink()
    (tmp_path / "other.log").touch()
    (proc.root / "100/fd/2").symlink_to(tmp_path / "other.log")
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - as short as it gets
    opened: list[str] = []
    real = os.open

    def open_one(path: str, *rest: int) -> int:
        if opened:
            raise OSError(errno.EMFILE, "too many")
        opened.append(path)
        return real(path, *rest)

    monkeypatch.setattr(os, "open", open_one)
    with pytest.raises(OSError, match="too many"):
        open_logs(100, age_s=0.0, root=proc.root)

    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_logs_of_a_process_that_is_gone_are_none(proc: FakeProc) -> None:
    assert open_logs(4242, age_s=0.0, root=proc.root).files == []


def test_is_journal_wants_the_very_stream_that_systemd_named(
    proc: FakeProc, log_path: Path
) -> None:
    proc.write_to(100, log_path)
    status = log_path.stat()
    stream = f"{status.st_dev}:{status.st_ino}"

    assert is_journal(100, {"JOURNAL_STREAM": stream}, proc.root)
    assert not is_journal(100, {"JOURNAL_STREAM": "1:2"}, proc.root)
    assert not is_journal(100, {}, proc.root)


def test_is_invocation_takes_nothing_else_for_one() -> None:
    assert is_invocation("0123456789abcdef0123456789abcdef")
    assert not is_invocation("")
    assert not is_invocation("--output=json 0123456789abcdef")


def test_read_journal_asks_for_one_run_and_nothing_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    text = read_journal("f" * 32, "2026-11-29T12:00:00+00:00")

    assert f"_SYSTEMD_INVOCATION_ID={'f' * 32}" in text
    assert "--since=@1795953599" in text
    assert "--until" not in text
    text = read_journal("f" * 32, "2026-11-29T12:00:00+00:00", "2026-11-29T12:00:09+00:00")
    assert "--until=@1795953609" in text


def test_read_journal_without_a_journal_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert read_journal("f" * 32, "2026-11-29T12:00:00+00:00") == ""


def test_logs_are_asked_for_new_words_alone(proc: FakeProc, log_path: Path) -> None:
    proc.write_to(100, log_path, flags=APPENDING)
    found = open_logs(100, age_s=0.0, root=proc.root)
    with log_path.open("a", encoding="utf-8") as file:
        assert not found.look(b"ready to roll").has_words
        for part in ("it is ready", " to roll\n"):
            file.write(part)
            file.flush()
            answer = found.look(b"ready to roll").has_words
    log_path.write_text("cut\n", encoding="utf-8")

    assert answer
    assert not found.look(b"ready to roll").has_words
    found.close()
