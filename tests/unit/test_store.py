from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccltune.errors import FileError, UsageProblem
from nccltune.profile import Profile, format_profile
from nccltune.store import (
    Where,
    check_ownership,
    files,
    find_profile,
    list_profiles,
    load_profile,
    profiles_dir,
    save_candidate,
)

IS_ROOT = os.geteuid() == 0
MINE = Profile("mine", {"NCCL_PROTO": "allreduce:LL"})


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    (folder / "recordings").mkdir(parents=True)
    (folder / "folk.json").write_text(format_profile(Profile("folk", {"NCCL_ALGO": "Ring"})))
    monkeypatch.setattr(files, "shipped_profiles_dir", lambda: folder)
    return folder


def put(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.usefixtures("shipped")
def test_save_candidate_can_be_found_again() -> None:
    path = save_candidate(MINE)

    assert path == profiles_dir() / "mine.json"
    assert find_profile("mine") == (MINE, path, Where.STATE)


@pytest.mark.usefixtures("shipped")
def test_save_candidate_replaces_the_one_of_the_same_name() -> None:
    save_candidate(MINE)

    save_candidate(Profile("mine", {}))

    assert find_profile("mine").profile.settings == {}
    assert [path.name for path in profiles_dir().iterdir()] == ["mine.json"]


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "Big", "x.json"])
def test_save_candidate_under_a_name_that_walks_the_tree_is_refused(name: str) -> None:
    with pytest.raises(UsageProblem) as refusal:
        save_candidate(Profile(name, {}))

    assert refusal.value.code == "bad_name"
    assert not profiles_dir().exists()


@pytest.mark.usefixtures("shipped")
def test_save_candidate_under_a_shipped_name_is_refused() -> None:
    with pytest.raises(UsageProblem, match="shipped profile") as refusal:
        save_candidate(Profile("folk", {}))

    assert refusal.value.code == "name_taken"


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("settings", [{"LD_PRELOAD": "/x.so"}, {"NCCL_NTHREADS": "100"}])
def test_save_candidate_that_could_not_be_read_back_is_refused(settings: dict[str, str]) -> None:
    save_candidate(MINE)

    with pytest.raises(FileError):
        save_candidate(Profile("mine", settings))

    assert find_profile("mine").profile == MINE


@pytest.mark.usefixtures("shipped")
def test_save_candidate_where_the_folder_cannot_be_made_is_a_file_error() -> None:
    put(profiles_dir().parent, "profiles", "a file in the way")

    with pytest.raises(FileError, match="cannot be written"):
        save_candidate(MINE)


def test_find_profile_by_name_falls_back_to_the_shipped_one(shipped: Path) -> None:
    found = find_profile("folk")

    assert found.where is Where.SHIPPED
    assert found.path == shipped / "folk.json"


@pytest.mark.usefixtures("shipped")
def test_find_profile_by_name_prefers_the_state_folder() -> None:
    put(profiles_dir(), "folk.json", format_profile(Profile("folk", {})))

    assert find_profile("folk").where is Where.STATE


@pytest.mark.usefixtures("shipped")
def test_find_profile_by_file_takes_any_name_inside(tmp_path: Path) -> None:
    path = put(tmp_path, "some file.json", format_profile(MINE))

    assert find_profile(str(path)) == (MINE, path, Where.FILE)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "A"])
def test_find_profile_by_a_name_that_walks_the_tree_is_refused(name: str) -> None:
    with pytest.raises(UsageProblem) as refusal:
        find_profile(name)

    assert refusal.value.code == "bad_name"


@pytest.mark.usefixtures("shipped")
def test_find_profile_without_such_a_name_lists_what_there_is() -> None:
    save_candidate(MINE)

    with pytest.raises(UsageProblem, match="there are: folk, mine") as refusal:
        find_profile("other")

    assert refusal.value.code == "no_such_profile"


@pytest.mark.usefixtures("shipped")
def test_find_profile_of_a_missing_file_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file or directory") as refusal:
        find_profile(str(tmp_path / "nothing.json"))

    assert refusal.value.code == "cannot_read"


@pytest.mark.usefixtures("shipped")
def test_find_profile_whose_file_has_another_name_is_refused() -> None:
    put(profiles_dir(), "yours.json", format_profile(MINE))

    with pytest.raises(FileError, match="holds the profile 'mine'") as refusal:
        find_profile("yours")

    assert refusal.value.code == "name_mismatch"


