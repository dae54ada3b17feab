"""What a starting server writes, read from outside."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nccltuned.log_file import TAIL_BYTES, LogText
from nccltuned.logs import open_logs
from nccltuned.unit_log import JOURNAL_LINES, find_journal, is_invocation, read_journal
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


def test_find_journal_wants_the_very_stream_that_systemd_named(
    proc: FakeProc, log_path: Path
) -> None:
    proc.write_to(100, log_path)
    status = log_path.stat()
    stream = f"{status.st_dev}:{status.st_ino}"

    assert find_journal(100, {"JOURNAL_STREAM": stream}, proc.root)
    assert not find_journal(100, {"JOURNAL_STREAM": "1:2"}, proc.root)
    assert not find_journal(100, {}, proc.root)


def test_is_invocation_takes_nothing_else_for_one() -> None:
    assert is_invocation("0123456789abcdef0123456789abcdef")
    assert not is_invocation("")
    assert not is_invocation("--output=json 0123456789abcdef")


MOMENT = "2026-11-29T12:00:00+00:00"


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let a script stand in for journalctl, and time pass at once."""
    program = tmp_path / "journalctl"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("nccltuned.unit_log.SETTLE_S", 0.0)

    def install(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)

    return install


def test_read_journal_asks_for_one_run_and_nothing_before_it(
    journalctl: Callable[[str], None],
) -> None:
    journalctl('echo "$@"')

    text = read_journal("f" * 32, MOMENT).text

    assert f"_SYSTEMD_INVOCATION_ID={'f' * 32}" in text
    assert "--since=@1795953599" in text
    assert "--until" not in text
    text = read_journal("f" * 32, MOMENT, "2026-11-29T12:00:09+00:00").text
    assert "--until=@1795953609" in text


def test_read_journal_without_a_journal_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccltuned.unit_log.SETTLE_S", 0.0)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert read_journal("f" * 32, MOMENT) == LogText()


def test_read_journal_waits_for_what_the_journal_has_not_taken_in_yet(
    journalctl: Callable[[str], None], tmp_path: Path
) -> None:
    late, taken = tmp_path / "late", tmp_path / "taken"
    late.write_text("NCCL error\n", encoding="utf-8")
    journalctl(f'case "$*" in *--sync*) mv {late} {taken};; *) cat {taken};; esac')

    assert read_journal("f" * 32, MOMENT) == LogText("NCCL error\n", is_whole=True)


def test_read_journal_waits_for_words_that_are_on_their_way(
    journalctl: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccltuned.unit_log.SETTLE_S", 0.75)
    visible_at_s = time.time() + 0.5
    journalctl(f"""case "$*" in *--sync*) exit;; esac
    {sys.executable} -c 'import time; print("NCCL" if time.time() > {visible_at_s} else "")'""")

    assert "NCCL" in read_journal("f" * 32, MOMENT).text


@pytest.mark.parametrize(
    ("script", "is_whole"),
    [
        ("echo words", True),
        ('case "$*" in *--sync*) exit 1;; *) echo words;; esac', False),
        ('case "$*" in *--sync*) ;; *) echo words; exit 1;; esac', False),
        (f"yes words | head -n {JOURNAL_LINES}; echo words", False),
        (f"head -c {TAIL_BYTES + 1} /dev/zero | tr '\\0' x; echo words", False),
    ],
    ids=["all", "not_synced", "failed", "many_lines", "many_bytes"],
)
def test_read_journal_is_whole_where_the_journal_has_told_all(
    journalctl: Callable[[str], None], script: str, *, is_whole: bool
) -> None:
    journalctl(script)

    found = read_journal("f" * 32, MOMENT)

    assert found.text.endswith("words\n")
    assert found.is_whole is is_whole


def test_read_journal_takes_no_part_for_all_where_journalctl_counts_lines(
    journalctl: Callable[[str], None],
) -> None:
    lines = r"sed -n 's/.*--lines=\([0-9]*\).*/\1/p'"
    many = f"(echo 'NCCL error'; yes x | head -n {JOURNAL_LINES})"
    journalctl(f'{many} | tail -n "$(echo "$@" | {lines})"')

    found = read_journal("f" * 32, MOMENT)

    assert not found.text.startswith("NCCL")
    assert not found.is_whole


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


def test_logs_of_an_output_that_became_another_are_neither_read_nor_left_open(
    proc: FakeProc, log_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.log"
    other.touch()
    proc.write_to(100, log_path)
    real = os.open
    monkeypatch.setattr(os, "open", lambda _path, *rest: real(other, *rest))
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - as short as it gets

    assert open_logs(100, age_s=0.0, root=proc.root).files == []
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_logs_that_were_cut_and_begin_as_before_tell_nothing_any_more(
    proc: FakeProc, log_path: Path
) -> None:
    content = "a line that stands in every log\n" * 100
    log_path.write_text(content, encoding="utf-8")
    proc.write_to(100, log_path)
    found = open_logs(100, age_s=0.0, root=proc.root)
    found.look(b"ready")
    log_path.write_text(content[: len(content) // 2], encoding="utf-8")

    assert found.read().text == ""
    found.close()


def test_logs_that_are_dropped_are_not_left_open(
    proc: FakeProc, log_path: Path, tmp_path: Path
) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - as short as it gets
    proc.write_to(100, log_path)
    found = open_logs(100, age_s=0.0, root=proc.root)
    [file] = found.files

    assert not found.drop({(1, 2)})
    assert len(found.files) == 1
    assert found.drop({(1, 2), file.inode})
    assert found.files == []
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
