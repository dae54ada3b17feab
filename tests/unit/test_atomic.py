from __future__ import annotations

import errno
import os
import select
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from nccltune import atomic
from nccltune.atomic import make_dir, write_atomic, write_output
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


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o000], ids=oct)
def test_make_dir_lets_others_read_what_it_made_and_leaves_the_rest(
    tmp_path: Path, mask: int
) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    old_mask = os.umask(mask)
    try:
        make_dir(tmp_path / "mine" / "store" / "profiles")
    finally:
        os.umask(old_mask)

    modes = [
        stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("mine", "mine/store", "mine/store/profiles")
    ]
    assert modes == [0o700, 0o755, 0o755]


# What a person has named.


def test_write_output_follows_links_and_keeps_mode_and_owner(tmp_path: Path) -> None:
    target = tmp_path / "there" / "report.json"
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(target, 4711, 4712)
    (tmp_path / "one").symlink_to("there/report.json")
    (tmp_path / "two").symlink_to(tmp_path / "one")

    write_output(tmp_path / "two", "new")

    assert target.read_text() == "new"
    assert (tmp_path / "one").is_symlink()
    assert (tmp_path / "two").is_symlink()
    status = target.stat()
    assert stat.S_IMODE(status.st_mode) == 0o640
    if os.geteuid() == 0:
        assert (status.st_uid, status.st_gid) == (4711, 4712)


def test_write_output_of_a_new_file_follows_the_umask_and_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new.json")
    old_mask = os.umask(0o027)
    try:
        write_output(tmp_path / "link", "new")
    finally:
        os.umask(old_mask)

    assert (tmp_path / "new.json").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640
    assert (tmp_path / "link").is_symlink()


def test_write_output_leaves_a_device_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.close(os.open(device, os.O_WRONLY))
    except PermissionError:
        device = Path("/dev/null")

    write_output(device, "gone")

    assert stat.S_ISCHR(device.stat().st_mode)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_write_output_to_a_full_device_says_so() -> None:
    with pytest.raises(FileError, match="No space left") as refusal:
        write_output(Path("/dev/full"), "x")

    assert refusal.value.code == "disk_full"
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_write_output_into_a_pipe_that_somebody_reads(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    found: list[bytes] = []

    def read() -> None:
        select.select([reading], [], [], 10.0)  # before there is a writer, all is at its end
        with os.fdopen(reading, "rb") as file:
            found.append(file.read())

    reader = threading.Thread(target=read)
    reader.start()
    write_output(pipe, "x" * 300_000)
    reader.join(10.0)

    assert found == [b"x" * 300_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_write_output_into_a_pipe_that_nobody_reads_waits_for_nobody(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(FileError, match="nobody reads this pipe"):
        write_output(pipe, "x")

    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_write_output_into_a_pipe_that_is_full_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "OUTPUT_WAIT_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(FileError, match="Resource temporarily unavailable"):
            write_output(pipe, "x" * 300_000)
    finally:
        os.close(reading)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_write_output_to_stdout_keeps_what_stands_there(tmp_path: Path, name: str) -> None:
    code = (
        "from pathlib import Path\nfrom nccltune.atomic import write_output\n"
        f"write_output(Path({name!r}), 'ours\\n')"
    )
    out = tmp_path / "out"
    out.write_text("before\n")

    with out.open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert out.read_text() == "before\nours\n"
    assert piped.stdout == b"ours\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_write_output_onto_a_folder_or_into_none_is_a_file_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "a.json"):
        with pytest.raises(FileError, match="cannot be written"):
            write_output(path, "x")


def test_write_output_in_a_circle_of_links_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(FileError, match="symbolic links"):
        write_output(tmp_path / "a", "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act for another user")
def test_write_output_follows_nobody_elses_link_where_all_may_put_one(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("old")
    tmp_path.chmod(0o1777)
    (tmp_path / "link").symlink_to("precious")
    os.chown(tmp_path / "link", 4711, 4711, follow_symlinks=False)

    with pytest.raises(FileError, match="is a link of user 4711"):
        write_output(tmp_path / "link", "x")

    assert (tmp_path / "precious").read_text() == "old"
