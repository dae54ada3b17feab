"""Logs that several servers write, at once or one after the other: whose words are whose."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nccltune.live.failed_starts import Ending
from nccltuned.judging import WARM_S
from nccltuned.log_file import _OVERLAP_BYTES
from tests.support.fake_proc import FakeProc
from tests.support.followed import (
    ARGS,
    ARGV,
    DIED_IN_NCCL,
    INVOCATION,
    READY,
    Host,
    append,
)

OTHER = ("sglang", "serve", "--model-path", "/other", "--port", "30124")
TRUNCATED, APPENDING = os.O_WRONLY, os.O_WRONLY | os.O_APPEND
FLAGS = pytest.mark.parametrize("flags", [TRUNCATED, APPENDING], ids=["cut", "appended"])
BY_ANOTHER = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1\n"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(FakeProc(tmp_path), tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "shared.log"
    found.touch()
    return found


def start(
    host: Host,
    pid: int,
    argv: tuple[str, ...],
    path: Path,
    flags: int = TRUNCATED,
    *,
    parent: int = 1,
) -> None:
    host.proc.add(pid, argv, parent=parent, ticks=host.ticks + pid)
    host.proc.write_to(pid, path, flags=flags)


def endings(host: Host) -> dict[int, Ending]:
    return {start.pid: start.ending for start in host.ended}


@FLAGS
@pytest.mark.parametrize("is_first_to_die", [True, False])
def test_neither_of_two_servers_that_write_one_log_is_judged_by_it(
    host: Host, path: Path, flags: int, *, is_first_to_die: bool
) -> None:
    start(host, 100, ARGV, path, flags)
    host.look()
    append(path, ARGS)
    host.look()
    start(host, 101, OTHER, path, flags)
    host.look()
    append(path, f"{ARGS}{DIED_IN_NCCL}")
    host.look()
    for pid in (100, 101) if is_first_to_die else (101, 100):
        host.proc.remove(pid)
        host.look()

    assert endings(host) == {100: Ending.UNKNOWN, 101: Ending.UNKNOWN}


@FLAGS
def test_no_server_is_ready_by_the_words_of_another(host: Host, path: Path, flags: int) -> None:
    start(host, 100, ARGV, path, flags)
    start(host, 101, OTHER, path, flags)
    host.proc.listen(100, 30123)
    host.look()
    append(path, f"{ARGS}{ARGS}{READY}")
    host.look()
    assert host.ended == []
    host.now_s += WARM_S  # as any server without a log
    host.look()
    host.proc.remove(101)
    host.look()

    assert endings(host) == {100: Ending.READY, 101: Ending.UNKNOWN}


@pytest.mark.parametrize("is_restarted", [False, True], ids=["", "service_restarted"])
def test_log_that_a_server_in_service_writes_as_well_tells_nothing_of_a_start(
    host: Host, path: Path, *, is_restarted: bool
) -> None:
    start(host, 100, ARGV, path, APPENDING)
    host.proc.listen(100, 30123)
    host.look()
    append(path, READY)
    host.look()
    if is_restarted:
        host = Host(host.proc, host.folder, ended=host.ended)
        host.look()
    start(host, 101, OTHER, path, APPENDING)
    host.look()
    append(path, f"{ARGS}{BY_ANOTHER}")
    host.proc.remove(101)
    host.look()

    assert endings(host) == {100: Ending.READY, 101: Ending.UNKNOWN}


def test_servers_behind_one_program_that_writes_the_log_are_not_judged_by_it(
    host: Host, path: Path
) -> None:
    host.proc.add(90, ("both.py", *ARGV), ticks=host.ticks)
    host.proc.write_to(90, path)
    for pid in (100, 101):
        host.proc.add(pid, ARGV, parent=90, ticks=host.ticks + pid)
    host.look()
    append(path, f"{ARGS}{ARGS}{DIED_IN_NCCL}")
    host.proc.remove(100, 101)
    host.look()

    assert endings(host) == {100: Ending.UNKNOWN, 101: Ending.UNKNOWN}


def test_servers_of_one_unit_are_not_judged_by_its_journal(host: Host) -> None:
    status = host.folder.stat()
    stream = f"{status.st_dev}:{status.st_ino}"
    environ = {"INVOCATION_ID": INVOCATION, "JOURNAL_STREAM": stream}
    host.journal[INVOCATION] = DIED_IN_NCCL
    for pid in (100, 101):
        host.proc.add(pid, ARGV, ticks=host.ticks + pid, environ=environ)
        host.proc.write_to(pid, host.folder)  # a place that is no file, as a socket is none
    host.look()
    host.proc.remove(100, 101)
    host.look()

    assert endings(host) == {100: Ending.UNKNOWN, 101: Ending.UNKNOWN}


def test_log_that_another_server_only_reads_stays_that_of_one(host: Host, path: Path) -> None:
    start(host, 100, ARGV, path)
    start(host, 101, OTHER, path, os.O_RDONLY)
    host.look()
    append(path, f"{ARGS}{DIED_IN_NCCL}")
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.NCCL}


@FLAGS
def test_last_words_of_an_earlier_server_are_not_those_of_the_next(
    host: Host, path: Path, flags: int
) -> None:
    start(host, 100, ARGV, path, flags)
    host.look()
    append(path, f"{ARGS}CUDA out of memory\n")
    host.proc.remove(100)
    host.look()
    start(host, 101, ARGV, path, flags)
    host.look()
    append(path, BY_ANOTHER)  # a rank of the first
    host.look()
    append(path, ARGS)
    host.look()
    append(path, "ValueError: There is no safetensors file in /m\n")
    host.proc.remove(101)
    host.look()

    assert endings(host) == {100: Ending.MEMORY, 101: Ending.FAILED}


SOURCE_LINES = [
    "    self.tp_worker = TpModelWorker(server_args=server_args, gpu_id=gpu_id)\n",
    "    _launch_subprocesses(server_args=server_args)\n",
    "        server_args=server_args,\n",
    "    check(server_args=ServerArgs(port=1))\n",
]


@FLAGS
@pytest.mark.parametrize("line", SOURCE_LINES)
@pytest.mark.parametrize("is_seen_apart", [True, False])
def test_no_source_line_begins_a_start_anew(
    host: Host, path: Path, flags: int, line: str, *, is_seen_apart: bool
) -> None:
    start(host, 100, ARGV, path, flags)
    host.look()
    for text in (ARGS, "CUDA out of memory\n", line, BY_ANOTHER):
        append(path, text)
        if is_seen_apart:
            host.look()
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.MEMORY}


def test_words_in_the_middle_of_a_line_are_not_arguments_where_a_look_begins_there(
    host: Host, path: Path
) -> None:
    start(host, 100, ARGV, path)
    host.look()
    append(path, "CUDA out of memory\n    check(")
    host.look()
    words = "server_args=ServerArgs("
    append(path, words.ljust(_OVERLAP_BYTES, "y"))
    host.look()
    append(path, f"\n{BY_ANOTHER}")
    host.look()
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.MEMORY}


def test_first_arguments_alone_are_those_of_a_start_as_long_as_it_lives(
    host: Host, path: Path
) -> None:
    start(host, 100, ARGV, path)
    host.look()
    for text in (f"{ARGS}{DIED_IN_NCCL}", f"{ARGS}ValueError: of something else\n"):
        append(path, text)
        host.look()
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.NCCL}


@pytest.mark.parametrize("has_args", [True, False], ids=["begun", "died_before"])
def test_service_that_comes_late_to_a_loop_reads_nothing_of_an_earlier_start(
    host: Host, path: Path, *, has_args: bool
) -> None:
    append(path, f"{ARGS}{DIED_IN_NCCL}")  # of a start that nobody saw
    start(host, 100, ARGV, path)
    host.look()
    append(path, f"{ARGS if has_args else ''}ValueError: something\n")
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.FAILED}


def args_at(moment_s: float) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment_s))
    return f"[{clock}] server_args=ServerArgs(port=30123)\n"


@FLAGS
@pytest.mark.parametrize("age_s", [5, 500])
def test_arguments_that_a_start_has_printed_before_it_was_seen_are_known_by_their_time(
    host: Host, path: Path, flags: int, age_s: int
) -> None:
    now_s = time.time()
    append(path, f"{args_at(now_s - age_s - 60.0)}{BY_ANOTHER}")
    append(path, f"{args_at(now_s - age_s + 4.0)}{READY}")
    append(path, "    again(server_args=ServerArgs(port=1))\n")
    ticks = host.ticks - age_s * os.sysconf("SC_CLK_TCK")
    host.proc.add(100, ARGV, ticks=ticks)
    host.proc.write_to(100, path, flags=flags)
    host.proc.listen(100, 30123)
    host.look()

    assert endings(host) == {100: Ending.READY}


@pytest.mark.parametrize("shift_s", [-60.0, -3600.0, 3600.0], ids=["earlier", "west", "east"])
def test_arguments_of_another_time_are_not_taken_for_those_of_a_start(
    host: Host, path: Path, shift_s: float
) -> None:
    append(path, f"{args_at(time.time() + shift_s)}{DIED_IN_NCCL}")
    start(host, 100, ARGV, path)
    host.look()
    append(path, "ValueError: something\n")
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.FAILED}


@pytest.mark.parametrize(
    ("has_args", "has_successor"), [(True, True), (True, False), (False, True)]
)
def test_log_that_is_cut_for_a_start_with_the_same_first_words_tells_nothing(
    host: Host, path: Path, *, has_args: bool, has_successor: bool
) -> None:
    words = "nccltune: profile mine is applied\n" * 100  # as run writes them for every start
    append(path, words)
    start(host, 100, ARGV, path)
    host.look()
    if has_args:
        append(path, ARGS)
        host.look()
    host.proc.remove(100)
    path.write_text(f"{words}{ARGS.replace('09', '39')}{DIED_IN_NCCL}", encoding="utf-8")
    if has_successor:
        start(host, 101, ARGV, path)
    host.tracker.step()

    assert endings(host) == {100: Ending.UNKNOWN}


def test_log_that_is_cut_before_the_first_look_tells_nothing(host: Host, path: Path) -> None:
    append(path, f"{ARGS}one\n")
    start(host, 100, ARGV, path)
    host.look()
    path.write_text(f"{ARGS.replace('09', '39')}of the next one, and longer\n", encoding="utf-8")
    append(path, DIED_IN_NCCL)
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.UNKNOWN}


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "in_part"])
def test_end_without_a_word_is_known_only_where_the_log_was_read_whole(
    host: Host, path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cut: bool
) -> None:
    start(host, 100, ARGV, path)
    host.look()
    append(path, f"{ARGS}Load weight begin.\n")
    if is_cut:
        monkeypatch.setattr("nccltuned.log_file.TAIL_BYTES", 30)
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.UNKNOWN if is_cut else Ending.ENDED}


@pytest.mark.parametrize("number", ["1", "2"])
def test_end_without_a_word_is_not_known_where_part_of_the_output_goes_elsewhere(
    host: Host, path: Path, number: str
) -> None:
    start(host, 100, ARGV, path)
    host.proc.redirect(100, number, "/dev/null")
    host.look()
    append(path, f"{ARGS}Load weight begin.\n")
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.UNKNOWN}


def test_end_without_a_word_is_not_known_where_the_service_came_late(
    host: Host, path: Path
) -> None:
    host.proc.add(100, ARGV, ticks=1)
    host.proc.write_to(100, path)
    append(path, f"{ARGS}{DIED_IN_NCCL}")
    host.look()
    append(path, "kill_process_tree called\n")
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.UNKNOWN}


def give_own_log(host: Host, pid: int, number: str = "1") -> Path:
    """Let one of a process's outputs lead to a file that no other process writes."""
    path = host.folder / f"own-{pid}.log"
    path.touch()
    host.proc.redirect(pid, number, path)
    return path


