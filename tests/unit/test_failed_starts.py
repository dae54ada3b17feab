"""Which failed starts count against a profile, and what a log says of an end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.live.failed_starts import (
    UNKNOWN_DIGEST,
    Ending,
    Start,
    before_next_start,
    failures_against,
    read_log,
    uncounted_failures,
)

PROFILE, OTHER = "a" * 16, "b" * 16
LOGS = Path(__file__).resolve().parents[1] / "data/sglang-logs"


def starts(*endings: tuple[Ending, str | None] | Ending, command: str = "c1") -> list[Start]:
    """Return starts of one command, one a minute, under the profile unless said otherwise."""
    found = []
    for idx, each in enumerate(endings):
        ending, digest = each if isinstance(each, tuple) else (each, PROFILE)
        found.append(
            Start(
                boot_id="boot",
                pid=100 + idx,
                started_ticks=1,
                launched_at=f"2026-11-29T12:{idx:02}:00.000+00:00",
                command_digest=command,
                profile_name="mine" if digest else None,
                digest=digest,
                ending=ending,
            )
        )
    return found


def count(found: list[Start], *, activated_at: str = "") -> int:
    return len(failures_against(found, PROFILE, activated_at=activated_at))


def test_three_starts_that_die_in_nccl_count() -> None:
    assert count(starts(Ending.NCCL, Ending.NCCL, Ending.NCCL)) == 3


@pytest.mark.parametrize(
    "ending",
    [Ending.PORT, Ending.MEMORY, Ending.STOPPED, Ending.USAGE, Ending.ENDED, Ending.READY],
)
def test_three_starts_that_end_otherwise_do_not_count(ending: Ending) -> None:
    bare_success = (Ending.READY, None)

    assert count(starts(bare_success, ending, ending, ending)) == 0


@pytest.mark.parametrize("bare", [Ending.NCCL, Ending.FAILED])
def test_deaths_in_nccl_of_a_command_that_dies_without_the_profile_too_do_not_count(
    bare: Ending,
) -> None:
    assert count(starts((bare, None), Ending.NCCL, Ending.NCCL, Ending.NCCL)) == 0
    assert count(starts(Ending.NCCL, Ending.NCCL, Ending.NCCL, (bare, None))) == 0


NEUTRAL = [Ending.PORT, Ending.MEMORY, Ending.STOPPED, Ending.USAGE, Ending.ENDED]


@pytest.mark.parametrize("bare", [*NEUTRAL, Ending.UNKNOWN])
def test_deaths_without_the_profile_that_tell_nothing_excuse_nothing(bare: Ending) -> None:
    assert count(starts((bare, None), Ending.NCCL, Ending.NCCL)) == 2
    assert count(starts((Ending.READY, None), (bare, None), Ending.FAILED)) == 1


def test_start_under_nobody_knows_what_speaks_neither_for_the_profile_nor_against_it() -> None:
    unknown = UNKNOWN_DIGEST

    assert count(starts((Ending.NCCL, unknown), Ending.NCCL, Ending.NCCL)) == 2
    assert count(starts((Ending.READY, unknown), Ending.FAILED)) == 0
    assert count(starts(Ending.NCCL, (Ending.READY, unknown), (Ending.NCCL, unknown))) == 1


def test_deaths_of_another_command_without_the_profile_excuse_nothing() -> None:
    other = starts((Ending.NCCL, None), command="c2")

    assert count([*other, *starts(Ending.NCCL, Ending.NCCL)]) == 2


@pytest.mark.parametrize("ending", [Ending.FAILED, Ending.UNKNOWN])
def test_unclear_deaths_count_only_where_the_command_starts_without_the_profile(
    ending: Ending,
) -> None:
    under = starts(ending, ending, ending)

    assert count(under) == 0
    assert count([*starts((Ending.READY, None)), *[replace(s, pid=s.pid + 50) for s in under]]) == 3
    assert count([*under, *[replace(s, pid=9) for s in starts((Ending.READY, None))]]) == 3


def test_the_last_start_without_the_profile_decides() -> None:
    assert count(starts((Ending.READY, None), (Ending.FAILED, None), Ending.FAILED)) == 0
    assert count(starts((Ending.FAILED, None), (Ending.READY, None), Ending.FAILED)) == 1


def test_a_start_that_came_up_clears_what_was_before_it() -> None:
    assert count(starts(Ending.NCCL, Ending.NCCL, Ending.READY, Ending.NCCL)) == 1


def test_a_start_of_another_command_that_came_up_clears_nothing() -> None:
    up = [replace(start, pid=9) for start in starts(Ending.READY, command="c2")]

    assert count([*starts(Ending.NCCL, Ending.NCCL), *up]) == 2


def test_failures_of_different_commands_add_up() -> None:
    other = [replace(start, pid=9) for start in starts(Ending.NCCL, command="c2")]

    assert count([*starts(Ending.NCCL, Ending.NCCL), *other]) == 3


def test_failures_under_another_profile_do_not_count() -> None:
    assert count(starts((Ending.NCCL, OTHER), (Ending.NCCL, OTHER), (Ending.NCCL, OTHER))) == 0


def test_failures_that_a_roll_back_was_decided_with_do_not_count_again() -> None:
    spent = [replace(start, is_spent=True) for start in starts(Ending.NCCL, Ending.NCCL)]

    assert count(spent) == 0


def test_failures_before_the_profile_was_activated_again_do_not_count() -> None:
    found = starts(Ending.NCCL, Ending.NCCL, Ending.NCCL)

    assert count(found, activated_at="2026-11-29T12:01:30+00:00") == 1
    assert count(found, activated_at="2026-11-29T12:01:00+00:00") == 2
    assert count(found, activated_at="some day") == 3


def test_starts_that_are_not_to_be_trusted_speak_neither_way() -> None:
    def strangers(*endings: tuple[Ending, str | None] | Ending) -> list[Start]:
        return [replace(start, pid=9, is_trusted=False) for start in starts(*endings)]

    assert count(strangers(Ending.NCCL, Ending.NCCL, Ending.NCCL)) == 0
    assert count([*starts(Ending.NCCL, Ending.NCCL), *strangers(Ending.READY)]) == 2
    assert count([*strangers((Ending.NCCL, None)), *starts(Ending.NCCL)]) == 1
    assert count([*strangers((Ending.READY, None)), *starts(Ending.FAILED)]) == 0
    found = [*starts(Ending.NCCL), *strangers(Ending.NCCL, Ending.PORT, (Ending.NCCL, OTHER))]
    assert len(uncounted_failures(found, PROFILE)) == 1


def test_generation_goes_before_the_time_of_day() -> None:
    found = [replace(start, generation=4) for start in starts(Ending.NCCL, Ending.NCCL)]
    late = "2999-01-01T00:00:00+00:00"

    assert len(failures_against(found, PROFILE, activated_at=late, generation=4)) == 2
    assert len(failures_against(found, PROFILE, generation=5)) == 0
    assert len(failures_against(found, PROFILE, activated_at=late)) == 0


@pytest.mark.parametrize("name", ["tp1.log", "tp2.log"])
def test_read_log_of_a_real_server_that_came_up_is_ready(name: str) -> None:
    assert read_log((LOGS / name).read_text(encoding="utf-8")).ending is Ending.READY


def test_read_log_of_a_real_server_before_its_warm_up_is_not_ready() -> None:
    text = (LOGS / "tp2.log").read_text(encoding="utf-8").partition("The server is fired up")[0]

    assert read_log(text).ending is Ending.ENDED


BEGIN = "[2026-11-29 13:41:40 TP0] Init torch distributed begin.\n"
END = "[2026-11-29 13:41:41 TP0] Init torch distributed ends. elapsed=0.99 s, mem usage=0.97 GB\n"
HEAD = "[2026-11-29 13:41:42 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
DIED = (
    "RuntimeError: Rank 1 scheduler died during initialization (exit code: {}). If exit code is "
    "-9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.\n"
)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        (f"{HEAD}RuntimeError: NCCL error: invalid usage\n", Ending.NCCL),
        (
            f"{HEAD}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled "
            "system error\n",
            Ending.NCCL,
        ),
        (
            "Error : no algorithm/protocol available for function AllReduce\n"
            f"{HEAD}RuntimeError: NCCL error: invalid usage\n",
            Ending.NCCL,
        ),
        (
            f"{HEAD}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Cuda failure 2 'out of memory'\n",
            Ending.MEMORY,
        ),
        (f"{HEAD}torch.OutOfMemoryError: CUDA out of memory. Tried 1.00 GiB\n", Ending.MEMORY),
        (DIED.format(-9), Ending.MEMORY),
        (DIED.format(-8), Ending.NCCL),
        (DIED.format(-11), Ending.FAILED),
        (
            "[2026-11-29 13:41:42] ERROR:    [Errno 98] error while attempting to bind on address "
            "('127.0.0.1', 30000): address already in use\n",
            Ending.PORT,
        ),
        (f"{BEGIN}", Ending.NCCL),
        (f"{BEGIN}{END}", Ending.ENDED),
        (f"{BEGIN}{END}{BEGIN}{END}", Ending.ENDED),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first)"
            ':\n  File "sglang/srt/distributed/device_communicators/pynccl.py", line 100\n',
            Ending.NCCL,
        ),
        (
            'Fatal Python error: Segmentation fault\n  File "transformers/tokenizer.py", line 1\n',
            Ending.FAILED,
        ),
        (f"{HEAD}ValueError: There is no safetensors file in /models\n", Ending.FAILED),
        (
            "[2026-11-29 13:41:42] SIGTERM received. signum=None frame=None. Draining requests\n"
            f"{HEAD}RuntimeError: NCCL error: remote process exited\n",
            Ending.STOPPED,
        ),
        (f"{BEGIN}Traceback (most recent call last):\nKeyboardInterrupt\n", Ending.STOPPED),
        ("launch_server.py: error: unrecognized arguments: --foo\n", Ending.USAGE),
        (
            "nccltune: stalled in graph capture 3 of 23: no progress for 630 s "
            "(--stall-timeout-s 630)\n",
            Ending.NCCL,
        ),
        (
            "nccltune: stalled in loading weights: no progress for 630 s\n",
            Ending.FAILED,
        ),
        (
            "nccltune: not ready after 3600 s (--ready-timeout-s 3600), in loading weights\n",
            Ending.FAILED,
        ),
        ("./serve.sh: line 3:  4711 Segmentation fault      (core dumped) sglang\n", Ending.FAILED),
        ("nccltune: stopped by SIGTERM; the server ended (SIGKILL)\n", Ending.STOPPED),
        ("", Ending.ENDED),
        ("Port 30000 is already in use, trying port 30001\n", Ending.ENDED),
    ],
    ids=[
        "pynccl",
        "torch",
        "no_algorithm",
        "nccl_out_of_memory",
        "torch_out_of_memory",
        "rank_killed",
        "divided_by_zero",
        "segfault",
        "port",
        "hang_in_init",
        "after_init",
        "after_both_inits",
        "crash_in_nccl",
        "crash_elsewhere",
        "no_weights",
        "stopped",
        "interrupted",
        "usage",
        "stall_in_capture",
        "stall_in_weights",
        "not_ready",
        "crash_that_a_shell_tells",
        "stopped_launch",
        "nothing",
        "port_moved",
    ],
)
def test_read_log_names_the_end(text: str, ending: Ending) -> None:
    assert read_log(text).ending is ending


ARGS = "[2026-11-29 13:41:32] server_args=ServerArgs(port=1)\n"
ABORTED = "[rank1]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1\n"
SOURCE_LINES = [
    "    self.tp_worker = TpModelWorker(server_args=server_args, gpu_id=gpu_id)\n",
    "    _launch_subprocesses(server_args=server_args)\n",
    "        server_args=server_args,\n",
    "    check(server_args=ServerArgs(port=1))\n",
]


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        (f"{ARGS}{BEGIN}{END}{ARGS}{BEGIN}{HEAD}{ABORTED}", Ending.ENDED),
        (f"{ABORTED}{ARGS}{BEGIN}{END}{HEAD}ValueError: no weights\n", Ending.FAILED),
        (f"SIGTERM received. signum=None\n{ARGS}{BEGIN}{END}{HEAD}{ABORTED}", Ending.NCCL),
        (f"{BEGIN}{ARGS}{BEGIN}{END}", Ending.ENDED),
    ],
    ids=["next_start", "last_words_before", "stop_before", "hang_before"],
)
def test_read_log_takes_one_start_from_its_arguments_to_those_of_the_next(
    text: str, ending: Ending
) -> None:
    assert read_log(text).ending is ending


@pytest.mark.parametrize("line", SOURCE_LINES)
def test_no_source_line_is_taken_for_the_arguments_of_a_start(line: str) -> None:
    text = f"{ARGS}{BEGIN}{HEAD}torch.OutOfMemoryError: CUDA out of memory\n{line}{ABORTED}"

    assert read_log(text).ending is Ending.MEMORY
    assert before_next_start(text) == ""
    assert before_next_start(f"own\n{line}own\n{ARGS}next\n") == f"own\n{line}own\n"


@pytest.mark.parametrize(
    "head",
    ["", "[2026-11-29 13:41:32] ", "[2026-11-29 13:41:32 TP0] ", "50%| 1/2 [00:01<00:01][x] "],
)
def test_arguments_are_found_where_a_line_begins_and_behind_its_time(head: str) -> None:
    assert "before" in before_next_start(f"before\n{head}server_args=ServerArgs(port=1)\nafter\n")
    assert "after" not in before_next_start(f"before\n{head}server_args=ServerArgs(a)\nafter\n")


def test_read_log_keeps_the_telling_line_short_and_printable() -> None:
    reading = read_log(f"{HEAD}RuntimeError: NCCL error: \x1b[31m{'x' * 5000}\n")

    assert reading.detail.startswith("RuntimeError: NCCL error:")
    assert reading.detail.isprintable()
    assert len(reading.detail) <= 200
