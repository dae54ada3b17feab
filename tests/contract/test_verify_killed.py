"""kill -9 of a server, of one of its ranks, and of verify itself: a clear end, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from nccltune.verify.engine import run_verify
from nccltune.verify.record import VerifyRecord, newest_records
from nccltune.verify.serving.keeper import keeper_command
from nccltune.verify.spec import VerifyProgress, VerifyStage
from tests.support.hosts import REPOSITORY
from tests.support.launching import ignore_child_ends, is_alive, wait_for
from tests.support.standin_sglang.program import free_port
from tests.support.verifying import Watcher, make_spec, processes_of

LONG_RUNS = {"step_ms": 20}
_PROGRAM = """
import sys
from pathlib import Path
from nccltune.children import learn_ends
from nccltune.verify.engine import run_verify
from tests.support.verifying import Watcher, make_spec

learn_ends()  # as the command line does
folder, port, *wishes = sys.argv[1:]

def tell(progress):
    step = progress.moment.waited.step.name if progress.moment else ""
    print(progress.position, progress.stage, step, flush=True)

spec = make_spec(Path(folder), port=int(port), wishes=dict(w.split("=") for w in wishes))
run_verify(spec, Watcher(tell))
"""


def alive_in(folder: Path) -> list[str]:
    return [
        f"{one['role']} {one['pid']}"
        for one in processes_of(folder)
        if is_alive(int(str(one["pid"])))
    ]


def pid_of(folder: Path, role: str, *, rank: int | None = None) -> int:
    """The newest such process that runs."""
    found = [one for one in processes_of(folder) if one["role"] == role]
    chosen = [one for one in found if rank is None or one["tp_rank"] == rank]
    return int(str(chosen[-1]["pid"]))


def killing(victim: Callable[[], int]) -> Watcher:
    """Kill in the first run of the second boot."""

    def kill(progress: VerifyProgress) -> None:
        if progress.position == 1 and progress.note.startswith("run 1"):
            os.kill(victim(), signal.SIGKILL)

    return Watcher(kill)


def check_clear_end(record: VerifyRecord, folder: Path, who: str) -> None:
    (problem,) = record.problems
    assert problem.code == "server_died"
    assert problem.message.startswith(f"boot 2 of 4 (arm folk): {who} ended in the middle: ")
    assert "\n" not in problem.message
    assert [boot.arm for boot in record.boots] == ["default"]
    (kept,) = newest_records()
    assert kept.problems == record.problems
    assert [boot.arm for boot in kept.boots] == ["default"]
    wait_for(lambda: not alive_in(folder))


def test_killed_server_is_named_with_its_boot(tmp_path: Path) -> None:
    watcher = killing(lambda: pid_of(tmp_path, "parent"))

    record = run_verify(make_spec(tmp_path, wishes=LONG_RUNS), watcher)

    check_clear_end(record, tmp_path, "the server's own process")
    assert "SIGKILL" in record.problems[0].message


def test_killed_rank_is_named_with_its_boot(tmp_path: Path) -> None:
    watcher = killing(lambda: pid_of(tmp_path, "rank", rank=1))

    record = run_verify(make_spec(tmp_path, wishes=LONG_RUNS), watcher)

    check_clear_end(record, tmp_path, "rank TP1")


def test_rank_that_dies_while_its_server_lives_on_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccltune.verify.serving.boots.FALL_LIMIT_S", 0.5)

    def kill(progress: VerifyProgress) -> None:
        if progress.position == 1 and progress.note.startswith("run 1"):
            # The process that would notice is stopped, as one that hangs is.
            os.kill(pid_of(tmp_path, "parent"), signal.SIGSTOP)
            os.kill(pid_of(tmp_path, "rank", rank=0), signal.SIGKILL)

    record = run_verify(make_spec(tmp_path, wishes=LONG_RUNS), Watcher(kill))

    check_clear_end(record, tmp_path, "rank TP0")


def test_verify_goes_on_after_its_server_was_killed(tmp_path: Path) -> None:
    port = free_port()
    watcher = killing(lambda: pid_of(tmp_path, "parent"))
    run_verify(make_spec(tmp_path, port=port, wishes=LONG_RUNS), watcher)

    record = run_verify(make_spec(tmp_path, port=port, is_resume=True), Watcher())

    assert [boot.arm for boot in record.boots] == ["default", "folk", "folk", "default"]
    assert record.is_finished


@contextmanager
def verify_process(
    folder: Path, port: int, *wishes: str, preexec_fn: Callable[[], None] | None = None
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder), str(port), *wishes],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=preexec_fn,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_line(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"it ended with {process.wait()} before it said {beginning!r}")


@pytest.mark.parametrize(
    ("beginning", "wishes"),
    [
        (f"0 {VerifyStage.START} loading", ("silence_s=60",)),
        (f"1 {VerifyStage.MEASURE}", ("step_ms=50",)),
        (f"0 {VerifyStage.MEASURE}", ("step_ms=50", "ignore_term=1", "stray={folder}/stray")),
    ],
    ids=["in the start", "in a run", "server that will not end"],
)
def test_killed_verify_leaves_nothing_and_keeps_its_boots(
    tmp_path: Path, beginning: str, wishes: tuple[str, ...]
) -> None:
    port = free_port()
    wishes = tuple(wish.format(folder=tmp_path) for wish in wishes)
    with verify_process(tmp_path, port, *wishes) as process:
        wait_line(process, beginning)
        assert alive_in(tmp_path)
        process.kill()

        wait_for(lambda: not alive_in(tmp_path))

    if (tmp_path / "stray").exists():
        wait_for(lambda: not is_alive(int((tmp_path / "stray").read_text())))
    done = int(beginning.split()[0])
    (kept,) = newest_records()
    assert len(kept.boots) == done
    if not done:
        return
    record = run_verify(make_spec(tmp_path, port=port, is_resume=True), Watcher())
    assert record.id == kept.id
    assert len(record.boots) == 4


def test_killed_keeper_takes_the_server_along(tmp_path: Path) -> None:
    keepers: list[int] = []

    def kill(progress: VerifyProgress) -> None:
        if progress.note.startswith("run 1"):
            stat = Path(f"/proc/{pid_of(tmp_path, 'parent')}/stat").read_text()
            keepers.append(int(stat.rpartition(")")[2].split()[1]))
            os.kill(keepers[0], signal.SIGKILL)

    record = run_verify(make_spec(tmp_path, wishes=LONG_RUNS), Watcher(kill))

    assert record.problems[0].code == "server_died"
    assert keepers != [os.getpid()]
    wait_for(lambda: not alive_in(tmp_path))


def test_killed_server_is_named_where_verify_was_started_to_ignore_child_ends(
    tmp_path: Path,
) -> None:
    with verify_process(
        tmp_path, free_port(), "step_ms=20", preexec_fn=ignore_child_ends
    ) as process:
        wait_line(process, f"1 {VerifyStage.MEASURE}")
        os.kill(pid_of(tmp_path, "parent"), signal.SIGKILL)
        process.communicate(timeout=60)

    (kept,) = newest_records()
    assert "SIGKILL" in kept.problems[0].message
    wait_for(lambda: not alive_in(tmp_path))


# --- the keeper alone


def keep(
    *argv: str, preexec_fn: Callable[[], None] | None = None, **environ: str
) -> tuple[str, int, bytes]:
    """Run a command under a keeper; returns what it said, its status, and the command's output."""
    receiving, sending = os.pipe()
    os.set_inheritable(sending, True)
    with os.fdopen(receiving, "rb") as answer:
        process = subprocess.Popen(
            keeper_command(argv, sending),
            env={"PATH": os.environ["PATH"], **environ},
            stdout=subprocess.PIPE,
            close_fds=False,
            preexec_fn=preexec_fn,
        )
        os.close(sending)
        out, _ = process.communicate(timeout=30)
        return answer.read().decode().strip(), process.returncode, out