def start_beside_another(host: Host, path: Path) -> Path:
    """Start a server that shares one of its two logs with another; return the one that it has."""
    start(host, 100, ARGV, path)
    own = give_own_log(host, 100)
    host.look()
    start(host, 101, OTHER, path)
    host.look()
    return own


@pytest.mark.parametrize("is_restarted", [False, True], ids=["", "service_restarted"])
@pytest.mark.parametrize("own", ["1", "2"])
def test_log_that_is_one_servers_own_is_read_whatever_else_servers_share(
    host: Host, path: Path, own: str, *, is_restarted: bool
) -> None:
    pipe = host.folder / "pipe"
    os.mkfifo(pipe)
    logs = {}
    for pid, argv in ((100, ARGV), (101, OTHER)):
        start(host, pid, argv, pipe)
        logs[pid] = give_own_log(host, pid, own)
        host.look()
    if is_restarted:
        host = Host(host.proc, host.folder)
        host.look()
    append(logs[101], f"{ARGS}{DIED_IN_NCCL}")
    append(logs[100], f"{ARGS}Load weight begin.\n")
    host.look()
    host.proc.remove(101)
    host.look()
    host.proc.remove(100)
    host.look()

    assert endings(host) == {101: Ending.NCCL, 100: Ending.UNKNOWN}


