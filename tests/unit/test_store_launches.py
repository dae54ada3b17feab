from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nccltune.errors import BusyError, FileError
from nccltune.profile import Profile
from nccltune.store import (
    LaunchRecord,
    activate,
    append_launch_record,
    launches,
    read_launch_records,
    save_candidate,
)
from nccltune.store.launches import (
    LAUNCHES_NAME,
    MAX_FILE_BYTES,
    MAX_OF_USER,
    MAX_USERS,
    OLDER_NAME,
    keep_handed_over,
    make_room,
)
from nccltune.store.lock import state_lock

RECORD = LaunchRecord(
    route="run",
    pid=4711,
    started_ticks=123456,
    boot_id="6f2c",
    launched_at="2026-11-29T12:00:00.000+00:00",
    command_digest="0123456789abcdef",
    profile_name="kimi",
    digest="fedcba9876543210",
    settings={"NCCL_PROTO": "allreduce:LL"},
    kept={"NCCL_ALGO": "Tree"},
    reason="profile kimi is applied",
)


def test_records_come_back_in_order(tmp_path: Path) -> None:
    plain = replace(RECORD, profile_name=None, digest=None, settings={}, pid=2)

    append_launch_record(RECORD, tmp_path)
    append_launch_record(plain, tmp_path)

    assert read_launch_records(tmp_path) == (RECORD, plain)


def test_records_of_a_fresh_host_are_none(tmp_path: Path) -> None:
    assert read_launch_records(tmp_path / "nowhere") == ()


def test_append_makes_the_folder(tmp_path: Path) -> None:
    append_launch_record(RECORD, tmp_path / "new" / "home")

    assert read_launch_records(tmp_path / "new" / "home") == (RECORD,)


def test_append_after_a_torn_line_loses_nothing_else(tmp_path: Path) -> None:
    append_launch_record(RECORD, tmp_path)
    with (tmp_path / LAUNCHES_NAME).open("ab") as file:
        file.write(b'{"route": "run", "pid": 47')

    append_launch_record(replace(RECORD, pid=3), tmp_path)

    assert [record.pid for record in read_launch_records(tmp_path)] == [4711, 3]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"route": "run"}',
        json.dumps({**json.loads(launches._format(RECORD)), "pid": "4711"}).encode(),
        json.dumps({**json.loads(launches._format(RECORD)), "settings": ["x"]}).encode(),
        json.dumps({**json.loads(launches._format(RECORD)), "digest": 7}).encode(),
        b"[" * 100_000,
    ],
    ids=["empty", "null", "list", "binary", "short", "pid", "settings", "digest", "deep"],
)
def test_read_leaves_out_lines_that_make_no_sense(tmp_path: Path, line: bytes) -> None:
    (tmp_path / LAUNCHES_NAME).write_bytes(line + b"\n")
    append_launch_record(RECORD, tmp_path)

    assert read_launch_records(tmp_path) == (RECORD,)


def test_read_leaves_keys_of_a_later_version_alone(tmp_path: Path) -> None:
    later = {**json.loads(launches._format(RECORD)), "cgroup": "/system.slice"}
    (tmp_path / LAUNCHES_NAME).write_text(json.dumps(later) + "\n")

    assert read_launch_records(tmp_path) == (RECORD,)


def test_size_is_bounded_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MAX_FILE_BYTES", 4096)

    for pid in range(100):
        append_launch_record(replace(RECORD, pid=pid), tmp_path)

    pids = [record.pid for record in read_launch_records(tmp_path)]
    assert pids == list(range(pids[0], 100))
    assert len(pids) > 10
    for name in (LAUNCHES_NAME, OLDER_NAME):
        assert (tmp_path / name).stat().st_size < 6000


def test_a_record_with_an_endless_value_stays_one_line(tmp_path: Path) -> None:
    append_launch_record(replace(RECORD, kept={"NCCL_ALGO": "x" * 10**6}), tmp_path)

    (record,) = read_launch_records(tmp_path)
    assert record.kept["NCCL_ALGO"].startswith("xxx")
    assert (tmp_path / LAUNCHES_NAME).stat().st_size < 16 * 1024


