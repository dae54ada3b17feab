"""Servers and ranks among processes of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.live.scanner import MAX_SERVERS_OF_USER, ServerScanner, find_servers, is_launch
from tests.support.fake_proc import FakeProc

VENV = "/opt/venv/bin"
SERVE = (f"{VENV}/python3", f"{VENV}/sglang", "serve", "--model-path", "/m", "--tp", "2")
MODULE = ("python", "-m", "sglang.launch_server", "--model-path", "/m")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc.with_init(tmp_path)


def test_find_servers_groups_ranks_by_the_process_that_started_them(proc: FakeProc) -> None:
    proc.add(100, SERVE)
    proc.add_rank(102, "TP1", parent=100)
    proc.add_rank(101, "TP0", parent=100)
    proc.add(103, ["sglang::detokenizer"], parent=100)
    proc.add(200, MODULE)
    proc.add_rank(201, "", parent=200)

    first, second = find_servers(proc.root)

    assert (first.pid, first.is_launch) == (100, True)
    assert [(rank.name, rank.process.pid) for rank in first.ranks] == [("TP0", 101), ("TP1", 102)]
    assert [rank.name for rank in second.ranks] == ["scheduler"]


def test_find_servers_orders_ranks_by_their_number(proc: FakeProc) -> None:
    proc.add(100, SERVE)
    for idx in (10, 9, 2):
        proc.add_rank(100 + idx, f"TP{idx}", parent=100)

    [server] = find_servers(proc.root)

    assert [rank.name for rank in server.ranks] == ["TP2", "TP9", "TP10"]


def test_find_servers_behind_a_data_parallel_controller_finds_the_launcher(proc: FakeProc) -> None:
    proc.add(100, MODULE)
    proc.add(101, ["sglang::data_parallel_controller"], parent=100)
    proc.add_rank(102, "DP0_TP0", parent=101)

    [server] = find_servers(proc.root)

    assert server.pid == 100
    assert server.ranks[0].name == "DP0_TP0"


def test_find_servers_without_ranks_yet_has_a_server_that_starts(proc: FakeProc) -> None:
    proc.add(100, MODULE)

    [server] = find_servers(proc.root)

    assert server.root is not None
    assert server.ranks == ()


def test_find_servers_whose_launcher_is_gone_have_no_root(proc: FakeProc) -> None:
    proc.add_rank(101, "TP0", parent=1, session=90)
    proc.add_rank(102, "TP1", parent=1, session=90)
    proc.add_rank(201, "TP0", parent=1, session=190)

    first, second = find_servers(proc.root)

    assert first.root is None
    assert [rank.process.pid for rank in first.ranks] == [101, 102]
    assert second.pid == 201


@pytest.mark.parametrize("has_words", [True, False])
def test_find_servers_takes_no_rank_that_is_ending_for_a_server(
    proc: FakeProc, *, has_words: bool
) -> None:
    proc.add_rank(101, "TP0", parent=1)
    proc.begin_to_end(101, has_words=has_words)

    assert find_servers(proc.root) == ()


def test_find_servers_whose_controller_is_ending_takes_it_for_no_launcher(proc: FakeProc) -> None:
    proc.add(100, MODULE)
    proc.add(101, ["sglang::data_parallel_controller"], parent=100)
    proc.add_rank(102, "DP0_TP0", parent=101, session=90)
    proc.begin_to_end(101)

    assert [server.root and server.root.pid for server in find_servers(proc.root)] == [100, None]


def test_find_servers_with_the_launcher_as_first_process_of_a_container(proc: FakeProc) -> None:
    proc.add(1, MODULE, parent=0)
    proc.add_rank(20, "TP0", parent=1)

    [server] = find_servers(proc.root)

    assert server.pid == 1
    assert server.is_launch


def test_find_servers_started_by_another_program_name_it(proc: FakeProc) -> None:
    proc.add(100, ["python3", "offline_engine.py"])
    proc.add_rank(101, "TP0", parent=100)

    [server] = find_servers(proc.root)

    assert server.pid == 100
    assert not server.is_launch


@pytest.mark.parametrize(
    "argv",
    [
        ("python3", "/usr/bin/nccltune", "launch", "--", *MODULE),
        ("python3", "/usr/bin/nccltune", "search", "--", "sglang", "serve", "--tp", "2"),
        ("timeout", "900", *MODULE),
        ("tini", "--", *SERVE),
        ("bash", "-c", "python -m sglang.launch_server --tp 2"),
        ("vim", "sglang/launch_server.txt"),
        ("python3", "-m", "pytest", "tests/sglang"),
        ("grep", "sglang"),
    ],
    ids=["launch", "search", "timeout", "tini", "shell", "editor", "pytest", "grep"],
)
def test_find_servers_takes_no_program_that_only_names_sglang(
    proc: FakeProc, argv: tuple[str, ...]
) -> None:
    proc.add(100, argv)

    assert find_servers(proc.root) == ()


def test_find_servers_behind_a_wrapper_takes_the_server_alone(proc: FakeProc) -> None:
    proc.add(100, ("timeout", "900", *MODULE))
    proc.add(101, MODULE, parent=100)

    assert [server.pid for server in find_servers(proc.root)] == [101]


def test_find_servers_takes_no_child_between_fork_and_exec(proc: FakeProc) -> None:
    proc.add(100, MODULE)
    proc.add(101, MODULE, parent=100)

    assert [server.pid for server in find_servers(proc.root)] == [100]


@pytest.mark.parametrize(
    ("argv", "is_one"),
    [
        (MODULE, True),
        (SERVE, True),
        (("/usr/bin/python3.12", "-u", "-X", "dev", "-m", "sglang.launch_server"), True),
        (("python3", "-msglang.launch_server", "--tp", "2"), True),
        (("python3", "/src/sglang/launch_server.py"), True),
        (("sglang", "serve"), True),
        (("sglang", "version"), False),
        (("python3", "wrapper.py", "-m", "sglang.launch_server"), False),
        ((), False),
    ],
    ids=str,
)
def test_is_launch_wants_sglang_itself(argv: tuple[str, ...], is_one: bool) -> None:
    assert is_launch(argv) is is_one


def test_scanner_finds_a_process_that_becomes_sglang_later(proc: FakeProc) -> None:
    scanner = ServerScanner(proc.root)
    proc.add(100, ["bash", "start.sh"])
    assert scanner.scan() == ()
    proc.add(100, MODULE)

    assert [server.pid for server in scanner.scan()] == [100]


def test_scanner_leaves_old_processes_alone_but_in_a_full_scan(proc: FakeProc) -> None:
    scanner = ServerScanner(proc.root, young_scans=2, full_scans=5)
    proc.add(100, ["bash", "start.sh"])
    for _ in range(3):
        scanner.scan()
    proc.add(100, MODULE)

    found = [bool(scanner.scan()) for _ in range(3)]

    assert found == [False, False, True]


def test_scanner_knows_a_launch_by_its_ranks_however_late_it_became_one(proc: FakeProc) -> None:
    scanner = ServerScanner(proc.root, young_scans=2, full_scans=1000)
    proc.add(100, ["bash", "start.sh"])
    for _ in range(3):
        scanner.scan()
    proc.add(100, MODULE)
    proc.add_rank(101, "TP0", parent=100)

    found = [[(each.pid, each.is_launch) for each in scanner.scan()] for _ in range(3)]

    assert found == [[(100, True)]] * 3


def test_scanner_forgets_processes_that_are_gone(proc: FakeProc) -> None:
    scanner = ServerScanner(proc.root, young_scans=1, full_scans=1000)
    proc.add(100, ["bash"])
    scanner.scan()
    scanner.scan()
    proc.remove(100)
    scanner.scan()
    proc.add(100, MODULE)

    assert [server.pid for server in scanner.scan()] == [100]


def test_scanner_sees_a_server_end(proc: FakeProc) -> None:
    scanner = ServerScanner(proc.root)
    proc.add(100, MODULE)
    assert scanner.scan()
    proc.remove(100)

    assert scanner.scan() == ()


def test_command_line_that_is_longer_than_a_servers_is_none(proc: FakeProc) -> None:
    proc.add(100, [*MODULE, "--model-path", "x" * 40_000])

    assert find_servers(proc.root) == ()


def test_scan_looks_at_so_many_servers_of_one_user_and_at_all_others(proc: FakeProc) -> None:
    for number in range(MAX_SERVERS_OF_USER + 5):
        proc.add(100 + number, MODULE, ticks=1000 - number)

    found = find_servers(proc.root)

    assert len(found) == MAX_SERVERS_OF_USER
    assert min(server.pid for server in found) == 105  # the oldest stay
