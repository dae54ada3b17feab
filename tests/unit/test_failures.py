"""Why a server died: the one line that tells, out of all that it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.sglang.failures import (
    FAILURE_WORDS,
    Failure,
    FailureKind,
    FailureWatch,
    is_nccl_stall,
)
from nccltune.sglang.log_stages import LogReader, Stage

LOGS = Path(__file__).resolve().parents[1] / "data" / "sglang-logs"
SIGQUIT = "Received sigquit from a child process. It usually means the child failed."


def explain(*texts: str) -> Failure:
    watch = FailureWatch()
    for text in texts:
        watch.take(text)
    return watch.explain()


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (FailureKind.USAGE, "sglang serve: error: unrecognized arguments: --tpp 8"),
        (FailureKind.USAGE, "launch_server.py: error: ambiguous option: --cuda-graph could match"),
        (
            FailureKind.PORT,
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): "
            "address already in use",
        ),
        (FailureKind.MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        (FailureKind.MEMORY, "RuntimeError: Not enough memory. Please try to increase --mem-frac"),
        (FailureKind.NCCL, "RuntimeError: NCCL error: unhandled cuda error"),
        (FailureKind.NCCL, "torch.distributed.DistBackendError: NCCL error in: Proc.cpp:3690"),
        (
            FailureKind.SLOW_RANK,
            "ValueError: TP rank 0 could finish the model loading, but there "
            "are other ranks that didn't finish loading.",
        ),
        (FailureKind.WATCHDOG, "Scheduler watchdog timeout (self.watchdog_timeout=300)"),
        (FailureKind.CHILD, "RuntimeError: Rank 1 scheduler died during initialization (exit cod"),
        (
            FailureKind.KILLED,
            "RuntimeError: Rank 1 scheduler died (exit code: -9). If exit code is",
        ),
        (
            FailureKind.NCCL,
            "RuntimeError: Rank 1 scheduler died (exit code: -8). If exit code is -9",
        ),
        (FailureKind.EXCEPTION, "ValueError: There is no safetensors file in /models/target"),
        (FailureKind.EXCEPTION, "huggingface_hub.errors.HFValidationError: Repo id must be"),
    ],
)
def test_failure_is_the_cause_and_not_its_consequences(kind: FailureKind, line: str) -> None:
    failure = explain(
        "Load weight begin. avail mem=138.31 GB",
        "Scheduler hit an exception: Traceback (most recent call last):",
        '  File "scheduler.py", line 1, in run_scheduler_process',
        line,
        SIGQUIT,
        "kill_process_tree called: parent_pid=7, include_parent=True, pid=7",
    )

    assert failure == Failure(kind, line)
    assert FAILURE_WORDS[kind] in failure.format()


def test_failure_of_a_peer_after_the_first_death_is_a_consequence() -> None:
    failure = explain(
        "ValueError: There is no safetensors file in /models/target",
        "torch.distributed.DistBackendError: [0] is setting up NCCL communicator: Connection reset",
    )

    assert failure.kind is FailureKind.EXCEPTION
    assert not failure.is_nccl


def test_failure_in_a_capture_that_ran_out_of_memory_is_of_memory() -> None:
    failure = explain(
        "RuntimeError: NCCL error: unhandled cuda error",
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.00 GiB",
    )

    assert failure.kind is FailureKind.MEMORY
    assert not failure.is_nccl


def test_failure_in_a_capture_that_nccl_caused_is_of_nccl() -> None:
    failure = explain("Exception: Capture cuda graph failed: NCCL error: internal error")

    assert failure.kind is FailureKind.NCCL
    assert failure.is_nccl


def test_failure_of_the_warm_up_names_what_it_ended_with() -> None:
    failure = explain(
        "Initialization failed. warmup error: Traceback (most recent call last):",
        '  File "http_server.py", line 1',
        "requests.exceptions.ReadTimeout: Read timed out. (read timeout=600)",
    )

    line = "requests.exceptions.ReadTimeout: Read timed out. (read timeout=600)"
    assert failure == Failure(FailureKind.WARM_UP, line)


def test_failure_without_a_known_word_is_the_last_line() -> None:
    assert explain("starting", "and on") == Failure(FailureKind.UNKNOWN, "and on")
    assert explain() == Failure(FailureKind.UNKNOWN, "")


def test_failure_where_only_the_parent_speaks_is_of_a_child() -> None:
    assert explain("Load weight begin.", SIGQUIT, "bye") == Failure(FailureKind.CHILD, SIGQUIT)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ('File "sglang/srt/distributed/device_communicators/pynccl.py", line 1', FailureKind.NCCL),
        ('File "transformers/tokenizer.py", line 1', FailureKind.CHILD),
    ],
)
def test_failure_by_a_crash_is_of_nccl_where_that_is_on_the_stack(
    frame: str, kind: FailureKind
) -> None:
    crash = "Fatal Python error: Floating point exception"

    assert explain(crash, "", "Current thread 0x01:", frame, SIGQUIT) == Failure(kind, crash)


def test_failure_is_final_once_the_server_gave_up() -> None:
    watch = FailureWatch()
    watch.take("RuntimeError: something that was caught")
    assert not watch.is_final

    watch.take("Scheduler hit an exception: Traceback (most recent call last):")
    assert watch.is_final


def test_failure_of_a_server_that_was_told_to_stop_is_none_of_its_children() -> None:
    watch = FailureWatch()
    for line in LogReader().feed((LOGS / "tp2.log").read_bytes()):
        watch.take(line.text)

    assert watch.explain().kind is FailureKind.UNKNOWN
    assert not watch.is_final


def test_failure_line_that_is_very_long_is_cut_around_what_tells() -> None:
    failure = explain("x" * 5000 + " NCCL error: internal error " + "y" * 5000)

    assert "NCCL error: internal error" in failure.line
    assert len(failure.line) <= 400


@pytest.mark.parametrize("stage", list(Stage))
def test_stall_may_be_of_nccl_only_where_collectives_run(stage: Stage) -> None:
    runs = stage in (
        Stage.INIT_PARALLEL,
        Stage.CAPTURE_TARGET,
        Stage.CAPTURE_DRAFT,
        Stage.WARM_UP,
    )

    assert is_nccl_stall(stage) is runs
