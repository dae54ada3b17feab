"""Starts of servers, from the first moment to ready or dead."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import pytest

from nccltune.inject.decision import command_digest
from nccltune.inject.marker import MARKER, format_marker
from nccltune.live.failed_starts import UNKNOWN_DIGEST, Ending
from nccltune.live.procfs import EnvironReading, Unreadable
from nccltuned.judging import BLIND_S, HUNG_S, WARM_S, WARM_WITH_LOG_S
from nccltuned.starts import FRONT_WAIT_S
from tests.support.fake_proc import FakeProc
from tests.support.followed import (
    ARGS,
    ARGV,
    BEGUN,
    DIED_IN_NCCL,
    INVOCATION,
    OWNER,
    READY,
    STRANGER,
    Host,
    append,
)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(FakeProc(tmp_path), tmp_path)


def test_start_whose_log_tells_of_nccl_died_in_nccl(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("")
    host.look()
    host.log(DIED_IN_NCCL)
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.NCCL
    assert "NCCL error" in host.only().detail
    assert not host.tracker.is_waiting


def _take_a_title(proc: FakeProc) -> None:
    (proc.root / "100/cmdline").write_bytes(b"sglang::server\0\0\0")


@pytest.mark.parametrize(
    "change",
    [lambda proc: proc.begin_to_end(100), _take_a_title],
    ids=["ending", "title"],
)
def test_start_by_hand_keeps_the_command_that_it_was_first_seen_with(
    host: Host, change: Callable[[FakeProc], None]
) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log(DIED_IN_NCCL)
    host.look()
    change(host.proc)
    host.look()
    host.proc.remove(100)
    host.look()

    assert host.only().command_digest == command_digest(ARGV)


def test_start_under_a_record_carries_its_profile_and_command(host: Host) -> None:
    host.start()
    host.take_records([host.record()])
    host.proc.remove(100)
    host.look()

    start = host.only()
    assert (start.profile_name, start.digest) == ("mine", "a" * 16)
    assert start.command_digest == "recorded"
    assert start.launched_at == "2026-11-29T12:00:00.000+00:00"


def test_start_is_followed_from_its_record_before_it_is_sglang(host: Host) -> None:
    host.proc.add(100, ["python3", "-c", "nccltune run"], ticks=host.ticks)
    host.take_records([host.record()])

    assert host.tracker.is_waiting


def test_start_whose_record_comes_later_still_carries_it(host: Host) -> None:
    host.start()
    host.take_records([])
    host.take_records([host.record()])
    host.proc.remove(100)
    host.look()

    assert host.only().digest == "a" * 16


def test_start_with_a_mark_and_no_record_carries_the_marks_digest(host: Host) -> None:
    host.start(environ={MARKER: format_marker("b" * 16, ["NCCL_ALGO"])})
    host.proc.remove(100)
    host.look()

    assert host.only().digest == "b" * 16


def test_start_under_a_profile_that_set_nothing_is_a_start_without_one(host: Host) -> None:
    host.start()
    host.take_records([host.record(settings={})])
    host.proc.remove(100)
    host.look()

    assert host.only().digest is None


def test_start_typed_by_hand_has_the_digest_of_its_command(host: Host) -> None:
    host.start()
    host.proc.remove(100)
    host.look()

    assert host.only().digest is None
    assert host.only().command_digest == command_digest(ARGV)
    assert host.only().ending is Ending.UNKNOWN


def test_start_with_a_log_is_ready_when_the_log_says_so(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("Init parallel begin.\n")
    host.look()
    host.proc.listen(100, 30123)
    host.look()
    assert host.ended == []
    host.log(READY)
    host.look()

    assert host.only().ending is Ending.READY


def test_start_with_a_log_that_hangs_in_its_warm_up_is_not_ready(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("")
    host.look()
    host.proc.listen(100, 30123)
    host.look()
    host.now_s += WARM_S + 1
    host.look()
    assert host.ended == []
    host.log(DIED_IN_NCCL)
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.NCCL


def test_start_with_a_log_that_never_tells_is_ready_in_the_end(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("")
    host.look()
    host.proc.listen(100, 30123)
    host.look()
    host.now_s += WARM_WITH_LOG_S
    host.look()

    assert host.only().ending is Ending.READY


def test_start_without_a_log_is_ready_when_it_has_listened_for_a_while(host: Host) -> None:
    host.start()
    host.proc.listen(100, 30123)
    host.look()
    assert host.ended == []
    host.now_s += WARM_S
    host.look()

    assert host.only().ending is Ending.READY


SIGTERM = "SIGTERM received. signum=None frame=None. Draining requests and shutting down...\n"


@pytest.mark.parametrize(
    ("has_log", "listened_s", "last", "ending"),
    [
        (False, WARM_S - 1.0, "", Ending.UNKNOWN),
        (False, WARM_S, "", Ending.READY),
        (True, WARM_S, "", Ending.ENDED),
        (True, WARM_WITH_LOG_S - 1.0, SIGTERM, Ending.STOPPED),
        (True, WARM_WITH_LOG_S, SIGTERM, Ending.READY),
        (True, WARM_WITH_LOG_S, DIED_IN_NCCL, Ending.NCCL),
    ],
    ids=["soon", "no_log", "hung_or_served", "hung_and_stopped", "served", "hung"],
)
def test_end_of_a_server_that_has_listened_is_told_by_its_log_if_it_has_one(
    host: Host, *, has_log: bool, listened_s: float, last: str, ending: Ending
) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    if has_log:
        host.log("")
    host.look()
    host.proc.listen(100, 30123)
    host.look()
    host.now_s += listened_s
    if has_log:
        host.log(last)
    host.proc.remove(100)
    host.look()

    assert host.only().ending is ending


def test_start_on_a_port_that_another_process_has_is_not_ready(host: Host) -> None:
    host.start()
    host.proc.listen(100, 30123, is_own=False)
    host.now_s += WARM_S * 2
    host.look()

    assert host.ended == []


def test_start_that_may_not_be_looked_into_counts_as_ready_after_long(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccltuned.starts.PortWatch.is_listening", lambda *_, **__: None)
    host.start()
    host.now_s += WARM_WITH_LOG_S
    host.look()
    assert host.ended == []
    host.now_s += BLIND_S
    host.look()

    assert host.only().ending is Ending.READY


def test_server_that_ran_before_the_service_is_ready_at_once(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=1)
    host.proc.listen(100, 30123)
    host.look()

    assert host.only().ending is Ending.READY


def test_start_whose_end_is_known_is_not_followed_again(host: Host) -> None:
    host.start()
    host.proc.listen(100, 30123)
    host.look()
    host.now_s += WARM_S
    host.look()
    host.look()
    assert len(host.ended) == 1
    again = Host(host.proc, host.folder, ended=host.ended)
    again.take_records([])
    again.look()

    assert len(again.ended) == 1


def start_behind_launch(host: Host, text: str = "") -> None:
    """Start a server as process 100, and process 90 in front of it that writes its log."""
    host.proc.add(90, ("python3", "/usr/bin/nccltune", "launch", "--", *ARGV), ticks=host.ticks)
    host.log(text, pid=90)
    host.proc.add(100, ARGV, parent=90, ticks=host.ticks)
    host.look()


def test_start_that_is_passed_on_by_a_program_in_front_is_read_there(host: Host) -> None:
    start_behind_launch(host)
    host.log(DIED_IN_NCCL, pid=90)
    host.proc.remove(90, 100)
    host.look()

    assert host.only().ending is Ending.NCCL


LAST_WORDS = {
    "nccltune: stopped by SIGTERM in ranks connecting, after 12 s\n": Ending.STOPPED,
    "nccltune: the server stalled in graph capture: 600 s without progress\n": Ending.NCCL,
}


@pytest.mark.parametrize(("last", "ending"), LAST_WORDS.items(), ids=["stopped", "stalled"])
def test_last_words_of_the_program_in_front_are_waited_for(
    host: Host, last: str, ending: Ending
) -> None:
    start_behind_launch(host, f"{ARGS}{BEGUN}")
    host.now_s += HUNG_S
    host.proc.remove(100)
    host.look()
    assert host.ended == []
    host.log(last, pid=90)
    host.proc.remove(90)
    host.look()

    assert host.only().ending is ending


def test_program_in_front_that_stays_is_not_waited_for_forever(host: Host) -> None:
    host.proc.add(90, ("timeout", "9999", *ARGV), ticks=host.ticks)
    host.log("", pid=90)
    host.proc.add(100, ARGV, parent=90, ticks=host.ticks)
    host.look()
    host.log(DIED_IN_NCCL, pid=90)
    host.proc.remove(100)
    host.look()
    assert host.ended == []
    host.now_s += FRONT_WAIT_S
    host.look()

    assert host.only().ending is Ending.NCCL
    assert not host.tracker.is_waiting


def test_start_whose_log_was_cut_by_the_next_start_is_not_judged_by_it(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("[2026-11-29 12:00:00] server_args=ServerArgs(port=30123)\n")
    host.look()
    # Memory ended, the script around it started anew into the same file, and then we looked.
    (host.folder / "100.log").write_text(
        "[2026-11-29 12:00:09] server_args=ServerArgs(port=30123)\n"
        "[2026-11-29 12:00:12 TP0] Init torch distributed begin.\n",
        encoding="utf-8",
    )
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.UNKNOWN


@pytest.mark.parametrize(
    ("stood_s", "ending"), [(HUNG_S - 1.0, Ending.ENDED), (HUNG_S, Ending.NCCL)]
)
def test_start_that_hung_in_nccl_is_known_by_where_its_log_stood_for_long(
    host: Host, stood_s: float, ending: Ending
) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log(ARGS)
    host.look()
    host.now_s += HUNG_S
    host.log(BEGUN)
    host.look()
    host.now_s += stood_s
    host.proc.remove(100)
    host.look()

    assert host.only().ending is ending


WHOLE = f"{ARGS}{READY}"
OUT_OF_MEMORY = f"{ARGS}CUDA out of memory\n"
IN_NCCL = f"{ARGS}{DIED_IN_NCCL}"


@pytest.mark.parametrize("is_cut", [False, True], ids=["one log", "cut each time"])
@pytest.mark.parametrize(
    ("texts", "endings"),
    [
        ([IN_NCCL, OUT_OF_MEMORY, OUT_OF_MEMORY], [Ending.NCCL, Ending.MEMORY, Ending.MEMORY]),
        ([WHOLE, IN_NCCL, IN_NCCL], [Ending.READY, Ending.NCCL, Ending.NCCL]),
        ([WHOLE, WHOLE, OUT_OF_MEMORY], [Ending.READY, Ending.READY, Ending.MEMORY]),
        ([OUT_OF_MEMORY, "", IN_NCCL], [Ending.MEMORY, None, Ending.NCCL]),
    ],
    ids=["failures", "served first", "served twice", "one without a word"],
)
def test_starts_of_a_loop_that_write_into_one_file_are_judged_each_by_its_own(
    host: Host, texts: Sequence[str], endings: Sequence[Ending | None], *, is_cut: bool
) -> None:
    path = host.folder / "loop.log"
    path.touch()
    for pid, text in enumerate(texts, start=100):
        if is_cut:
            path.write_text("", encoding="utf-8")
        host.proc.add(pid, ARGV, ticks=host.ticks + pid)
        host.proc.write_to(pid, path, flags=os.O_WRONLY)
        host.look()
        host.now_s += 5.0
        # Each line has a time of its own, as SGLang's have.
        append(path, f"[12:00:{pid}] starting\n{text}")
        if READY in text:
            host.proc.listen(pid, 30123)
            host.look()
            append(path, "NCCL error: as it was stopped\n")
        host.proc.remove(pid)
        host.look()

    found = [start.ending for start in host.ended]
    assert found == [each or (Ending.ENDED if is_cut else Ending.UNKNOWN) for each in endings]


def test_start_of_a_shared_log_that_writes_more_than_is_read_is_judged(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = host.folder / "loop.log"
    path.touch()
    for pid, text in ((100, OUT_OF_MEMORY), (101, f"{ARGS}{'x' * 5000}\n")):
        host.proc.add(pid, ARGV, ticks=host.ticks + pid)
        host.proc.write_to(pid, path, flags=os.O_WRONLY)
        host.look()
        append(path, text)
        host.look()
        if pid == 101:
            monkeypatch.setattr("nccltuned.log_file.TAIL_BYTES", 1000)
            append(path, f"{'y' * 5000}\n{DIED_IN_NCCL}")
        host.proc.remove(pid)
        host.look()

    assert [start.ending for start in host.ended] == [Ending.MEMORY, Ending.NCCL]


def test_start_in_a_log_that_others_began_is_judged_from_its_own_arguments_on(host: Host) -> None:
    path = host.folder / "loop.log"
    append(path, f"{IN_NCCL}{WHOLE}")  # before the service was there
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.proc.write_to(100, path, flags=os.O_WRONLY)
    host.look()
    append(path, ARGS)
    host.look()
    append(path, "CUDA out of memory\n")
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.MEMORY


def test_start_whose_successor_has_said_nothing_yet_keeps_its_own_words(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log(ARGS)
    host.look()
    host.log(DIED_IN_NCCL)
    host.proc.remove(100)
    host.proc.add(200, ARGV, ticks=host.ticks + 5)
    host.proc.write_to(200, host.folder / "100.log")
    host.tracker.step()

    assert host.only().ending is Ending.NCCL


def test_log_that_is_cut_while_the_program_in_front_lives_is_known_from_before(host: Host) -> None:
    start_behind_launch(host)
    host.log(f"{ARGS}{DIED_IN_NCCL}", pid=90)
    host.proc.remove(100)
    host.look()
    (host.folder / "90.log").write_text("", encoding="utf-8")
    host.proc.remove(90)
    host.look()

    assert host.only().ending is Ending.NCCL


def test_what_launch_says_of_a_hang_is_no_movement(host: Host) -> None:
    start_behind_launch(host)
    host.log(f"{ARGS}{BEGUN}", pid=90)
    host.look()
    for passed_s in (30, 60):
        host.now_s += 30.0
        host.log(f"nccltune: 0:{passed_s} connecting ranks, no progress for {passed_s} s\n", pid=90)
        host.look()
    host.proc.remove(90, 100)
    host.look()

    assert host.only().ending is Ending.NCCL


def test_program_in_front_that_starts_servers_again_and_again_is_not_waited_for(
    host: Host,
) -> None:
    host.proc.add(90, ("keep.sh", "nccltune", "run", "--", *ARGV), ticks=host.ticks)
    host.proc.add(100, ARGV, parent=90, ticks=host.ticks)
    host.log(DIED_IN_NCCL)
    host.look()
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.NCCL


@pytest.mark.parametrize("is_child_first", [False, True], ids=["recorded first", "seen first"])
def test_server_behind_a_program_of_its_words_is_one_start_with_its_record(
    host: Host, *, is_child_first: bool
) -> None:
    host.proc.add(80, ("python3", "/usr/bin/nccltune", "launch", "--", *ARGV), ticks=host.ticks)
    host.log("", pid=80)
    host.proc.add(90, ("timeout", "600", *ARGV), parent=80, ticks=host.ticks)
    host.proc.add(100, ARGV, parent=90, ticks=host.ticks + 1)
    records = [host.record(90)]
    if is_child_first:
        host.look()
        host.take_records(records)
    else:
        host.take_records(records)
        host.look()
    host.log(f"{ARGS}{DIED_IN_NCCL}", pid=80)
    host.look()
    host.proc.remove(80, 90, 100)
    host.look()

    assert (host.only().ending, host.only().profile_name) == (Ending.NCCL, "mine")
    assert not host.tracker.is_waiting


def test_start_that_becomes_sglang_by_exec_keeps_what_it_wrote_meanwhile(host: Host) -> None:
    host.proc.add(100, ("nccltune", "run", "--", *ARGV), ticks=host.ticks)
    path = host.folder / "100.log"
    append(path, f"an earlier one\n{WHOLE}")
    host.proc.write_to(100, path, flags=os.O_WRONLY | os.O_APPEND)
    host.take_records([host.record()])
    append(path, IN_NCCL)
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.look()
    append(path, WHOLE)  # of the next one
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.NCCL


def test_start_that_becomes_sglang_by_exec_is_what_it_has_become(host: Host) -> None:
    host.proc.add(100, ("bash", "start.sh"), ticks=host.ticks)
    host.take_records([host.record()])
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.proc.listen(100, 30123)
    host.look()
    host.now_s += WARM_S
    host.look()

    assert host.only().ending is Ending.READY


def test_command_that_never_was_sglang_is_no_failed_start(host: Host) -> None:
    host.proc.add(100, ("nccltune", "run", "--", "true"), ticks=host.ticks)
    host.take_records([host.record()])
    host.proc.remove(100)
    host.look()

    assert host.ended == []
    assert not host.tracker.is_waiting


def test_start_that_is_ending_when_it_is_first_seen_is_no_start_without_a_profile(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = EnvironReading(None, Unreadable.GONE)
    monkeypatch.setattr("nccltuned.starts.read_environ", lambda *_: gone)
    host.start(environ={MARKER: format_marker("b" * 16, ["NCCL_ALGO"])})
    host.proc.remove(100)
    host.look()

    assert host.ended == []


def test_start_in_a_container_keeps_its_record_when_it_is_gone(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks, numbers=(7,))
    host.take_records([host.record(7)])
    host.look()
    host.proc.remove(100)
    host.look()

    assert (host.only().profile_name, host.only().command_digest) == ("mine", "recorded")


def test_start_whose_log_was_never_seen_is_not_judged_by_where_it_ends(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("")
    host.look()
    host.log(f"{ARGS}{BEGUN}")
    host.now_s += HUNG_S
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.ENDED


@pytest.mark.parametrize(
    ("own", "ending"),
    [("", Ending.UNKNOWN), (f"{ARGS}CUDA out of memory\n", Ending.MEMORY)],
    ids=["cut", "appended"],
)
def test_start_is_not_judged_by_a_later_one_that_writes_into_the_same_file(
    host: Host, own: str, ending: Ending
) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("")
    host.look()
    host.log(f"{own}{ARGS}{DIED_IN_NCCL}")
    host.proc.remove(100)
    host.proc.add(200, ARGV, ticks=host.ticks + 5)
    host.proc.write_to(200, host.folder / "100.log")
    host.look()

    assert host.only().ending is ending


def test_start_is_not_read_from_the_log_of_a_shell(host: Host) -> None:
    host.proc.add(90, ("bash",), ticks=host.ticks)
    host.log(DIED_IN_NCCL, pid=90)
    host.proc.add(100, ARGV, parent=90, ticks=host.ticks)
    host.look()
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.UNKNOWN


def test_start_in_the_journal_is_read_there_when_it_has_died(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.proc.write_to(100, Path("/dev/null"))
    status = Path("/dev/null").stat()
    stream = f"{status.st_dev}:{status.st_ino}"
    host.proc.add(
        100,
        ARGV,
        ticks=host.ticks,
        environ={"INVOCATION_ID": INVOCATION, "JOURNAL_STREAM": stream},
    )
    host.journal[INVOCATION] = DIED_IN_NCCL
    host.look()
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.NCCL


@pytest.mark.parametrize(
    ("is_whole", "ending"), [(True, Ending.ENDED), (False, Ending.UNKNOWN)], ids=["whole", "part"]
)
def test_end_without_a_word_in_the_journal_is_known_only_where_that_has_told_all(
    host: Host, ending: Ending, *, is_whole: bool
) -> None:
    status = Path("/dev/null").stat()
    stream = f"{status.st_dev}:{status.st_ino}"
    environ = {"INVOCATION_ID": INVOCATION, "JOURNAL_STREAM": stream}
    host.proc.add(100, ARGV, ticks=host.ticks, environ=environ)
    host.proc.write_to(100, Path("/dev/null"))
    host.journal[INVOCATION], host.is_journal_whole = ARGS, is_whole
    host.look()
    host.proc.remove(100)
    host.look()

    assert host.only().ending is ending


def test_start_behind_a_program_that_writes_to_the_journal_is_read_there(host: Host) -> None:
    status = Path("/dev/null").stat()
    stream = f"{status.st_dev}:{status.st_ino}"
    environ = {"INVOCATION_ID": INVOCATION, "JOURNAL_STREAM": stream}
    host.proc.add(90, ("nccltune", "launch", "--", *ARGV), ticks=host.ticks)
    host.proc.write_to(90, Path("/dev/null"))
    host.proc.add(100, ARGV, parent=90, ticks=host.ticks, environ=environ)
    host.journal[INVOCATION] = DIED_IN_NCCL
    host.look()
    host.proc.remove(90, 100)
    host.look()

    assert host.only().ending is Ending.NCCL


def test_start_that_was_missed_is_looked_up_in_the_journal(host: Host) -> None:
    host.journal[INVOCATION] = DIED_IN_NCCL
    records = [host.record(4242, invocation_id=INVOCATION)]

    host.take_records(records)
    host.take_records(records)

    assert host.only().ending is Ending.NCCL
    assert host.only().digest == "a" * 16


@pytest.mark.parametrize(
    ("later", "until"),
    [
        ({"invocation_id": INVOCATION}, "2026-11-29T13:00:00+00:00"),
        ({"invocation_id": INVOCATION[::-1]}, ""),
        ({"invocation_id": INVOCATION, "uid": STRANGER}, ""),
        ({"route": "verify", "invocation_id": "x"}, ""),
    ],
    ids=["same_run", "another_run", "another_user", "no_run"],
)
def test_start_that_was_missed_is_looked_up_to_the_next_one_of_its_units_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, later: dict[str, object], until: str
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("nccltuned.starts.read_journal", lambda *words: asked.append(words))
    monkeypatch.setattr(host.tracker, "defer", lambda function, _done: function())
    first = host.record(4242, invocation_id=INVOCATION)
    moment = "2026-11-29T13:00:00+00:00"
    host.take_records([first, host.record(4243, launched_at=moment, **later)])

    assert asked[0] == (INVOCATION, first.launched_at, until)


def test_start_in_the_journal_ends_where_the_program_in_front_has_started_the_next(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("nccltuned.starts.read_journal", lambda *words: asked.append(words))
    monkeypatch.setattr(host.tracker, "defer", lambda function, _done: function())
    status = Path("/dev/null").stat()
    stream = f"{status.st_dev}:{status.st_ino}"
    environ = {"INVOCATION_ID": INVOCATION, "JOURNAL_STREAM": stream}
    host.proc.add(90, ("supervise", *ARGV), ticks=host.ticks)
    host.proc.write_to(90, Path("/dev/null"))
    for pid in (100, 101):
        host.proc.add(pid, ARGV, parent=90, ticks=host.ticks + pid, environ=environ)
        host.look()
        host.proc.remove(pid)
        host.look()
        host.now_s += 5.0
    host.proc.remove(90)
    host.look()

    [first, second] = [until for _run, _since, until in asked]
    died_s = time.time() - 5.0 + 1.0
    assert abs(datetime.fromisoformat(first).timestamp() - died_s) < 2.0
    assert second == ""


@pytest.mark.parametrize("text", [None, "", "nothing to the point\n"])
def test_start_that_was_missed_and_left_no_word_is_not_judged(host: Host, text: str | None) -> None:
    host.journal[INVOCATION] = text
    host.take_records([host.record(4242, invocation_id=INVOCATION)])

    assert host.ended == []


def test_start_in_a_container_that_is_not_seen_from_here_is_not_judged(host: Host) -> None:
    host.proc.add(17, ["kthread"], ticks=5)

    host.take_records([])
    host.take_records([host.record(17)])
    host.tracker.step()

    assert host.ended == []


def test_start_of_an_earlier_boot_is_not_looked_for(host: Host) -> None:
    host.journal[INVOCATION] = DIED_IN_NCCL
    old = host.record(4242, boot_id="an earlier boot", invocation_id=INVOCATION)

    host.take_records([old])

    assert host.ended == []


def test_close_lets_go_of_every_log(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log("")
    host.look()

    host.tracker.close()

    assert not host.tracker.is_waiting


def test_start_of_anybody_is_not_trusted_and_of_the_owner_is(host: Host) -> None:
    for pid, uid in ((100, 0), (101, STRANGER), (102, OWNER)):
        host.proc.add(pid, ARGV, ticks=host.ticks, uid=uid)
    host.tracker.trusted_uids = frozenset({0, OWNER})
    host.look()
    host.proc.remove(100, 101, 102)
    host.look()

    assert {start.uid: start.is_trusted for start in host.ended} == {
        0: True,
        STRANGER: False,
        OWNER: True,
    }


def test_start_under_rights_that_are_lent_is_not_roots(host: Host, tmp_path: Path) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_bytes(b"")
    sudo.chmod(0o4755)
    host.proc.add(100, ARGV, ticks=host.ticks, uid=0, links={"exe": sudo})
    host.look()
    host.proc.remove(100)
    host.look()

    assert (host.only().uid, host.only().is_trusted) == (None, False)


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_start_in_a_unit_is_trusted_where_systemd_confirms_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, is_confirmed: bool
) -> None:
    monkeypatch.setattr(host.tracker, "defer", lambda function, done: done(function()))
    monkeypatch.setattr("nccltuned.starts.is_of_unit", lambda *_: is_confirmed)
    environ = {"INVOCATION_ID": INVOCATION}
    host.proc.add(100, ARGV, ticks=host.ticks, uid=STRANGER, environ=environ)
    host.look()
    host.proc.remove(100)
    host.look()

    assert host.only().is_trusted is is_confirmed


@pytest.mark.parametrize(
    ("uid", "number", "is_trusted"),
    [(None, 100, True), (STRANGER, 100, False), (None, 7, False)],
    ids=["of_the_store", "handed_over", "number_in_a_container"],
)
def test_start_is_trusted_by_a_record_that_a_stranger_could_not_write(
    host: Host, uid: int | None, number: int, is_trusted: bool
) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks, uid=STRANGER, numbers=(7,))
    host.take_records([host.record(number, uid=uid)])
    host.look()
    host.proc.remove(100)
    host.look()

    assert host.only().is_trusted is is_trusted


def test_start_that_was_missed_and_handed_over_by_a_stranger_is_not_trusted(host: Host) -> None:
    host.journal[INVOCATION] = DIED_IN_NCCL
    records = [
        host.record(4242, invocation_id=INVOCATION, uid=STRANGER),
        host.record(4243, invocation_id=INVOCATION),
    ]

    host.take_records(records)

    assert [start.is_trusted for start in host.ended] == [False, True]


def test_start_carries_the_state_of_the_store_that_it_met(host: Host) -> None:
    host.tracker.generation = 4
    host.start()
    host.tracker.generation = 5
    host.start(101)
    host.take_records([host.record(101, generation=3)])
    host.proc.remove(100, 101)
    host.look()

    assert {start.pid: start.generation for start in host.ended} == {100: 4, 101: 3}


def test_start_whose_port_stands_in_its_own_file_is_watched_there(
    host: Host, tmp_path: Path
) -> None:
    (tmp_path / "serve.yaml").write_text("port: 31313\n", encoding="utf-8")
    argv = ("python3", "-m", "sglang.launch_server", "--config", "serve.yaml")
    links = {"cwd": Path("/in"), "root": tmp_path / "jail"}
    (tmp_path / "jail").mkdir()
    (tmp_path / "jail/in").symlink_to("/")
    (tmp_path / "serve.yaml").rename(tmp_path / "jail/serve.yaml")
    host.proc.add(100, argv, ticks=host.ticks, links=links)
    host.proc.listen(100, 31313)
    host.look()
    host.now_s += WARM_S
    host.look()

    assert host.only().ending is Ending.READY


def test_start_whose_port_is_not_known_yet_is_not_ready(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.tracker, "defer", lambda _function, _done: None)
    argv = ("python3", "-m", "sglang.launch_server", "--config", "serve.yaml")
    host.proc.add(100, argv, ticks=host.ticks)
    host.proc.listen(100, 30000)
    host.look()
    host.now_s += WARM_WITH_LOG_S
    host.look()

    assert host.ended == []


def test_word_of_being_ready_that_comes_before_the_port_is_kept(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log(ARGS)
    host.look()
    host.log(READY)
    host.look()
    host.log("INFO: 200 OK\n" * 50_000)
    host.proc.listen(100, 30123)
    host.look()

    assert host.only().ending is Ending.READY


def test_port_is_looked_at_at_once_when_the_log_says_ready(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log(ARGS)
    host.proc.listen(100, 1)  # a socket that listens elsewhere, or not yet
    host.look()
    (host.proc.root / "100/fd/7").unlink()
    host.proc.listen(100, 30123)
    host.log(READY)
    host.look()

    assert host.only().ending is Ending.READY


def test_server_that_said_ready_and_listened_was_ready_whatever_it_wrote_since(host: Host) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log(ARGS)
    host.proc.listen(100, 30123)
    host.look()
    (host.proc.root / "100/fd/7").unlink()  # it drains, and listens no longer
    host.log(READY)
    host.look()
    host.log("INFO: 200 OK\n" * 50_000)
    host.log(DIED_IN_NCCL)
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.READY


UNREADABLE = [Unreadable.LARGE, Unreadable.WIPED, Unreadable.FORBIDDEN]


@pytest.mark.parametrize("problem", UNREADABLE)
def test_start_whose_mark_cannot_be_read_is_told_and_is_under_nobody_knows_what(
    host: Host, monkeypatch: pytest.MonkeyPatch, problem: Unreadable
) -> None:
    monkeypatch.setattr("nccltuned.starts.read_environ", lambda *_: EnvironReading(None, problem))
    host.proc.add(100, ARGV, ticks=host.ticks)
    host.proc.add(101, ARGV, ticks=host.ticks)
    host.take_records([host.record(101)])
    host.log("")
    host.look()
    host.log(DIED_IN_NCCL)
    host.proc.remove(100, 101)
    host.look()

    digests = {start.pid: start.digest for start in host.ended}
    assert digests == {100: UNKNOWN_DIGEST, 101: "a" * 16}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_look_for_which_descriptors_have_run_out_says_nothing_of_any_start(
    host: Host, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    host.proc.add(100, ARGV, ticks=host.ticks)
    host.log(ARGS)
    host.look()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match=os.strerror(number)):
            host.tracker.step()
    assert host.ended == []
    host.log(DIED_IN_NCCL)
    host.proc.remove(100)
    host.look()

    assert host.only().ending is Ending.NCCL


def test_start_for_which_there_is_no_descriptor_is_followed_later(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host.proc.add(100, ARGV, ticks=host.ticks)
    with monkeypatch.context() as patch:
        patch.setattr("nccltuned.starts.has_room", lambda: False)
        host.take_records([host.record(100)])
        host.look()
        assert not host.tracker.is_waiting
    assert caplog.text.count("than there are descriptors") == 1
    host.tracker.step()

    assert host.tracker.is_waiting


def test_start_that_ends_before_there_is_a_descriptor_for_it_is_looked_up(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.journal[INVOCATION] = DIED_IN_NCCL
    host.proc.add(100, ARGV, ticks=host.ticks)
    monkeypatch.setattr("nccltuned.starts.has_room", lambda: False)
    host.take_records([host.record(100, invocation_id=INVOCATION)])
    host.proc.remove(100)
    host.take_records([])  # newer ones have taken its place

    assert host.only().ending is Ending.NCCL
