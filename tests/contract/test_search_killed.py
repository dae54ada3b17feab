"""A search as a process of its own that is killed, interrupted, or runs out of disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from optuna.trial import TrialState

from nccltune.envvars import canonical
from nccltune.errors import BusyError
from nccltune.search.engine import run_search
from nccltune.search.space import Space
from tests.support.hosts import REPOSITORY, standin_bench
from tests.support.model_bench import ModelBench
from tests.support.search_program import Loud, search_plan
from tests.support.studies import FACTS, study_of

if TYPE_CHECKING:
    from nccltune.search.result import SearchResult

WINNER = {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2", "NCCL_MIN_CTAS": "16"}
START_DEADLINE_S = 30.0


class Quiet(Loud):
    """Says nothing."""

    def update(self, progress: object) -> None:
        """Take no note."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "studies" / "one.journal"


class Program:
    """A running search program, whose every process carries a mark in its environment."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.mark = f"mark@{random.randrange(1 << 60)}:NONE=1"
        faults = ";".join(filter(None, [options.pop("faults", ""), self.mark]))
        options = {"candidates": [WINNER], "faults": faults, **options}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.search_program", str(path), json.dumps(options)],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "TMPDIR": str(path.parents[1]),  # a killed one leaves a folder behind
            },
            text=True,
        )
        self.server = self.read()["server"]

    def read(self) -> dict[str, Any]:
        """Wait for its next line."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def await_launch(self, stage: str) -> None:
        """Wait until a launch of this stage begins."""
        while (line := self.read()) != {"stage": stage, "is_done": False}:
            assert "stage" in line

    def await_journal(self, line_count: int) -> None:
        """Wait until the journal has so many lines, or the search is over."""
        while self.process.poll() is None:
            if self.path.exists() and self.path.read_bytes().count(b"\n") >= line_count:
                return

    def last_word(self) -> dict[str, Any]:
        """Wait for its end, and return its last line."""
        lines, _ = self.process.communicate(timeout=START_DEADLINE_S)
        found: dict[str, Any] = json.loads(lines.splitlines()[-1])
        return found

    def kill(self) -> None:
        """End it as the kernel does when memory runs out."""
        self.process.kill()
        self.process.communicate(timeout=START_DEADLINE_S)

    def left(self) -> list[int]:
        """Name its processes that are still there, zombies aside."""
        mark = self.mark.encode()
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and mark in read_bytes(entry / "environ")
        ]

    def await_none_left(self) -> list[int]:
        """Wait until all are gone, and name those that are not."""
        end = time.monotonic() + 5.0
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.01)
        return left


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.kill()


def launches(path: Path) -> list[dict[str, Any]]:
    """Launches of the trials that a journal holds as finished, in order."""
    trials = study_of(path).get_trials(states=(TrialState.COMPLETE,))
    return [trial.user_attrs["launch"] for trial in trials]


def finished_in(content: bytes) -> int:
    """Count the finished trials among the whole lines of a journal."""
    operations = map(json.loads, content[: content.rfind(b"\n") + 1].splitlines())
    return sum(one["op_code"] == 6 and one["state"] == TrialState.COMPLETE for one in operations)


def finish(path: Path, **options: Any) -> SearchResult:
    """Resume in this process and search to the end."""
    plan = search_plan({"candidates": [WINNER], **options})
    with standin_bench(2) as bench:
        return run_search(plan, bench, path, is_resume=True, observer=Quiet())


def check_study(path: Path, trial_count: int) -> None:
    """Check that nothing but finished trials, each with its own parameters, is left."""
    states = Counter(trial.state for trial in study_of(path).trials)
    assert states[TrialState.COMPLETE] == trial_count
    assert set(states) <= {TrialState.COMPLETE, TrialState.FAIL}
    space = Space(FACTS, {})
    for trial in study_of(path).get_trials(states=(TrialState.COMPLETE,)):
        settings = trial.user_attrs["launch"]["settings"]
        assert space.settings(trial.params) == canonical(settings)


def test_search_killed_again_and_again_loses_no_finished_trial(
    path: Path, programs: list[Program]
) -> None:
    rng = random.Random(0)
    known: list[dict[str, Any]] = []
    for round_idx in range(8):
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        program = Program(path, trials=60, is_resume=path.exists(), seed=round_idx)
        programs.append(program)
        program.await_journal(lines + rng.randint(1, 40))
        program.kill()

        assert program.await_none_left() == []
        content = path.read_bytes()
        assert finished_in(content) >= len(known)
        if round_idx % 2:
            # As if it had died in the middle of the last write.
            last = content.rstrip(b"\n").rfind(b"\n") + 1
            path.write_bytes(content[: rng.randint(last, len(content) - 1)])
        kept = launches(path)
        assert kept[: len(known)] == known[: len(kept)]
        assert len(kept) >= len(known) - 1
        known = kept

    result = finish(path, trials=60)
    assert result.trial_count == 60
    assert launches(path)[: len(known)] == known
    check_study(path, 60)


