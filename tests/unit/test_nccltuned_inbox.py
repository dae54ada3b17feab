"""Records of launches that come from others."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nccltune.live.launch_inbox as launch_inbox
from nccltune.errors import FileError
from nccltune.live.launch_inbox import (
    INBOX_NAME,
    MAX_MESSAGE_BYTES,
    format_message,
    parse_message,
    put_on_record,
)
from nccltune.paths import state_dir
from nccltune.store import LaunchRecord, read_launch_records
from nccltuned.inbox import MAX_PER_MINUTE, Inbox, _Sender
from tests.support.fake_proc import BOOT_ID, TICKS, FakeProc

RECORD = LaunchRecord(
    route="run",
    pid=100,
    started_ticks=TICKS,
    boot_id=BOOT_ID,
    launched_at="2026-11-29T12:00:00+00:00",
    command_digest="c",
    profile_name="mine",
    digest="a" * 16,
    settings={"NCCL_ALGO": "allreduce:ring"},
    kept={"NCCL_PROTO": "LL"},
)


@pytest.fixture
def inbox(tmp_path: Path) -> object:
    proc = FakeProc(tmp_path)
    proc.add(100, ["python3", "-m", "sglang.launch_server"])
    found = Inbox(tmp_path / INBOX_NAME, proc.root)
    found.open()
    yield found
    found.close()


def send(inbox: Inbox, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message, str(inbox.path))


def refuse(_record: LaunchRecord) -> None:
    raise FileError("launches.jsonl", "cannot be written (Permission denied)")


def test_put_on_record_writes_into_the_store_where_it_may(tmp_path: Path) -> None:
    put_on_record(RECORD, {"NCCLTUNE_RUN_DIR": str(tmp_path)})

    assert read_launch_records(state_dir()) == (RECORD,)


def test_put_on_record_hands_it_to_the_service_where_it_may_not(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_inbox, "append_launch_record", refuse)

    put_on_record(RECORD, {"NCCLTUNE_RUN_DIR": str(inbox.path.parent)})

    assert list(inbox.take()) == [replace(RECORD, kept={"NCCL_PROTO": ""}, uid=os.geteuid())]
    assert list(inbox.take()) == []


def test_put_on_record_that_reaches_nobody_is_the_stores_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_inbox, "append_launch_record", refuse)

    with pytest.raises(FileError, match="Permission denied"):
        put_on_record(RECORD, {"NCCLTUNE_RUN_DIR": str(tmp_path)})


def test_message_survives_the_way_there_and_back() -> None:
    record = replace(RECORD, kept={}, profile_name=None, digest=None, settings={})
    message = format_message(record)

    assert message is not None
    assert parse_message(message) == record


def test_message_that_is_too_large_is_none() -> None:
    assert format_message(replace(RECORD, settings={"NCCL_ALGO": "x" * 20_000})) is None


def test_message_leaves_words_for_people_out_before_it_grows_too_large() -> None:
    many = {f"NCCL_VARIABLE_{number}": "" for number in range(80)}
    for record in (replace(RECORD, reason="x" * 20_000), replace(RECORD, kept=many)):
        message = format_message(record)
        assert message is not None
        assert len(message) <= MAX_MESSAGE_BYTES
        found = parse_message(message)
        assert found is not None
        assert (found.settings, found.pid) == (RECORD.settings, RECORD.pid)


def test_message_says_nothing_that_is_the_services_to_say() -> None:
    message = format_message(replace(RECORD, kept={}, uid=0, generation=7))

    assert message is not None
    assert parse_message(message) == replace(RECORD, kept={})


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 5000,
        (format_message(RECORD) or b"").replace(b'"pid":100', b'"pid":"100"'),
        (format_message(RECORD) or b"").replace(b'"pid":100', b'"pid":true'),
        (format_message(RECORD) or b"").replace(b'"pid":100', b'"pid":-1'),
        (format_message(RECORD) or b"").replace(b'"mine"', b"7"),
        (format_message(RECORD) or b"").replace(b'"allreduce:ring"', b"7"),
        (format_message(RECORD) or b"").replace(b'"route":"run",', b""),
    ],
    ids=[
        *("empty", "no_text", "list", "nothing", "deep"),
        *("pid_text", "pid_flag", "pid_negative", "name", "settings", "no_route"),
    ],
)
def test_inbox_takes_nothing_else_for_a_record(inbox: Inbox, message: bytes) -> None:
    send(inbox, message)

    assert list(inbox.take()) == []


def test_inbox_takes_no_message_that_was_cut(inbox: Inbox) -> None:
    send(inbox, (format_message(RECORD) or b"") + b" " * 20_000)

    assert list(inbox.take()) == []


@pytest.mark.parametrize(
    ("sender", "owner", "is_taken"),
    [(1000, 1000, True), (1000, 0, False), (1000, 1001, False), (0, 1001, True)],
    ids=["own", "roots", "another", "by_root"],
)
def test_inbox_lets_users_speak_for_their_own_processes_alone(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, sender: int, owner: int, is_taken: bool
) -> None:
    monkeypatch.setattr("nccltuned.inbox._sender_of", lambda _: _Sender(50, sender))
    monkeypatch.setattr("nccltuned.inbox.read_uid", lambda *_: owner)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    send(inbox, format_message(RECORD) or b"")

    assert [record.uid for record in inbox.take()] == ([sender] if is_taken else [])


@pytest.mark.parametrize(
    "changes",
    [{"pid": 4242}, {"started_ticks": TICKS + 1}, {"boot_id": "another"}],
    ids=["nobody", "later", "boot"],
)
def test_inbox_takes_no_record_of_a_process_that_is_not_there(
    inbox: Inbox, changes: dict[str, Any]
) -> None:
    send(inbox, format_message(replace(RECORD, **changes)) or b"")

    assert list(inbox.take()) == []


def test_inbox_finds_a_process_in_a_container_by_its_number_there(inbox: Inbox) -> None:
    proc = FakeProc.at(inbox.root)
    proc.add(os.getpid(), ["nccltune", "launch"], ticks=1)
    proc.add(900, ["sglang", "serve"], parent=os.getpid(), ticks=TICKS + 9, numbers=(7,))
    send(inbox, format_message(replace(RECORD, pid=7, started_ticks=TICKS + 9)) or b"")

    assert [record.pid for record in inbox.take()] == [7]


def test_inbox_takes_so_many_a_minute_and_no_more(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [600.0]
    monkeypatch.setattr("nccltuned.inbox.time.monotonic", lambda: now_s[0])

    def take(count: int) -> int:
        taken = 0
        for _ in range(count):
            send(inbox, format_message(RECORD) or b"")
            taken += len(list(inbox.take()))
        return taken

    assert take(MAX_PER_MINUTE + 5) == MAX_PER_MINUTE
    now_s[0] += 60.0
    assert take(1) == 1


def test_inbox_that_is_closed_is_gone(inbox: Inbox) -> None:
    inbox.close()

    assert inbox.descriptor == -1
    assert not inbox.path.exists()
    assert list(inbox.take()) == []


def test_inbox_takes_the_place_of_one_that_a_dead_service_left(tmp_path: Path) -> None:
    path = tmp_path / INBOX_NAME
    path.write_text("", encoding="utf-8")
    inbox = Inbox(path)

    inbox.open()

    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o666
    inbox.close()