def test_many_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    def write(first: int) -> None:
        for pid in range(first, first + 25):
            append_launch_record(replace(RECORD, pid=pid), tmp_path)

    threads = [threading.Thread(target=write, args=(100 * idx,)) for idx in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({record.pid for record in read_launch_records(tmp_path)}) == 100


def test_file_that_others_only_append_to_makes_room_and_is_still_read(tmp_path: Path) -> None:
    append_launch_record(replace(RECORD, pid=1), tmp_path)
    path = tmp_path / LAUNCHES_NAME
    make_room(tmp_path)
    assert path.exists()
    path.write_bytes(path.read_bytes() + b"\n" * (MAX_FILE_BYTES + 1))
    make_room(tmp_path)
    assert not path.exists()
    append_launch_record(replace(RECORD, pid=2), tmp_path)
    assert [record.pid for record in read_launch_records(tmp_path)] == [1, 2]


def test_append_where_nothing_can_be_written_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(FileError, match="cannot be written"):
        append_launch_record(RECORD, tmp_path / "file")


def test_append_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / LAUNCHES_NAME).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(FileError):
        append_launch_record(RECORD, tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_launches_that_are_handed_over_make_room_for_their_users_own_alone(tmp_path: Path) -> None:
    append_launch_record(RECORD, tmp_path)
    keep_handed_over(replace(RECORD, pid=7), 1000, tmp_path)
    for pid in range(100, 100 + 3 * MAX_OF_USER):
        keep_handed_over(replace(RECORD, pid=pid), 54321, tmp_path)

    found = read_launch_records(tmp_path)

    assert {(each.uid, each.pid) for each in found if each.uid != 54321} == {
        (None, RECORD.pid),
        (1000, 7),
    }
    assert [each.pid for each in found if each.uid == 54321] == list(
        range(100 + 2 * MAX_OF_USER, 100 + 3 * MAX_OF_USER)
    )


def test_a_launch_that_is_handed_over_twice_is_kept_once(tmp_path: Path) -> None:
    keep_handed_over(RECORD, 1000, tmp_path)
    keep_handed_over(replace(RECORD, route="hook"), 1000, tmp_path)

    assert [each.route for each in read_launch_records(tmp_path)] == ["hook"]


def test_launches_of_too_many_users_are_refused_and_none_is_lost(tmp_path: Path) -> None:
    for uid in range(MAX_USERS):
        keep_handed_over(RECORD, uid, tmp_path)

    with pytest.raises(BusyError, match="users are on record"):
        keep_handed_over(RECORD, MAX_USERS, tmp_path)
    assert len(read_launch_records(tmp_path)) == MAX_USERS


def test_a_record_cannot_say_itself_whose_it_is(tmp_path: Path) -> None:
    append_launch_record(replace(RECORD, uid=0), tmp_path)
    with (tmp_path / LAUNCHES_NAME).open("ab") as file:
        file.write(json.dumps({**asdict(RECORD), "uid": 5, "generation": "x"}).encode() + b"\n")

    assert [(each.uid, each.generation) for each in read_launch_records(tmp_path)] == [
        (None, 0)
    ] * 2


def test_a_record_notes_the_state_that_its_launch_met() -> None:
    save_candidate(Profile("mine", {"NCCL_ALGO": "allreduce:ring"}))
    activate("mine", reason="manual")
    append_launch_record(RECORD)
    activate("mine", reason="manual")
    append_launch_record(RECORD)

    assert [each.generation for each in read_launch_records()] == [1, 2]


def test_two_that_make_room_at_once_lose_no_file(tmp_path: Path) -> None:
    append_launch_record(RECORD, tmp_path)
    path = tmp_path / LAUNCHES_NAME
    # Both have found the file full before either has moved it.
    first, second = (os.open(path, os.O_RDWR | os.O_APPEND) for _ in range(2))
    launches._make_room(path, first)
    path.write_bytes(b"")
    launches._make_room(path, second)
    os.close(first)
    os.close(second)

    assert read_launch_records(tmp_path) == (RECORD,)


def test_a_file_that_cannot_be_made_room_in_takes_the_record_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MAX_FILE_BYTES", 200)
    with state_lock(tmp_path):
        for pid in range(5):
            append_launch_record(replace(RECORD, pid=pid), tmp_path)

    assert [each.pid for each in read_launch_records(tmp_path)] == [0, 1, 2, 3, 4]
