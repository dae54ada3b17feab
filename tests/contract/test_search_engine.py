"""Whole searches on real rank processes that stand in for GPUs."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.errors import BusyError, FileError, HostError
from nccltune.measurement import Outcome
from nccltune.payloads.derive import default_workload
from nccltune.search.engine import SearchPlan, run_search
from nccltune.search.result import Progress, SearchResult, Stage, Verdict
from nccltune.stats import geometric_mean
from tests.support.hosts import standin_bench
from tests.support.studies import FACTS, OBJECTIVE, study_of

if TYPE_CHECKING:
    from nccltune.bench.launcher import GpuBench

THRESHOLD = {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"}
WIDE = {"NCCL_MIN_CTAS": "16"}
IDLE = {"NCCL_BUFFSIZE": "1048576"}
FOLK = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
}
FAILING = {
    Outcome.CRASHED: {"NCCL_BUFFSIZE": "1000"},
    Outcome.REJECTED: {"NCCL_PROTO": "bogus"},
    Outcome.UNSUPPORTED: {"NCCL_ALGO": "allreduce:CollnetDirect"},
    Outcome.TIMEOUT: {"NCCL_MAX_CTAS": "3"},
    Outcome.WRONG_DATA: {"NCCL_MAX_CTAS": "5"},
}
FAULTS = (
    "crash@1:NCCL_BUFFSIZE=1000;reject@0:NCCL_PROTO=bogus;reject@1:NCCL_PROTO=bogus"
    ";unsupported@0:NCCL_ALGO=allreduce:CollnetDirect"
    ";unsupported@1:NCCL_ALGO=allreduce:CollnetDirect;gone@1:NCCL_NTHREADS=96"
)
"""By values that no search proposes: a host that fails three times in a row ends it."""

HOOKS = "hang@1:NCCL_MAX_CTAS=3;wrong_data@0:NCCL_MAX_CTAS=5"
PLAN = SearchPlan(workload=default_workload(), facts=FACTS)


class Watch:
    """Follows a search, and can press Ctrl-C at some moment of a stage."""

    def __init__(self, stage: Stage | None = None, moment: int = 0) -> None:
        self.seen: list[Progress] = []
        self._stage = stage
        self._moment = moment

    def update(self, progress: Progress) -> None:
        """Take note of one moment."""
        self.seen.append(progress)
        if progress.stage is self._stage:
            self._moment -= 1
            if self._moment < 0:
                raise KeyboardInterrupt


@pytest.fixture(scope="module")
def bench() -> Iterator[GpuBench]:
    with standin_bench(2, faults=FAULTS, test_fault=HOOKS, deadline_s=1.0) as bench:
        yield bench


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "studies" / "one.journal"


def search(
    bench: GpuBench,
    path: Path,
    *,
    is_resume: bool = False,
    watch: Watch | None = None,
    **changes: Any,
) -> SearchResult:
    plan = dataclasses.replace(PLAN, **changes)
    return run_search(plan, bench, path, is_resume=is_resume, observer=watch or Watch())


def test_search_improves_and_proves_it(bench: GpuBench, path: Path) -> None:
    result = search(
        bench,
        path,
        extra_candidates=({**THRESHOLD, **WIDE, **IDLE},),
        folk=FOLK,
        trial_count=3,
    )

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == {**THRESHOLD, **WIDE}
    assert result.score_ratio == pytest.approx(0.855, abs=0.01)
    assert result.score_interval.low < 0.855 < result.score_interval.high < 0.99
    assert result.source == "gpus"
    assert result.duel is not None
    assert result.duel.launch_count == 4 * result.duel.block_count
    assert result.duel.rejected_guards == ()
    assert result.ablation is not None
    assert [one.variable for one in result.ablation if one.is_dropped] == ["NCCL_BUFFSIZE"]
    assert result.collectives is not None
    assert result.collectives.outcome is Outcome.OK
    assert result.memory_bytes_per_gpu == 1 << 26
    assert result.not_run == ""
    assert result.trial_count == 3
    assert {row.size_bytes for row in result.payloads} == set(OBJECTIVE._graph_counts)
    scored = [row for row in result.payloads if row.weight]
    mean = geometric_mean([row.ratio for row in scored], [row.weight for row in scored])
    assert mean == pytest.approx(result.score_ratio, abs=0.01)


def test_search_measures_the_folk_profile_whole(bench: GpuBench, path: Path) -> None:
    result = search(bench, path, folk=FOLK, trial_count=2)

    (folk,) = result.comparisons
    assert folk.outcome is Outcome.OK
    assert set(folk.ratios) == {request.size_bytes for request in OBJECTIVE.requests}
    assert folk.ratios[67108864] == pytest.approx(3.0, rel=0.05)
    assert "3.0 times as long at" in folk.message


def test_search_by_itself_finds_what_helps(path: Path) -> None:
    # What is proposed next hangs on noise. So the space is as small as leaves no search of so many
    # trials without what helps, and no launch fails because the machine is busy.
    idle = ("NCCL_PROTO", "NCCL_ALGO", "NCCL_NTHREADS", "NCCL_MAX_CTAS", "NCCL_BUFFSIZE")
    pinned = dict.fromkeys((*idle, "NCCL_CGA_CLUSTER_SIZE"), "1")
    with standin_bench(2, deadline_s=30.0) as quiet:
        result = search(quiet, path, trial_count=40, seed=3, pinned=pinned)

    assert result.verdict is Verdict.IMPROVED
    assert result.score_ratio < 0.96
    assert result.trial_count == 40
    assert len(study_of(path).trials) == 40


def test_search_where_nothing_helps_keeps_the_defaults(bench: GpuBench, path: Path) -> None:
    pinned = {"NCCL_THREAD_THRESHOLDS": "8 8 64 16 8 64", "NCCL_MIN_CTAS": "2"}
    result = search(bench, path, trial_count=14, pinned=pinned)

    assert result.verdict is Verdict.KEEP_DEFAULT
    assert result.settings == {}
    assert result.sentence.startswith("The defaults are already best here: ")
    assert result.trial_count == 14


def test_search_counts_and_shows_every_way_to_fail(bench: GpuBench, path: Path) -> None:
    began = time.monotonic()
    watch = Watch()
    candidates = (*FAILING.values(), {**THRESHOLD, **WIDE})
    result = search(bench, path, extra_candidates=candidates, trial_count=7, watch=watch)

    assert result.outcome_counts == {Outcome.OK: 2, **dict.fromkeys(FAILING, 1)}
    assert {failure.outcome: failure.settings for failure in result.failures} == FAILING
    assert [failure.trial_idx for failure in result.failures] == [1, 2, 3, 4, 5]
    assert all(failure.message for failure in result.failures)
    assert watch.seen[-1].outcome_counts == result.outcome_counts
    assert result.verdict is Verdict.IMPROVED
    for trial in study_of(path).trials[1:6]:
        assert trial.value == 10.0
    # One deadline of 1 s was waited for, and everything else is quick.
    assert time.monotonic() - began < 8.0


def test_search_on_a_host_that_keeps_failing_ends_with_all_trials_kept(
    bench: GpuBench, path: Path
) -> None:
    candidates = (THRESHOLD, {"NCCL_NTHREADS": "96"})
    with pytest.raises(HostError, match="no CUDA-capable device") as caught:
        search(bench, path, extra_candidates=candidates, trial_count=10)

    assert caught.value.code == "host_failed"
    resumed = search(bench, path, is_resume=True, trial_count=5)
    assert resumed.trial_count == 5
    assert [trial.number for trial in study_of(path).trials] == [0, 1, 2, 3, 4]


def test_search_goes_on_when_the_process_that_ranks_are_forked_from_is_killed(path: Path) -> None:
    class Killer(Watch):
        """Kills it in the middle of the trials, and of the duel."""

        killed: tuple[tuple[Stage, int], ...] = ()

        def update(self, progress: Progress) -> None:
            super().update(progress)
            server = quiet._server._process.pid
            stages = [stage for stage, _ in self.killed]
            if progress.stage in (Stage.SEARCH, Stage.DUEL) and progress.stage not in stages:
                self.killed += ((progress.stage, server),)
                os.kill(server, signal.SIGKILL)

    watch = Killer()
    with standin_bench(2, deadline_s=30.0) as quiet:
        result = search(
            quiet, path, extra_candidates=({**THRESHOLD, **WIDE},), trial_count=4, watch=watch
        )

    assert [stage for stage, _ in watch.killed] == [Stage.SEARCH, Stage.DUEL]
    assert len({pid for _, pid in watch.killed}) == 2
    assert result.verdict is Verdict.IMPROVED
    assert result.trial_count == 4
    assert result.failures == ()


def test_search_saves_no_winner_under_which_other_collectives_fail(path: Path) -> None:
    with standin_bench(2, faults="wrong_collective@1:NCCL_MIN_CTAS=16") as bench:
        result = search(bench, path, extra_candidates=(WIDE,), trial_count=2)

    assert result.verdict is Verdict.KEEP_DEFAULT
    assert result.settings == {}
    assert result.duel is not None
    assert result.duel.verdict is Verdict.IMPROVED
    assert result.collectives is not None
    assert result.collectives.outcome is Outcome.WRONG_DATA
    assert "all_gather" in result.collectives.message
    assert "other collectives ended wrong_data" in result.sentence


@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("stage", Stage)
def test_search_interrupted_reports_what_is_known_and_goes_on_from_there(
    bench: GpuBench, path: Path, stage: Stage, moment: int
) -> None:
    asked: dict[str, Any] = {"extra_candidates": ({**THRESHOLD, **WIDE},), "trial_count": 4}
    stopped = search(bench, path, watch=Watch(stage, moment), **asked)
    known = [trial.user_attrs["launch"] for trial in study_of(path).trials]

    assert stopped.is_interrupted
    assert stopped.verdict is Verdict.INCONCLUSIVE
    assert stopped.settings == {}
    assert stopped.trial_count == len(known)
    resumed = search(bench, path, is_resume=True, **asked)
    assert resumed.verdict is Verdict.IMPROVED
    told = [trial.user_attrs["launch"] for trial in study_of(path).trials]
    assert told[: len(known)] == known
    assert len(told) == resumed.trial_count == 4


@pytest.mark.parametrize(
    ("again", "total"),
    [
        ({"trial_count": 2, "keeps_trial_count": True}, 4),
        ({"trial_count": 40, "keeps_trial_count": True}, 4),
        ({"trial_count": 5}, 5),
    ],
)
def test_search_that_is_resumed_has_as_many_trials_as_asked_for_before_or_now(
    bench: GpuBench, path: Path, again: dict[str, Any], total: int
) -> None:
    stopped = search(bench, path, watch=Watch(Stage.SEARCH, 1), trial_count=4)
    assert stopped.trial_count < 4

    resumed = search(bench, path, is_resume=True, **again)

    assert (resumed.trial_count, resumed.trial_limit) == (total, total)


@pytest.mark.parametrize("timeout_s", [0.001, 0.4, 1.5])
def test_search_ends_in_time_with_a_proof_or_without(
    bench: GpuBench, path: Path, timeout_s: float
) -> None:
    began = time.monotonic()
    result = search(
        bench,
        path,
        extra_candidates=({**THRESHOLD, **WIDE},),
        trial_count=10_000,
        timeout_s=timeout_s,
    )

    assert time.monotonic() - began < timeout_s + 2.0
    assert 1 <= result.trial_count < 1000
    assert not result.is_interrupted


def test_search_with_a_time_limit_keeps_enough_of_it_to_prove_the_winner(
    bench: GpuBench, path: Path
) -> None:
    result = search(
        bench,
        path,
        extra_candidates=({**THRESHOLD, **WIDE},),
        trial_count=10_000,
        timeout_s=2.0,
    )

    assert result.verdict is Verdict.IMPROVED
    assert result.duel is not None


def test_second_search_on_the_host_is_kept_out(bench: GpuBench, path: Path) -> None:
    refused: list[BusyError] = []

    class Second(Watch):
        def update(self, progress: Progress) -> None:
            if not refused:
                with pytest.raises(BusyError, match="another search") as caught:
                    search(bench, path.with_name("other.journal"), trial_count=2)
                refused.append(caught.value)

    search(bench, path, watch=Second(), trial_count=3)

    assert refused[0].code == "search_running"
    assert not path.with_name("other.journal").exists()
    search(bench, path.with_name("other.journal"), trial_count=2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"workload": default_workload({1: 1.0})}, "payloads"),
        ({"identity": {"fingerprint": {"driver": "2"}}}, "GPUs, driver or NCCL"),
    ],
    ids=["workload", "host"],
)
def test_resume_of_another_search_is_refused(
    bench: GpuBench, path: Path, changes: dict[str, Any], named: str
) -> None:
    identity = {"fingerprint": {"driver": "1"}}
    search(bench, path, trial_count=2, identity=identity)

    with pytest.raises(FileError, match=rf"\({named} differ\)"):
        search(bench, path, is_resume=True, trial_count=3, **{"identity": identity, **changes})

    assert search(bench, path, is_resume=True, trial_count=3, identity=identity).trial_count == 3


def test_resume_of_a_damaged_journal_names_the_line(bench: GpuBench, path: Path) -> None:
    search(bench, path, trial_count=3)
    lines = path.read_bytes().splitlines()
    lines[10] = lines[10][:20] + b"\x00" + lines[10][21:]
    path.write_bytes(b"\n".join(lines) + b"\n")

    with pytest.raises(FileError, match=r"one\.journal:11: is damaged") as caught:
        search(bench, path, is_resume=True, trial_count=4)

    assert caught.value.line == 11


def test_resume_of_a_journal_that_lost_a_line_says_damaged(bench: GpuBench, path: Path) -> None:
    search(bench, path, trial_count=3)
    lines = path.read_bytes().splitlines(keepends=True)
    left = [line for line in lines if b'"launch"' not in line]
    path.write_bytes(b"".join(left))

    with pytest.raises(FileError, match="is damaged") as caught:
        search(bench, path, is_resume=True, trial_count=4)

    assert caught.value.code == "damaged_study"
