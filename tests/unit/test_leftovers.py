"""What killed ranks leave behind is removed, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nccltune.bench.leftovers import (
    list_segments,
    make_folder,
    remove_segments,
    temporary_folder,
)


def segment(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(b"\0" * 4096)
    return path


def test_remove_segments_takes_only_new_and_unmapped_ones(tmp_path: Path) -> None:
    old = segment(tmp_path, "nccl-old")
    before = list_segments(tmp_path)
    left, other, used = (segment(tmp_path, n) for n in ("nccl-left", "sem.other", "nccl-used"))
    program = (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0);"
        "print('mapped', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(used)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        removed = remove_segments(before, tmp_path)
        holder.communicate()

    assert removed == ("nccl-left",)
    assert not left.exists()
    assert old.exists()
    assert other.exists()
    assert used.exists()


def test_remove_segments_where_maps_cannot_be_read_removes_nothing(tmp_path: Path) -> None:
    left = segment(tmp_path, "nccl-left")

    assert remove_segments(frozenset(), tmp_path, tmp_path / "no-proc") == ()
    assert left.exists()


def test_make_folder_removes_those_of_processes_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale, foreign = tmp_path / f"nccltune-{gone.pid}-a", tmp_path / "nccltune-notes-b"
    living = tmp_path / f"nccltune-{os.getpid()}-c"
    for folder in (stale, foreign, living):
        folder.mkdir()

    made = make_folder()

    assert made.parent == tmp_path
    assert not stale.exists()
    assert foreign.exists()
    assert living.exists()


def test_temporary_folder_goes_with_its_files(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder:
        (folder / "rank0.log").write_text("words")

    assert list(tmp_path.iterdir()) == []


def test_interrupt_at_any_line_of_leaving_a_temporary_folder_stays_an_interrupt(
    tmp_path: Path,
) -> None:
    for line in range(1, 1000):
        press = CtrlC(line)
        try:
            with temporary_folder(tmp_path) as folder:
                (folder / "rank0.log").write_text("words")
                sys.settrace(press)
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(None)
        assert not press.is_pressed, "the interrupt was lost"
        assert line > 5
        return
    pytest.fail("it never ends")


class CtrlC:
    """Presses Ctrl-C once, before some line of what is called from now on."""

    def __init__(self, line: int) -> None:
        self._left = line
        self.is_pressed = False

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> Any:
        self._left -= event == "line"
        if self._left <= 0 and not self.is_pressed:
            self.is_pressed = True
            raise KeyboardInterrupt
        return self
