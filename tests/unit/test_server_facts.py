"""What is read of one server, from processes that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nccltune.inject.marker import format_marker
from nccltune.live.procfs import read_uid
from nccltune.live.scanner import Server, find_servers
from nccltune.live.server_facts import (
    conf_entries,
    find_record,
    read_boot_id,
    read_facts,
    redacted,
)
from nccltune.store import LaunchRecord
from tests.support.fake_proc import BOOT_ID, TICKS, FakeProc

MARK = format_marker("a" * 16, ["NCCL_ALGO"])
LAUNCH = ("python3", "-m", "sglang.launch_server", "--model-path", "m", "--tp", "2")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def record(pid: int = 100, **changes: object) -> LaunchRecord:
    facts: dict[str, object] = {
        "route": "run",
        "pid": pid,
        "started_ticks": TICKS,
        "boot_id": BOOT_ID,
        "launched_at": "2026-11-29T12:00:00+00:00",
        "command_digest": "c",
        "profile_name": "mine",
        "digest": "a" * 16,
    }
    return LaunchRecord(**{**facts, **changes})  # type: ignore[arg-type]


def only_server(proc: FakeProc) -> Server:
    [server] = find_servers(proc.root)
    return server


def test_read_facts_takes_each_ranks_own_mark(proc: FakeProc) -> None:
    other = format_marker("b" * 16, ["NCCL_PROTO"])
    proc.add(100, LAUNCH, environ={"NCCLTUNE_APPLIED": MARK})
    proc.add_rank(101, "TP0", parent=100, environ={"NCCLTUNE_APPLIED": other})
    proc.add_rank(102, "TP1", parent=100, environ={"A": "1"})

    facts = read_facts(only_server(proc), (), proc.root)

    assert {pid: marker.digest[0] for pid, marker in facts.markers.items()} == {101: "b", 0: "a"}


def test_read_facts_of_ranks_that_cannot_be_read_take_the_mark_they_inherited(
    proc: FakeProc,
) -> None:
    proc.add(100, LAUNCH, environ={"NCCLTUNE_APPLIED": MARK})
    proc.add_rank(101, "TP0", parent=100)

    facts = read_facts(only_server(proc), (), proc.root)

    assert facts.markers[101].digest == "a" * 16
    assert facts.environs[101].values is None


def test_read_facts_of_a_launch_that_makes_no_sense_go_without_it(proc: FakeProc) -> None:
    proc.add(100, (*LAUNCH, "--tp", "zero"))

    facts = read_facts(only_server(proc), (), proc.root)

    assert facts.command is None
    assert facts.argv


def test_read_facts_read_a_config_file_where_the_server_sees_it(
    proc: FakeProc, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "server.yaml").write_text("tp-size: 8\n", encoding="utf-8")
    relative = ("python3", "-m", "sglang.launch_server", "--config", "server.yaml")
    proc.add(100, relative, links={"cwd": inside})
    absolute = ("python3", "-m", "sglang.launch_server", "--config", "/no/server.yaml")
    proc.add(200, absolute, links={"root": inside})
    (inside / "no").mkdir()
    (inside / "no/server.yaml").write_text("tp-size: 4\n", encoding="utf-8")

    sizes = [read_facts(each, (), proc.root).command for each in find_servers(proc.root)]

    assert [command.tp_size for command in sizes if command] == [8, 4]


def test_read_facts_name_the_interpreter_as_it_was_called(proc: FakeProc, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    proc.add(100, (str(python), *LAUNCH[1:]))

    assert read_facts(only_server(proc), (), proc.root).python == str(python)


def test_read_facts_name_no_interpreter_that_is_another_file_here(
    proc: FakeProc, tmp_path: Path
) -> None:
    other = tmp_path / "another-python3"
    other.write_bytes(b"")
    proc.add(100, (sys.executable, *LAUNCH[1:]), links={"exe": other})
    proc.add(200, LAUNCH, links={"exe": Path("/nowhere")})

    pythons = [read_facts(each, (), proc.root).python for each in find_servers(proc.root)]

    assert pythons == [str(other), None]


def test_find_record_takes_the_newest_of_this_very_process(proc: FakeProc) -> None:
    proc.add(100, LAUNCH)
    root = only_server(proc).root
    assert root is not None
    records = [
        record(route="run"),
        record(route="hook"),
        record(started_ticks=TICKS + 1),
        record(boot_id="another boot"),
        record(pid=101),
    ]

    found = find_record(root, records, proc.root)

    assert found is not None
    assert found.route == "hook"
    assert find_record(root, records[2:], proc.root) is None


def test_find_record_of_a_container_goes_by_the_number_inside(proc: FakeProc) -> None:
    proc.add(100, LAUNCH, numbers=(7,))
    root = only_server(proc).root
    assert root is not None

    assert find_record(root, [record(pid=7)], proc.root) is not None


def test_read_boot_id_and_uid_that_are_hidden_are_unknown(tmp_path: Path) -> None:
    assert read_boot_id(tmp_path) == ""
    assert read_uid(100, tmp_path) is None


def test_conf_entries_are_those_of_the_rank_in_its_own_root(proc: FakeProc, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "etc").mkdir(parents=True)
    (inside / "home/u").mkdir(parents=True)
    (inside / "etc/nccl.conf").write_text("NCCL_ALGO=Ring\nNCCL_PROTO=LL\n", encoding="utf-8")
    (inside / "home/u/.nccl.conf").write_text("NCCL_ALGO=Tree\n", encoding="utf-8")
    (inside / "own.conf").write_text("NCCL_NTHREADS=64\n", encoding="utf-8")
    proc.add(100, LAUNCH)
    for pid, environ in (
        (101, {"HOME": "/home/u", "NCCL_PROTO": "Simple"}),
        (102, {"NCCL_CONF_FILE": "/own.conf"}),
    ):
        proc.add_rank(pid, f"TP{pid - 101}", parent=100, environ=environ, links={"root": inside})

    facts = read_facts(only_server(proc), (), proc.root)
    first, second = conf_entries(facts, 101), conf_entries(facts, 102)

    assert {name: (each.value, each.path) for name, each in first.items()} == {
        "NCCL_ALGO": ("Tree", "/home/u/.nccl.conf")
    }
    assert second["NCCL_NTHREADS"].path == "/own.conf"
    assert second["NCCL_PROTO"].path == "/etc/nccl.conf"


def test_conf_entries_of_a_rank_that_cannot_be_read_are_none(proc: FakeProc) -> None:
    proc.add(100, LAUNCH)
    proc.add_rank(101, "TP0", parent=100)

    assert conf_entries(read_facts(only_server(proc), (), proc.root), 101) == {}


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "abc", "--tp", "8"], ["--api-key", "***", "--tp", "8"]),
        (["--admin-api-key=abc"], ["--admin-api-key=***"]),
        (["--hf-token", "abc"], ["--hf-token", "***"]),
        (["--ssl-keyfile-password", "abc"], ["--ssl-keyfile-password", "***"]),
        (["env", "HF_TOKEN=abc", "sglang"], ["env", "HF_TOKEN=***", "sglang"]),
        (["--max-total-tokens", "8192"], ["--max-total-tokens", "8192"]),
        (["--speculative-token-map", "/m.pt"], ["--speculative-token-map", "/m.pt"]),
        (["--speculative-token-map=/m.pt"], ["--speculative-token-map=/m.pt"]),
        (["--token-map", "abc"], ["--token-map", "***"]),
        (["--api-key", "--tp", "8"], ["--api-key", "--tp", "8"]),
    ],
    ids=[
        "word",
        "equals",
        "token",
        "password",
        "variable",
        "tokens",
        "path",
        "path_equals",
        "unknown_map",
        "no_value",
    ],
)
def test_redacted_hides_values_of_flags_that_name_a_secret(
    argv: list[str], shown: list[str]
) -> None:
    assert list(redacted(argv)) == shown
