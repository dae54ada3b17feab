from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.errors import FileError
from nccltune.store import LaunchRecord, append_launch_record, launches, read_launch_records
from nccltune.store.launches import LAUNCHES_NAME, OLDER_NAME

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


def test_append_where_nothing_can_be_written_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(FileError, match="cannot be written"):
        append_launch_record(RECORD, tmp_path / "file")


def test_append_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / LAUNCHES_NAME).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(FileError):
        append_launch_record(RECORD, tmp_path)
    assert not (tmp_path / "elsewhere").exists()
