"""What is decided about a start: ready or not, waited for long enough, and how it is worded.

And what is fetched of a command's processes.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from nccltune.sdnotify import Notifier
from nccltune.sglang.endpoints import Endpoint, Health
from nccltune.sglang.failures import Failure, FailureKind
from nccltune.sglang.log_stages import LogLine, Stage, read_event
from nccltune.sglang.start_progress import Step
from nccltune.supervise import EndKind, Limits, PassThrough, endings
from nccltune.supervise.endings import Waited
from nccltune.supervise.process import describe_status, exit_code_of
from nccltune.supervise.readiness import OWN_WORD_GRACE_S, judge
from nccltune.supervise.service import KILL_MARGIN_S, ServiceReport
from nccltune.supervise.watch import FATAL_GRACE_S, StartWatch
from tests.support.hosts import REPOSITORY

CAPTURE = Step(Stage.CAPTURE_TARGET, "target verify", 90.0, 5, 23)
LIMITS = Limits(ready_timeout_s=1800.0, stall_timeout_s=300.0)
WAITED = Waited(CAPTURE, elapsed_s=412.0, idle_s=301.0, limits=LIMITS, last_text="TP0: capturing")
MEMORY = Failure(FailureKind.MEMORY, "CUDA out of memory")


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeNotifier(Notifier):
    """Keeps what would be sent."""

    sent: list[str] = []  # noqa: RUF012 - set for each test
    lost_count = 0

    def send(self, *assignments: str) -> bool:
        self.sent.append("\n".join(assignments))
        return len(self.sent) > self.lost_count


def line(text: str, rank: str = "TP0") -> LogLine:
    return LogLine(rank, text, read_event(text))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def watch(clock: FakeClock) -> StartWatch:
    watch = StartWatch(LIMITS, clock)
    watch.is_sglang = True
    return watch


# Words of endings.


def test_stall_in_a_capture_names_it_and_both_limits() -> None:
    ending = endings.stalled(WAITED)

    assert ending.message == (
        "stalled in graph capture (target verify, 5 of 23): no progress for 301 s "
        "(--stall-timeout-s 300), after 412 s of --ready-timeout-s 1800; "
        "its last line: TP0: capturing"
    )
    assert (ending.kind, ending.exit_code, ending.is_nccl_like) == (EndKind.STALLED, 124, True)


def test_stall_while_weights_load_is_not_laid_on_nccl() -> None:
    ending = endings.stalled(replace(WAITED, step=Step(Stage.WEIGHTS, "", 9.0), last_text=""))

    assert "stalled in loading weights: " in ending.message
    assert ending.message.endswith("it wrote nothing")
    assert not ending.is_nccl_like


def test_end_of_the_whole_wait_names_both_limits_and_the_last_progress() -> None:
    ending = endings.not_ready(replace(WAITED, elapsed_s=1801.0, idle_s=2.0))

    assert ending.message == (
        "not ready after 1801 s (--ready-timeout-s 1800), in graph capture (target verify, "
        "5 of 23); last progress 2 s ago, within --stall-timeout-s 300; "
        "its last line: TP0: capturing"
    )
    assert (ending.kind, ending.exit_code) == (EndKind.NOT_READY, 124)


def test_death_before_ready_has_the_telling_line_and_the_servers_own_status() -> None:
    ending = endings.died(WAITED, MEMORY, "SIGKILL", 137)

    assert ending.message == (
        "the server died (SIGKILL) after 412 s in graph capture (target verify, 5 of 23): "
        "out of memory: CUDA out of memory"
    )
    assert (ending.kind, ending.exit_code, ending.is_fault) == (EndKind.DIED, 137, True)


def test_end_with_success_is_no_fault_whenever_it_comes() -> None:
    early = endings.died(WAITED, MEMORY, "status 0", 0)
    late = endings.exited(MEMORY, "status 0", 0, 60.0)

    assert [early.is_fault, late.is_fault] == [False, False]
    assert [early.exit_code, late.exit_code] == [0, 0]


def test_end_on_request_is_no_fault_and_keeps_the_status() -> None:
    ending = endings.stopped(signal.SIGTERM, "SIGKILL", 137)

    assert ending.message == "stopped by SIGTERM; the server ended (SIGKILL)"
    assert (ending.is_fault, ending.exit_code) == (False, 137)


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [(0, "status 0", 0), (3, "status 3", 3), (-9, "SIGKILL", 137), (-15, "SIGTERM", 143)],
)
def test_status_is_worded_and_shown_as_a_shell_does(status: int, words: str, code: int) -> None:
    assert (describe_status(status), exit_code_of(status)) == (words, code)


# Patience.


def test_watch_of_a_silent_start_stalls_at_its_limit(watch: StartWatch, clock: FakeClock) -> None:
    watch.take(line("Load weight begin."))
    clock.now_s += 300.0
    assert watch.overdue() is None

    clock.now_s += 1.0
    ending = watch.overdue()

    assert ending is not None
    assert ending.kind is EndKind.STALLED


def test_watch_of_what_is_no_sglang_sets_no_limit(clock: FakeClock) -> None:
    watch = StartWatch(LIMITS, clock)
    watch.take(line("a program of another kind"))
    clock.now_s += 100_000.0
    assert watch.overdue() is None
    assert not watch.moment(None, 7).is_sglang

    watch.take(line("Load weight begin."))
    assert watch.overdue() is not None


def test_watch_of_a_start_that_moves_ends_at_the_whole_limit_only(
    watch: StartWatch, clock: FakeClock
) -> None:
    endings_seen = []
    for done in range(1, 20):
        clock.now_s += 100.0
        watch.take(line(f"Loading safetensors checkpoint shards: 1% Completed | {done}/99 [0", ""))
        if (ending := watch.overdue()) is not None:
            endings_seen.append(ending)

    assert [each.kind for each in endings_seen] == [EndKind.NOT_READY]


def test_watch_of_a_server_that_gave_up_does_not_wait_for_the_stall_limit(
    watch: StartWatch, clock: FakeClock
) -> None:
    watch.take(line("Scheduler hit an exception: Traceback (most recent call last):"))
    watch.take(line("RuntimeError: NCCL error: internal error"))
    assert watch.overdue() is None

    clock.now_s += FATAL_GRACE_S + 1.0
    ending = watch.overdue()

    assert ending is not None
    assert (ending.kind, ending.exit_code) == (EndKind.GAVE_UP, 8)
    assert "NCCL error: internal error" in ending.message
    assert ending.is_nccl_like


def test_watch_forgives_the_time_in_which_we_were_suspended(
    watch: StartWatch, clock: FakeClock
) -> None:
    watch.forgive(0.0)
    clock.now_s += 5000.0
    watch.forgive(0.0)

    assert watch.overdue() is None
    assert watch.now_s == 0.0


def test_watch_forgives_the_time_in_which_nobody_took_the_output(
    watch: StartWatch, clock: FakeClock
) -> None:
    for _ in range(100):
        clock.now_s += 9.0
        watch.forgive(blocked_s=9.0)

    assert watch.overdue() is None
    assert watch.waited().idle_s == 0.0


def test_watch_does_not_forgive_a_wait_of_its_own(watch: StartWatch, clock: FakeClock) -> None:
    for _ in range(40):
        clock.now_s += 9.0
        watch.forgive(blocked_s=0.0)

    ending = watch.overdue()
    assert ending is not None
    assert ending.kind is EndKind.STALLED


def test_watch_of_a_ready_server_has_its_time_of_service(
    watch: StartWatch, clock: FakeClock
) -> None:
    clock.now_s += 54.0
    watch.enter(Stage.READY)
    clock.now_s += 6.0

    moment = watch.moment(Endpoint(), 7)

    assert (watch.ready_s, moment.served_s) == (54.0, 6.0)
    assert moment.waited.step.stage is Stage.READY


def test_watch_learns_the_address_and_the_servers_own_word(
    watch: StartWatch, clock: FakeClock
) -> None:
    clock.now_s += 3.0

    assert watch.take(line("INFO:     Uvicorn running on http://127.0.0.1:30123 (Press", ""))
    assert watch.take(line("The server is fired up and ready to roll!", ""))
    assert not watch.take(line("Load weight begin.", "TP1"))

    assert watch.url == "http://127.0.0.1:30123"
    assert watch.said_ready_s == 3.0


# Readiness.


def test_answer_of_this_server_makes_it_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint(port=listening.getsockname()[1])
        own = judge(Health.UP, endpoint, pids=lambda: [os.getpid()], since_own_word_s=None)
        other = judge(Health.UP, endpoint, pids=list, since_own_word_s=None)
        starting = judge(
            Health.STARTING, endpoint, pids=lambda: [os.getpid()], since_own_word_s=None
        )

    assert (own.is_ready, own.is_listening) == (True, True)
    assert (other.is_ready, other.is_listening) == (False, False)
    assert (starting.is_ready, starting.is_listening) == (False, True)


@pytest.mark.parametrize("health", [None, Health.REFUSED, Health.STRANGE])
def test_own_word_is_believed_where_nobody_can_ask(health: Health | None) -> None:
    at_once = judge(health, None, pids=list, since_own_word_s=0.0)
    early = judge(health, Endpoint(), pids=list, since_own_word_s=OWN_WORD_GRACE_S - 1.0)
    late = judge(health, Endpoint(), pids=list, since_own_word_s=OWN_WORD_GRACE_S)

    assert [at_once.is_ready, early.is_ready, late.is_ready] == [True, False, True]
    assert "nobody answers on http://127.0.0.1:30000" in late.doubt


def test_own_word_is_not_believed_over_a_server_that_does_not_answer() -> None:
    assert not judge(Health.SILENT, Endpoint(), pids=list, since_own_word_s=99.0).is_ready
    assert not judge(Health.REFUSED, Endpoint(), pids=list, since_own_word_s=None).is_ready


# The service manager.


@pytest.fixture
def notifier(monkeypatch: pytest.MonkeyPatch) -> FakeNotifier:
    monkeypatch.setattr(FakeNotifier, "sent", [])
    return FakeNotifier("/run/notify", watchdog_s=None)


def test_service_asks_for_what_is_left_of_our_own_patience(
    watch: StartWatch, clock: FakeClock, notifier: FakeNotifier
) -> None:
    report = ServiceReport(notifier, clock)
    watch.take(line("Load weight begin."))
    clock.now_s += 100.0

    report.update(watch.moment(None, 7))

    asked_s = 300.0 - 100.0 + KILL_MARGIN_S
    assert notifier.sent == [
        f"EXTEND_TIMEOUT_USEC={int(asked_s * 1e6)}",
        "STATUS=loading weights, 100 s since the launch, no progress for 100 s",
    ]


def test_service_asks_for_no_more_than_the_whole_limit(
    watch: StartWatch, clock: FakeClock, notifier: FakeNotifier
) -> None:
    clock.now_s += 1700.0
    watch.take(line("Load weight begin."))

    ServiceReport(notifier, clock).update(watch.moment(None, 7))

    assert notifier.sent[0] == f"EXTEND_TIMEOUT_USEC={int((100.0 + KILL_MARGIN_S) * 1e6)}"


def test_service_is_told_again_before_the_time_is_over_and_at_each_stage(
    watch: StartWatch, clock: FakeClock, notifier: FakeNotifier
) -> None:
    report = ServiceReport(notifier, clock)
    for _ in range(20):
        report.update(watch.moment(None, 7))
        clock.now_s += 0.25
    assert len(notifier.sent) == 2

    watch.take(line("Load weight begin."))
    report.update(watch.moment(None, 7))
    assert len(notifier.sent) == 4


def test_service_is_ready_once_and_stops_with_the_reason(
    watch: StartWatch, clock: FakeClock, notifier: FakeNotifier
) -> None:
    report = ServiceReport(notifier, clock)
    clock.now_s += 54.0
    watch.enter(Stage.READY)
    for _ in range(3):
        report.update(watch.moment(Endpoint(), 7))
    report.end(endings.exited(MEMORY, "SIGKILL", 137, 9.0))

    assert notifier.sent == [
        "READY=1\nSTATUS=serving on http://127.0.0.1:30000, ready after 54 s",
        "STOPPING=1\nSTATUS=the server ended (SIGKILL) after 9 s of service: out of memory: "
        "CUDA out of memory",
    ]


def test_service_asks_for_no_time_for_what_is_no_sglang(
    clock: FakeClock, notifier: FakeNotifier
) -> None:
    ServiceReport(notifier, clock).update(StartWatch(LIMITS, clock).moment(None, 7))

    assert notifier.sent == []


def test_service_says_ready_again_until_it_is_heard(
    watch: StartWatch,
    clock: FakeClock,
    notifier: FakeNotifier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeNotifier, "lost_count", 2)
    report = ServiceReport(notifier, clock)
    watch.enter(Stage.READY)

    for _ in range(5):
        report.update(watch.moment(None, 7))

    assert notifier.sent == ["READY=1\nSTATUS=serving, ready after 0 s"] * 3


def test_service_with_a_watchdog_hears_of_us_in_time(
    watch: StartWatch, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNotifier, "sent", [])
    report = ServiceReport(FakeNotifier("/run/notify", watchdog_s=30.0), clock)
    watch.enter(Stage.READY)
    assert report.tick_s == 10.0

    for _ in range(9):
        report.update(watch.moment(None, 7))
        clock.now_s += 10.0

    assert FakeNotifier.sent.count("WATCHDOG=1") == 9


def test_service_without_a_manager_is_told_nothing(
    watch: StartWatch, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNotifier, "sent", [])
    report = ServiceReport(FakeNotifier(), clock)

    report.update(watch.moment(None, 7))

    assert FakeNotifier.sent == []
    assert report.tick_s is None


# Output that finds no room.


class Disk:
    """Stands in for ``os.write``: as much room as it is given, then an error."""

    def __init__(self) -> None:
        self.room_bytes = 0
        self.error = errno.ENOSPC
        self.content = {1: b"", 2: b""}

    def write(self, descriptor: int, data: bytes) -> int:
        taken = min(len(data), self.room_bytes)
        if not taken:
            raise OSError(self.error, os.strerror(self.error))
        self.room_bytes -= taken
        self.content[descriptor] += bytes(data[:taken])
        return taken


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "write", disk.write)
    return disk


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN + 900])
def test_output_without_room_is_counted_and_goes_on_once_there_is_some(
    disk: Disk, number: int
) -> None:
    disk.error = number
    sink = PassThrough()
    disk.room_bytes = 12

    sink.write(1, b"line 1\nline 2\n")  # the last two bytes find no room
    sink.write(1, b"line 3\n")
    sink.write(1, b"line 4\n")
    disk.room_bytes = 1000
    sink.write(1, b"line 5\n")
    sink.write(1, b"line 6\n")

    cause = os.strerror(number)
    assert disk.content[1] == (
        b"line 1\nline \nnccltune: 16 bytes of output are missing here ("
        + cause.encode()
        + b")\nline 5\nline 6\n"
    )
    assert disk.content[2] == b""


def test_output_where_not_even_the_note_finds_room_counts_on(disk: Disk) -> None:
    sink = PassThrough()
    sink.write(2, b"lost\n")
    disk.room_bytes = 5
    sink.write(2, b"too\n")
    disk.room_bytes = 1000
    sink.write(2, b"here\n")

    text = disk.content[2].decode()
    assert text.endswith(
        "nccltune: 9 bytes of output are missing here (No space left on device)\nhere\n"
    )


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EBADF, errno.EIO])
def test_output_that_nobody_will_ever_read_is_given_up(disk: Disk, number: int) -> None:
    disk.error = number
    sink = PassThrough()
    sink.write(1, b"lost")
    disk.room_bytes = 1000

    sink.write(1, b"lost too")
    sink.write(2, b"read")

    assert disk.content == {1: b"", 2: b"read"}


# Processes that have ended.

_FETCHING = """
import os, time
from nccltune.supervise.process import ServerProcess
from tests.support.launching import zombies_of

# Ends after the server was started, as an errand that hung in the driver does.
receiving, sending = os.pipe()
early = os.fork()
if early == 0:
    os.close(sending)
    os.read(receiving, 1)
    os._exit(0)
server = ServerProcess(["sh", "-c", ORPHANS], os.environ, has_one_stream=True)
os.close(sending)
os.waitid(os.P_PID, early, os.WEXITED | os.WNOWAIT)
end_s = time.monotonic() + 20
while server.status is None and time.monotonic() < end_s:
    server.reap()
    time.sleep(0.02)
server.reap()
status = server.status
left = zombies_of(os.getpid())
server.kill_all()
server.close()
print(status, left)
"""


def test_orphans_are_fetched_behind_a_child_that_was_there_before_the_command() -> None:
    orphans = "for i in 1 2 3 4 5 6; do (sleep 0.05 &); done; sleep 0.5; exit 7"
    program = f"ORPHANS = {orphans!r}\n{_FETCHING}"

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.stdout.strip(), done.stderr) == ("7 []", "")
