"""Starts of servers that other programs have started: each is one start, and told once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from nccltune.inject.marker import MARKER, format_marker
from nccltune.live.failed_starts import UNKNOWN_DIGEST, Ending
from nccltune.live.procfs import read_process
from nccltuned.fronts import MAX_ANCESTORS, place_of
from nccltuned.logs import NEW_S
from nccltuned.starts import FRONT_WAIT_S
from tests.support.fake_proc import FakeProc
from tests.support.followed import ARGS, ARGV, DIED_IN_NCCL, INVOCATION, READY, Host, append

CONDA = ("conda", "run", "-n", "env", *ARGV)
START_SH = ("bash", "./start.sh")
LAUNCH = ("python3", "/usr/bin/nccltune", "launch", "--", *CONDA)
MIDDLE = ("/bin/bash", "tmpx1")  # as conda writes one for every command
OUTER, SERVER = 90, 100


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(FakeProc(tmp_path), tmp_path)


def add_outer(host: Host, argv: Sequence[str]) -> None:
    host.proc.add(OUTER, argv, ticks=host.ticks)


def add_server(host: Host) -> None:
    host.proc.add(95, MIDDLE, parent=OUTER, ticks=host.ticks)
    host.proc.add(SERVER, ARGV, parent=95, ticks=host.ticks)


ORDERS = ["record_first", "server_first", "at_once"]


def follow(host: Host, argv: Sequence[str], order: str) -> None:
    """Let the service learn of a server and of the record of what has started it."""
    records = [host.record(OUTER)]
    add_outer(host, argv)
    if order == "record_first":
        host.take_records(records)
    add_server(host)
    host.log("", pid=SERVER)
    if order == "at_once":
        host.tracker.take_records(records)
    host.look()
    if order == "server_first":
        host.take_records(records)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("argv", [CONDA, START_SH], ids=["conda", "script"])
def test_server_behind_programs_without_its_words_is_one_start(
    host: Host, argv: Sequence[str], order: str
) -> None:
    follow(host, argv, order)
    host.log(f"{ARGS}{DIED_IN_NCCL}", pid=SERVER)
    host.proc.remove(SERVER, 95)
    host.look()
    host.proc.remove(OUTER)
    host.now_s += FRONT_WAIT_S
    host.look()

    assert (host.only().pid, host.only().ending) == (SERVER, Ending.NCCL)
    assert host.only().profile_name == ("mine" if argv is CONDA else None)
    assert not host.tracker.is_waiting


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("argv", [CONDA, START_SH], ids=["conda", "script"])
def test_end_of_a_server_that_was_ready_is_no_failure_of_what_has_started_it(
    host: Host, argv: Sequence[str], order: str
) -> None:
    follow(host, argv, order)
    host.log(f"{ARGS}{READY}", pid=SERVER)
    host.proc.listen(SERVER, 30123)
    host.look()
    assert not host.tracker.is_waiting
    again = Host(host.proc, host.folder, ended=host.ended)  # the service was started anew
    again.tracker.take_records([host.record(OUTER)])
    again.look()
    assert not again.tracker.is_waiting
    host.log(DIED_IN_NCCL, pid=SERVER)
    host.proc.remove(SERVER, 95, OUTER)
    for each in (host, again):
        each.look()

    assert (host.only().pid, host.only().ending) == (SERVER, Ending.READY)


def test_server_behind_launch_and_programs_without_its_words_is_read_from_launchs_log(
    host: Host,
) -> None:
    host.proc.add(80, LAUNCH, ticks=host.ticks)
    host.log("", pid=80)
    host.proc.add(OUTER, CONDA, parent=80, ticks=host.ticks)
    host.take_records([host.record(OUTER)])
    add_server(host)
    host.look()
    host.log(f"{ARGS}{DIED_IN_NCCL}", pid=80)
    host.proc.remove(SERVER, 95, OUTER, 80)
    host.look()

    assert (host.only().pid, host.only().ending) == (SERVER, Ending.NCCL)


def test_script_that_becomes_a_server_after_it_has_started_one_is_followed_again(
    host: Host,
) -> None:
    follow(host, START_SH, "record_first")
    host.log(f"{ARGS}{DIED_IN_NCCL}", pid=SERVER)
    host.proc.remove(SERVER, 95)
    host.look()
    host.proc.add(OUTER, ARGV, ticks=host.ticks)
    host.look()
    assert host.tracker.is_waiting
    host.proc.remove(OUTER)
    host.look()

    assert [start.pid for start in host.ended] == [SERVER, OUTER]


def test_command_that_is_no_server_for_long_is_not_looked_at_often(host: Host) -> None:
    add_outer(host, START_SH)
    host.take_records([host.record(OUTER)])
    assert host.tracker.is_waiting
    host.now_s += NEW_S
    host.look()

    assert not host.tracker.is_waiting


def test_program_whose_server_runs_elsewhere_is_ready_when_its_log_has_said_so(host: Host) -> None:
    add_outer(host, ("docker", "run", "image", *ARGV))
    host.log("", pid=OUTER)
    host.take_records([host.record(OUTER)])
    host.log(f"{ARGS}{READY}", pid=OUTER)
    host.look()
    host.log("INFO: 200 OK\n" * 50_000, pid=OUTER)
    host.log(DIED_IN_NCCL, pid=OUTER)
    host.proc.remove(OUTER)
    host.look()

    assert host.only().ending is Ending.READY


def test_ancestors_are_climbed_up_to_a_bound(host: Host) -> None:
    for pid in range(1000, 1100):
        host.proc.add(pid, MIDDLE, parent=pid - 1, ticks=host.ticks)
    host.proc.add(1100, ARGV, parent=1099, ticks=host.ticks)
    server = read_process(1100, host.proc.root)
    assert server is not None

    assert len(place_of(server, host.proc.root).above) == MAX_ANCESTORS


VERIFY = ("python3", "-m", "nccltune", "verify", "--arms", "default,mine", "--", *ARGV)
RUN_IN_VERIFY_DIR = ("python3", "/opt/verify/bin/nccltune", "launch", "--", *ARGV)


@pytest.mark.parametrize("how", ["words", "record", "late_record", "record_of_front"])
def test_boots_of_verify_are_judged_by_it_alone(host: Host, how: str) -> None:
    add_outer(host, VERIFY if how == "words" else CONDA)
    host.log("  arm  boot  tok/s\n", pid=OUTER)
    pid = OUTER if how == "record_of_front" else SERVER
    records = [] if how == "words" else [host.record(pid, route="verify")]
    if how != "late_record":
        host.tracker.take_records(records)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as short as it gets
    add_server(host)
    host.look()
    if how == "late_record":
        host.take_records(records)
        host.look()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert not host.tracker.is_waiting
    host.proc.remove(SERVER, 95, OUTER)
    host.look()

    assert host.ended == []


def test_only_verify_itself_is_taken_for_it(host: Host) -> None:
    add_outer(host, RUN_IN_VERIFY_DIR)
    add_server(host)
    host.look()
    host.proc.remove(SERVER, 95, OUTER)
    host.look()

    assert host.only().ending is Ending.UNKNOWN


@pytest.mark.parametrize(
    ("first", "ending"),
    [
        ("Segmentation fault\n", Ending.FAILED),
        (f"{ARGS}CUDA out of memory\n", Ending.MEMORY),
        ("", Ending.ENDED),
    ],
)
@pytest.mark.parametrize("has_written_at_once", [True, False])
def test_program_that_starts_servers_again_and_again_into_its_own_log_keeps_them_apart(
    host: Host, first: str, ending: Ending, *, has_written_at_once: bool
) -> None:
    add_outer(host, ("supervise", *ARGV))
    host.log("", pid=OUTER)
    second = SERVER + 1
    host.proc.add(SERVER, ARGV, parent=OUTER, ticks=host.ticks)
    host.look()
    host.log(first, pid=OUTER)
    host.proc.remove(SERVER)
    host.look()
    assert host.ended == []  # the program in front may have a word to say
    host.proc.add(second, ARGV, parent=OUTER, ticks=host.ticks + 5)
    if has_written_at_once:
        host.log(f"{ARGS}{DIED_IN_NCCL}", pid=OUTER)
    host.look()
    if not has_written_at_once:
        host.log(f"{ARGS}{DIED_IN_NCCL}", pid=OUTER)
        host.look()
    host.proc.remove(second)
    host.proc.add(second + 1, ARGV, parent=OUTER, ticks=host.ticks + 9)
    host.look()
    append(host.folder / f"{OUTER}.log", f"{ARGS}CUDA out of memory\n")
    host.look()

    endings = {start.pid: start.ending for start in host.ended}
    assert endings == {SERVER: ending, second: Ending.NCCL}


def test_place_names_what_is_above_and_who_of_them_is_given_its_words(host: Host) -> None:
    add_outer(host, CONDA)
    add_server(host)
    server = read_process(SERVER, host.proc.root)
    assert server is not None
    place = place_of(server, host.proc.root)

    assert [each.pid for each in place.above] == [95, OUTER]
    assert [each.pid for each in place.fronts] == [OUTER]


STRANGERS = pytest.mark.parametrize(
    "front",
    [("docker", "run", "image"), ("/usr/bin/sudo", "-E"), ("ssh", "host")],
    ids=["docker", "sudo", "ssh"],
)
MARK = {MARKER: format_marker("b" * 16, {"NCCL_ALGO": "allreduce:tree"})}


@STRANGERS
@pytest.mark.parametrize("launch", [(), ("nccltune", "launch", "--")], ids=["run", "launch"])
def test_failure_behind_an_environment_of_its_own_is_not_known_to_be_the_profiles(
    host: Host, launch: Sequence[str], front: Sequence[str]
) -> None:
    add_outer(host, (*launch, *front, *ARGV))
    host.log("", pid=OUTER)
    host.take_records([host.record(OUTER)])
    host.log(f"{ARGS}{DIED_IN_NCCL}", pid=OUTER)
    host.proc.remove(OUTER)
    host.look()

    assert (host.only().ending, host.only().digest) == (Ending.NCCL, UNKNOWN_DIGEST)


@STRANGERS
@pytest.mark.parametrize(("mark", "digest"), [(MARK, "b" * 16), ({}, None)], ids=["", "lost"])
def test_server_behind_an_environment_of_its_own_is_under_what_it_was_given(
    host: Host, front: Sequence[str], mark: dict[str, str], digest: str | None
) -> None:
    add_outer(host, (*front, *ARGV))
    host.proc.add(SERVER, ARGV, parent=OUTER, ticks=host.ticks + 1, environ=mark)
    host.take_records([host.record(OUTER)])
    host.look()
    host.proc.remove(SERVER, OUTER)
    host.look()

    assert (host.only().pid, host.only().digest) == (SERVER, digest)


@STRANGERS
def test_launch_within_an_environment_of_its_own_is_under_the_profile_on_record(
    host: Host, front: Sequence[str]
) -> None:
    add_outer(host, (*front, "nccltune", "run", "--", *ARGV))
    host.proc.add(SERVER, ARGV, parent=OUTER, ticks=host.ticks + 1)
    host.take_records([host.record(SERVER, started_ticks=host.ticks + 1)])
    host.look()
    host.proc.remove(SERVER, OUTER)
    host.look()

    assert host.only().digest == "a" * 16


def test_start_is_told_once_where_the_service_restarts_before_its_program_in_front_ends(
    host: Host,
) -> None:
    records = [host.record(OUTER)]
    add_outer(host, ("supervise", *ARGV))
    host.log("", pid=OUTER)
    host.proc.add(SERVER, ARGV, parent=OUTER, ticks=host.ticks + 1)
    host.take_records(records)
    host.look()
    host.log(f"{ARGS}{DIED_IN_NCCL}", pid=OUTER)
    host.proc.remove(SERVER)
    host.look()
    host.now_s += FRONT_WAIT_S
    host.look()
    again = Host(host.proc, host.folder, ended=host.ended)
    again.take_records(records)
    again.look()
    again.proc.add(SERVER + 1, ARGV, parent=OUTER, ticks=host.ticks + 9)
    again.look()
    host.proc.remove(SERVER + 1, OUTER)
    again.look()

    assert [start.pid for start in host.ended] == [SERVER, SERVER + 1]


def test_missed_launch_is_not_looked_up_where_its_start_is_told(host: Host) -> None:
    records = [host.record(OUTER, invocation_id=INVOCATION)]
    host.journal[INVOCATION] = DIED_IN_NCCL
    add_outer(host, ("supervise", *ARGV))
    host.proc.add(SERVER, ARGV, parent=OUTER, ticks=host.ticks + 1)
    host.take_records(records)
    host.look()
    host.proc.remove(SERVER, OUTER)
    host.look()
    again = Host(host.proc, host.folder, ended=host.ended, journal=host.journal)
    again.take_records(records)

    assert [start.pid for start in host.ended] == [SERVER]


def test_boot_of_verify_takes_no_room_from_others(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_outer(host, ARGV)
    with monkeypatch.context() as patch:
        patch.setattr("nccltuned.starts.has_room", lambda: False)
        host.take_records([host.record(OUTER, route="verify")])
        host.look()
    host.look()
    host.proc.remove(OUTER)
    host.look()

    assert "descriptors" not in caplog.text
    assert host.ended == []