@pytest.mark.usefixtures("shipped")
def test_find_profile_that_is_a_dangling_link_is_a_file_error() -> None:
    profiles_dir().mkdir(parents=True)
    (profiles_dir() / "folk.json").symlink_to("nowhere.json")

    with pytest.raises(FileError, match="No such file"):
        find_profile("folk")


def test_list_profiles_shows_both_places_and_broken_files(shipped: Path) -> None:
    save_candidate(MINE)
    put(profiles_dir(), "folk.json", format_profile(Profile("folk", {})))
    put(profiles_dir(), "broken.json", "{")
    put(profiles_dir(), ".nccltune-x.tmp", "half")
    put(profiles_dir(), ".hidden.json", "{")
    put(shipped, "notes.txt", "")

    listed = list_profiles()

    assert [(entry.name, entry.where) for entry in listed] == [
        ("broken", Where.STATE),
        ("folk", Where.STATE),
        ("folk", Where.SHIPPED),
        ("mine", Where.STATE),
    ]
    assert listed[0].profile is None
    assert "broken.json:1: not JSON" in listed[0].problem
    assert all(entry.profile is not None and not entry.problem for entry in listed[1:])


def test_list_profiles_without_any_folder_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "shipped_profiles_dir", lambda: tmp_path / "nowhere")

    assert list_profiles() == ()


def test_load_profile_of_a_folder_or_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")

    for path in (tmp_path, tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(FileError, match="not a regular file"):
            load_profile(path)


def test_load_profile_of_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = put(tmp_path, "a.json", "")
    os.truncate(path, 2**40)

    with pytest.raises(FileError, match="larger than 1 MiB"):
        load_profile(path)


def test_load_profile_that_is_not_utf_8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{\n"note": "\xff"}')

    with pytest.raises(FileError, match="not UTF-8") as refusal:
        load_profile(path)

    assert refusal.value.line == 2


def test_check_ownership_for_root_refuses_what_anyone_can_write(tmp_path: Path) -> None:
    path = put(tmp_path, "a.json", "")
    path.chmod(0o666)

    with pytest.raises(FileError, match="anyone can write it") as refusal:
        check_ownership(path, reader_uid=0)

    assert refusal.value.code == "unsafe_owner"


def test_check_ownership_for_root_refuses_a_foreign_file(tmp_path: Path) -> None:
    path = put(tmp_path, "a.json", "")
    if IS_ROOT:
        os.chown(path, 4711, 0)

    with pytest.raises(FileError, match=r"belongs to user \d+"):
        check_ownership(path, reader_uid=0)


@pytest.mark.skipif(not IS_ROOT, reason="needs root to own files and to change their group")
def test_check_ownership_for_root_refuses_a_foreign_group_and_a_folder_open_to_all(
    tmp_path: Path,
) -> None:
    path = put(tmp_path / "open", "a.json", "")
    path.chmod(0o664)
    os.chown(path, 0, 4711)
    with pytest.raises(FileError, match="group 4711 can write it"):
        check_ownership(path, reader_uid=0)

    path.chmod(0o644)
    path.parent.chmod(0o777)
    with pytest.raises(FileError, match="anyone can swap files"):
        check_ownership(path, reader_uid=0)

    path.parent.chmod(0o1777)
    check_ownership(path, reader_uid=0)


def test_check_ownership_for_root_accepts_a_file_of_root() -> None:
    check_ownership(Path("/etc/passwd"), reader_uid=0)


def test_check_ownership_for_others_accepts_what_they_can_read(tmp_path: Path) -> None:
    path = put(tmp_path, "a.json", "")
    path.chmod(0o666)

    check_ownership(path, reader_uid=1000)


def test_check_ownership_of_a_missing_file_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        check_ownership(tmp_path / "a.json", reader_uid=0)


def test_load_profile_as_root_refuses_a_file_in_other_hands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, "a.json", format_profile(MINE))
    path.chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(FileError, match="anyone can write it"):
        load_profile(path)
    assert load_profile(path, check_owner=False) == MINE


def test_find_profile_as_root_trusts_shipped_files_of_any_owner(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shipped / "folk.json").chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    assert find_profile("folk").where is Where.SHIPPED