def test_keeper_hands_on_environment_output_and_status() -> None:
    said, status, out = keep("/usr/bin/env", LC_ALL="C", PYTHONPATH="/x", ODD="a=b\tc")

    assert said.isdecimal()
    assert status == 0
    block = dict(line.split("=", 1) for line in out.decode().splitlines())
    path = os.environ["PATH"]
    assert block == {"PATH": path, "LC_ALL": "C", "PYTHONPATH": "/x", "ODD": "a=b\tc"}
    assert keep("sh", "-c", "exit 7")[1] == 7
    assert keep("sh", "-c", "kill -9 $$")[1] == -signal.SIGKILL
    assert keep("sh", "-c", "kill -15 $$")[1] == -signal.SIGTERM


def test_keeper_started_to_ignore_child_ends_learns_them_and_hands_that_down() -> None:
    words = ("grep", "SigIgn", "/proc/self/status")
    bit = 1 << (signal.SIGCHLD - 1)

    assert keep("sh", "-c", "exit 7", preexec_fn=ignore_child_ends)[1] == 7
    assert keep("sh", "-c", "kill -9 $$", preexec_fn=ignore_child_ends)[1] == -signal.SIGKILL
    outs = [keep(*words, preexec_fn=ignore_child_ends)[2], keep(*words)[2]]
    assert [int(out.split()[1], 16) & bit for out in outs] == [bit, 0]


def test_keeper_says_why_there_is_no_server() -> None:
    said, status, _out = keep("/nowhere/sglang")

    assert said == "no such file or directory"
    assert status == 127


def test_keeper_hands_signals_on_and_leaves_handlers_as_they_were(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"trap 'exit 3' USR1; touch {ready}; while :; do sleep 0.05; done"
    receiving, sending = os.pipe()
    os.set_inheritable(sending, True)
    process = subprocess.Popen(keeper_command(["sh", "-c", script], sending), close_fds=False)
    os.close(sending)
    os.close(receiving)
    try:
        wait_for(ready.exists)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 3
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