def test_of_two_logs_the_one_that_another_server_writes_as_well_is_dropped_alone(
    host: Host, path: Path
) -> None:
    own = start_beside_another(host, path)
    append(path, f"{ARGS}{BY_ANOTHER}")
    append(own, f"{ARGS}CUDA out of memory\n")
    host.proc.remove(100)
    host.look()
    host.proc.remove(101)
    host.look()

    assert endings(host) == {100: Ending.MEMORY, 101: Ending.UNKNOWN}


def test_end_without_a_word_is_not_known_where_one_of_two_logs_was_dropped(
    host: Host, path: Path
) -> None:
    own = start_beside_another(host, path)
    append(own, f"{ARGS}Load weight begin.\n")
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.UNKNOWN}


@pytest.mark.parametrize(
    ("age_s", "before", "ending"),
    [
        (0, f"{ARGS}another server's\n", Ending.ENDED),
        (10, f"{ARGS}another server's\n", Ending.UNKNOWN),
        (10, "", Ending.ENDED),
    ],
    ids=["at_once", "late", "late_and_empty"],
)
@FLAGS
def test_end_without_a_word_is_not_known_where_some_may_have_been_passed_over(
    host: Host, path: Path, age_s: int, before: str, ending: Ending, flags: int
) -> None:
    append(path, before)
    host.proc.add(100, ARGV, ticks=host.ticks - age_s * os.sysconf("SC_CLK_TCK"))
    host.proc.write_to(100, path, flags=flags)
    host.look()
    append(path, "Load weight begin.\n")
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: ending}


def test_end_without_a_word_is_known_late_where_the_arguments_were_seen(
    host: Host, path: Path
) -> None:
    append(path, "another server's\n")
    host.proc.add(100, ARGV, ticks=1)
    host.proc.write_to(100, path, flags=APPENDING)
    host.look()
    append(path, f"{ARGS}Load weight begin.\n")
    host.look()
    host.proc.remove(100)
    host.look()

    assert endings(host) == {100: Ending.ENDED}


def test_words_that_another_server_may_have_written_make_none_ready(host: Host, path: Path) -> None:
    start(host, 100, ARGV, path)
    host.look()
    append(path, f"{ARGS}{READY}")
    host.look()
    start(host, 101, OTHER, path)
    host.look()
    host.proc.listen(100, 30123)
    host.look()

    assert host.ended == []