@pytest.mark.parametrize("seed", range(6))
def test_journal_of_a_killed_search_cut_at_any_byte_goes_on(
    path: Path, programs: list[Program], seed: int
) -> None:
    rng = random.Random(seed)
    program = Program(path, trials=12)
    programs.append(program)
    program.await_journal(rng.randint(10, 120))
    program.kill()
    content = path.read_bytes()
    for _ in range(4):
        cut = content[: rng.randint(0, len(content))]
        path.write_bytes(cut)
        before = launches(path) if finished_in(cut) else []
        plan = search_plan({"candidates": [WINNER], "trials": len(before) + 3})

        result = run_search(plan, ModelBench(), path, is_resume=True, observer=Quiet())

        assert result.trial_count == max(1, len(before)) + (3 if before else 2)
        assert launches(path)[: len(before)] == before
        check_study(path, result.trial_count)


def test_search_killed_while_ranks_hang_leaves_no_process_behind(
    path: Path, programs: list[Program]
) -> None:
    hanging = {"NCCL_NTHREADS": "128"}
    program = Program(
        path, faults="leak@0:NCCL_NTHREADS=128", candidates=[hanging], deadline_s=60.0
    )
    programs.append(program)
    program.await_launch("search")
    end = time.monotonic() + 10.0
    while len(program.left()) < 4 and time.monotonic() < end:
        time.sleep(0.01)  # server, two ranks, and what one of them has started
    assert len(program.left()) == 4

    program.kill()

    assert program.await_none_left() == []
    assert finish(path, trials=4).trial_count == 4


@pytest.mark.parametrize("line_count", [3, 25, 60])
def test_search_with_ctrl_c_ends_at_once_and_keeps_everything(
    path: Path, programs: list[Program], line_count: int
) -> None:
    program = Program(path, trials=500)
    programs.append(program)
    program.await_journal(line_count)
    began = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    said = program.last_word()

    assert time.monotonic() - began < 5.0
    assert program.process.returncode == 0
    assert said["is_interrupted"]
    assert said["verdict"] == "inconclusive"
    known = launches(path)
    assert said["trial_count"] in (len(known), len(known) - 1)
    assert program.await_none_left() == []
    assert finish(path, trials=len(known) + 3).trial_count == len(known) + 3
    assert launches(path)[: len(known)] == known


def test_search_with_ctrl_c_while_a_candidate_hangs_does_not_wait_for_its_deadline(
    path: Path, programs: list[Program]
) -> None:
    hanging = {"NCCL_NTHREADS": "128"}
    program = Program(
        path, faults="leak@0:NCCL_NTHREADS=128", candidates=[hanging], deadline_s=60.0
    )
    programs.append(program)
    program.await_launch("search")
    time.sleep(0.1)
    program.process.send_signal(signal.SIGINT)
    began = time.monotonic()

    assert program.last_word()["is_interrupted"]
    assert time.monotonic() - began < 5.0
    assert program.await_none_left() == []


def test_second_search_beside_a_running_one_names_its_process(
    path: Path, programs: list[Program]
) -> None:
    program = Program(path, trials=500)
    programs.append(program)
    program.await_journal(5)
    plan = search_plan({"trials": 2})
    other = path.with_name("other.journal")

    with pytest.raises(BusyError, match=rf"another search \(process {program.process.pid}\)"):
        run_search(plan, ModelBench(), other, is_resume=False, observer=Quiet())

    program.kill()
    run_search(plan, ModelBench(), other, is_resume=False, observer=Quiet())


@pytest.mark.parametrize("file_limit_bytes", [700, 9_000, 40_000])
def test_search_on_a_full_disk_says_so_and_goes_on_later(
    path: Path, programs: list[Program], file_limit_bytes: int
) -> None:
    program = Program(path, trials=40, file_limit_bytes=file_limit_bytes)
    programs.append(program)
    said = program.last_word()

    assert said["error"] == "study_write"
    assert said["message"].startswith(f"{path}: cannot be written: File too large")
    assert "\n" not in said["message"]
    assert path.stat().st_size <= file_limit_bytes
    assert program.await_none_left() == []
    known = launches(path) if finished_in(path.read_bytes()) else []
    assert finish(path, trials=len(known) + 4).trial_count == len(known) + 4
    assert launches(path)[: len(known)] == known
