"""Children that have their parent's words, and are no ranks and no servers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nccltune.live import procfs
from nccltune.live.procfs import read_process
from nccltune.live.scanner import Server, find_servers
from tests.support.fake_proc import FORKED, FakeProc

MODULE = ("python", "-m", "sglang.launch_server", "--model-path", "/m")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc.with_init(tmp_path)


def pids_of(servers: tuple[Server, ...]) -> set[int]:
    """Return every process that was taken for a server or a rank."""
    ranks = {rank.process.pid for server in servers for rank in server.ranks}
    return ranks | {server.root.pid for server in servers if server.root is not None}


def at_read(
    monkeypatch: pytest.MonkeyPatch, number: int, event: Callable[[], None]
) -> Callable[[], int]:
    """Let something happen just before a read, and return what counts the reads."""
    real, count = procfs._read, 0

    def read(*args: object) -> bytes | None:
        nonlocal count
        if count == number:
            event()
        count += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(procfs, "_read", read)
    return lambda: count


CHILD = 110


def _exec(proc: FakeProc, parent: int) -> None:
    proc.add(CHILD, ["nvidia-smi", "-L"], parent=parent)


def _begin_exec(proc: FakeProc, _parent: int) -> None:
    proc.begin_exec(CHILD)


def _end(proc: FakeProc, _parent: int) -> None:
    proc.remove(CHILD)


def _lose_parent(proc: FakeProc, parent: int) -> None:
    proc.remove(parent)
    add_copy(proc, parent, adopted_by=1, flags=FORKED)


def add_copy(proc: FakeProc, of: int, *, adopted_by: int = 0, flags: int) -> None:
    """Add a child of a rank or of a launch, as it is from its fork on."""
    if of == 100:
        proc.add(CHILD, MODULE, parent=adopted_by or of, flags=flags)
    else:
        proc.add_rank(CHILD, "TP1", parent=adopted_by or of, flags=flags)


@pytest.mark.parametrize("of", [100, 102], ids=["launch", "rank"])
@pytest.mark.parametrize(
    ("change", "flags"),
    [
        *((change, flags) for change in (_exec, _begin_exec, _end) for flags in (0, FORKED)),
        (_lose_parent, FORKED),
    ],
)
def test_find_servers_takes_no_child_for_its_parent_whenever_it_calls_exec(
    proc: FakeProc,
    monkeypatch: pytest.MonkeyPatch,
    of: int,
    change: Callable[[FakeProc, int], None],
    flags: int,
) -> None:
    number = read_count = 0
    while number <= read_count:
        proc.add(100, MODULE)
        proc.add_rank(101, "TP0", parent=100)
        proc.add_rank(102, "TP1", parent=100)
        add_copy(proc, of, flags=flags)
        with monkeypatch.context() as patch:
            count = at_read(patch, number, lambda: change(proc, of))

            found = pids_of(find_servers(proc.root))

            read_count = count()
        assert CHILD not in found, f"at read {number}"
        assert {100, 101, 102} - {of} <= found
        number += 1
    assert read_count > 10


@pytest.mark.parametrize("flags", [0, FORKED])
def test_find_servers_takes_no_child_that_never_calls_exec_for_a_rank(
    proc: FakeProc, flags: int
) -> None:
    proc.add(100, MODULE)
    proc.add_rank(101, "TP0", parent=100)
    proc.add_rank(102, "TP0", parent=101, flags=flags)
    proc.add_rank(103, "TP0", parent=102, flags=flags)

    assert pids_of(find_servers(proc.root)) == {100, 101}


def test_find_servers_takes_no_child_for_what_it_has_outlived(proc: FakeProc) -> None:
    proc.add(100, MODULE, parent=1, flags=FORKED)
    proc.add_rank(101, "TP0", parent=1, flags=FORKED)

    assert find_servers(proc.root) == ()


def test_find_servers_restored_from_a_checkpoint_are_there(proc: FakeProc) -> None:
    proc.add(50, ["tini", "--", *MODULE])
    proc.add(100, MODULE, parent=50, flags=FORKED)
    proc.add_rank(101, "TP0", parent=100, flags=FORKED)

    [server] = find_servers(proc.root)

    assert (server.pid, server.is_launch, len(server.ranks)) == (100, True, 1)


def test_find_servers_whose_ranks_were_forked_by_another_program_name_it(proc: FakeProc) -> None:
    proc.add(100, ["python3", "offline_engine.py"])
    proc.add_rank(101, "TP0", parent=100, flags=FORKED)

    assert pids_of(find_servers(proc.root)) == {100, 101}


FORK_AND_WAIT = "(echo $BASHPID; read -r _) <&0 & wait"
"""For bash, whose subshells are forks that call no exec."""


@pytest.mark.parametrize(
    "words",
    [
        # A title, then bash's own option; an option of bash as well, then the name of a script.
        ("sglang::scheduler_TP0", "-c", FORK_AND_WAIT),
        ("python3", "-m", "sglang.launch_server"),
    ],
    ids=["rank", "launch"],
)
def test_find_servers_tells_a_real_child_from_its_parent(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "sglang.launch_server").write_text(FORK_AND_WAIT, encoding="utf-8")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, executable="/bin/bash", cwd=tmp_path, stdin=pipe, stdout=pipe
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())

        found, copy, original = find_servers(), read_process(child), read_process(parent.pid)

        assert copy is not None
        assert original is not None
        assert copy.argv == original.argv
        assert (copy.is_fork, original.is_fork) == (True, False)
        assert pids_of(found) & {parent.pid, child} == {parent.pid}
        parent.kill()
        parent.wait()
        # A rank's could be adopted by something that would pass for what started it.
        assert words[0].startswith("sglang") or child not in pids_of(find_servers())
