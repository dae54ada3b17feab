"""Files as another process sees them: its own root, and no right that its user lacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccltune.live.process_files import MAX_READ_BYTES, ProcessFiles, rights_of
from nccltune.live.procfs import user_of
from nccltune.seen_files import is_dir, is_file
from tests.support.fake_proc import FakeProc

STRANGER = 54321
LIMIT_BYTES = 10**9


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """The root folder of a stranger's process; nothing in it is his."""
    folder = tmp_path / "world"
    (folder / "open/deep").mkdir(parents=True)
    (folder / "closed").mkdir()
    (folder / "open/deep/file").write_text("for all", encoding="utf-8")
    (folder / "closed/file").write_text("behind a closed door", encoding="utf-8")
    (folder / "secret").write_text("for its owner", encoding="utf-8")
    (folder / "secret").chmod(0o600)
    (folder / "closed").chmod(0o700)
    (tmp_path / "outside").write_text("of the host", encoding="utf-8")
    return folder


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


@pytest.fixture
def files(proc: FakeProc, world: Path) -> ProcessFiles:
    links = {"root": world, "cwd": Path("/open")}
    proc.add(100, ["x"], uid=STRANGER, links=links)
    return ProcessFiles.of(100, proc.root)


def text_of(files: ProcessFiles, path: str) -> str:
    return files.read(Path(path), LIMIT_BYTES).decode()


def test_read_follows_the_process_from_its_own_root_and_folder(files: ProcessFiles) -> None:
    assert text_of(files, "/open/deep/file") == text_of(files, "deep/file") == "for all"
    assert text_of(files, "../open/./deep/../deep/file") == "for all"
    assert is_dir(files, Path("deep"))
    assert files.names(Path("/open")) == ["deep"]


@pytest.mark.parametrize(
    "path", ["/secret", "/closed/file", "/open/link", "/open/door/file", "../secret"]
)
def test_read_of_what_its_user_may_not_read_is_refused(
    files: ProcessFiles, world: Path, path: str
) -> None:
    (world / "open/link").symlink_to("/secret")
    (world / "open/door").symlink_to("../closed")

    with pytest.raises(PermissionError):
        files.read(Path(path), LIMIT_BYTES)


def test_what_lies_behind_a_closed_door_is_not_there(files: ProcessFiles) -> None:
    assert not is_file(files, Path("/closed/file"))
    assert files.names(Path("/closed")) == []
    assert not files.may_execute(Path("/closed/file"))


def test_links_lead_nowhere_outside_the_processes_root(
    files: ProcessFiles, world: Path, tmp_path: Path
) -> None:
    (world / "open/up").symlink_to("../../outside")
    (world / "open/named").symlink_to(tmp_path / "outside")
    (world / "open/inside").symlink_to("/open/deep/file")

    for path in ("/open/up", "/open/named", "/../outside"):
        with pytest.raises(FileNotFoundError):
            files.read(Path(path), LIMIT_BYTES)
    assert text_of(files, "/open/inside") == "for all"
    assert files.resolve(Path("/open/inside")) == Path("/open/deep/file")


def test_links_in_a_circle_and_paths_without_end_are_refused(
    files: ProcessFiles, world: Path
) -> None:
    (world / "open/circle").symlink_to("circle")

    for path in ("/open/circle", "/" + "open/../" * 200 + "open"):
        with pytest.raises(OSError, match="symbolic links"):
            files.read(Path(path), LIMIT_BYTES)
    assert files.stat(Path("/open/circle")) is None


def test_a_file_of_its_own_and_of_its_group_is_read(
    proc: FakeProc, world: Path, files: ProcessFiles
) -> None:
    status = (world / "secret").stat()
    proc.add(101, ["x"], uid=status.st_uid, links={"root": world})
    (world / "shared").write_text("of the group", encoding="utf-8")
    (world / "shared").chmod(0o040)
    text = (proc.root / "100/status").read_text().replace("Groups:\t", f"Groups:\t{status.st_gid} ")
    (proc.root / "100/status").write_text(text, encoding="utf-8")

    if os.geteuid() != 0:
        assert text_of(ProcessFiles.of(101, proc.root), "/secret") == "for its owner"
    member = ProcessFiles.of(100, proc.root)
    assert member.rights.groups == {STRANGER, status.st_gid}
    if os.geteuid() == 0:  # the mode keeps its owner out
        assert text_of(member, "/shared") == "of the group"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_never_opened(
    files: ProcessFiles, world: Path, kind: str
) -> None:
    path = world / "open/it"
    if kind == "pipe":
        os.mkfifo(path, 0o644)
    elif kind == "folder":
        path.mkdir()
    else:
        files = ProcessFiles(files.rights, Path("/"))
        path = Path("/dev/zero")

    with pytest.raises(OSError, match=r"not a regular file|directory"):
        files.read(path if kind == "device" else Path("/open/it"), LIMIT_BYTES)


def test_a_file_of_the_kernel_is_empty_whatever_its_mode_says() -> None:
    here = ProcessFiles(rights_of(os.getpid()), Path("/"))

    assert here.read(Path("/proc/self/maps"), LIMIT_BYTES) == b""


def test_a_file_that_is_too_large_is_refused(files: ProcessFiles, world: Path) -> None:
    with (world / "open/large").open("wb") as file:
        file.truncate(MAX_READ_BYTES + 1)

    with pytest.raises(OSError, match="larger than 1 MiB"):
        files.read(Path("/open/large"), LIMIT_BYTES)


def test_a_process_whose_user_is_not_sure_may_do_nothing(proc: FakeProc, tmp_path: Path) -> None:
    lent = tmp_path / "sudo"
    lent.write_bytes(b"")
    lent.chmod(0o4755)
    proc.add(100, ["sglang", "serve"], uid=0, links={"exe": lent})
    proc.add(101, ["sglang", "serve"], uid=0)
    path = proc.root / "101/status"
    path.write_text(path.read_text().replace("Uid:\t0", "Uid:\t1000"), encoding="utf-8")
    proc.add(102, ["sglang", "serve"], uid=0, links={"exe": Path("/nowhere")})

    for pid in (100, 101, 102, 999):
        assert user_of(pid, proc.root) is None
        assert rights_of(pid, proc.root).uid is None
        assert not is_dir(ProcessFiles.of(pid, proc.root), Path("/usr"))


def test_root_is_above_modes_with_the_capability_alone(proc: FakeProc) -> None:
    proc.add(100, ["x"], uid=0)
    path = proc.root / "100/status"
    bare = path.read_text()
    found = []
    for uid, capabilities in (("0", "0"), ("0", "4"), ("0", "1ffffffffff"), ("1000", "2")):
        text = bare.replace("Uid:\t0\t0\t0\t0", f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}")
        path.write_text(f"{text}CapEff:\t{capabilities}\n", encoding="utf-8")
        found.append(rights_of(100, proc.root).is_above_modes)

    assert found == [False, True, True, False]


def test_nothing_that_another_process_sees_is_run(files: ProcessFiles) -> None:
    assert not files.may_run
