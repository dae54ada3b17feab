from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import FileError


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_atomic_creates_the_file_with_its_mode(tmp_path: Path) -> None:
    old_mask = os.umask(0o077)
    try:
        write_atomic(tmp_path / "a.json", "grün\n")
    finally:
        os.umask(old_mask)

    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "grün\n"
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o644


def test_write_atomic_with_a_private_mode_keeps_others_out(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.json", "x", mode=0o600)

    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600


def test_write_atomic_replaces_the_old_text_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old and longer than the new one")

    write_atomic(tmp_path / "a.json", "new")

    assert (tmp_path / "a.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_write_atomic_gives_readers_a_new_file_and_keeps_open_ones_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    with path.open() as reader:
        write_atomic(path, "new")
        seen = reader.read()

    assert seen == "old"


def test_write_atomic_with_short_writes_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, bytes(data[:3])))

    write_atomic(tmp_path / "a.json", "0123456789")

    assert (tmp_path / "a.json").read_text() == "0123456789"


def test_write_atomic_syncs_the_file_before_and_the_folder_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    steps: list[tuple[str, bool]] = []

    def record_fsync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        steps.append((kind, path.exists()))

    monkeypatch.setattr(os, "fsync", record_fsync)

    write_atomic(path, "x")

    assert steps == [("file", False), ("folder", True)]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_write_atomic_on_a_full_disk_keeps_the_old_file_and_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    monkeypatch.setattr(os, call, no_space)

    with pytest.raises(FileError, match="No space left on device") as refusal:
        write_atomic(path, "new")

    assert refusal.value.code == "disk_full"
    assert str(path) in str(refusal.value)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_write_atomic_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)

    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a.json", "new")

    assert list(tmp_path.iterdir()) == []


def test_write_atomic_closes_every_descriptor_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names only)
    monkeypatch.setattr(os, "fsync", no_space)

    with pytest.raises(FileError):
        write_atomic(tmp_path / "a.json", "new")

    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_write_atomic_where_a_folder_cannot_be_synced_still_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder_refuses(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", folder_refuses)

    write_atomic(tmp_path / "a.json", "x")

    assert (tmp_path / "a.json").read_text() == "x"


def test_write_atomic_without_the_folder_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file or directory") as refusal:
        write_atomic(tmp_path / "missing" / "a.json", "x")

    assert refusal.value.code == "cannot_write"


def test_write_atomic_onto_a_folder_is_a_file_error_without_leftover(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()

    with pytest.raises(FileError, match=r"a\.json: cannot be written"):
        write_atomic(tmp_path / "a.json", "x")

    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_make_dir_creates_parents_and_accepts_an_existing_folder(tmp_path: Path) -> None:
    make_dir(tmp_path / "a" / "b")
    make_dir(tmp_path / "a" / "b")

    assert (tmp_path / "a" / "b").is_dir()


def test_make_dir_below_a_file_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")

    with pytest.raises(FileError, match="Not a directory"):
        make_dir(tmp_path / "a" / "b")
