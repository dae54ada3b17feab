"""Where a start is, and what counts as getting anywhere."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from nccltune.sglang.log_stages import LogLine, LogReader, Stage, read_event
from nccltune.sglang.start_progress import StartProgress

LOGS = Path(__file__).resolve().parents[1] / "data" / "sglang-logs"


def line(text: str, rank: str = "TP0") -> LogLine:
    return LogLine(rank, text, read_event(text))


def shards(done: int) -> LogLine:
    percent = 100 * done // 64
    return line(
        f"Loading safetensors checkpoint shards: {percent}% Completed | {done}/64 [00:01", ""
    )


def replay(name: str) -> tuple[StartProgress, float]:
    """Feed a real log at the times that it names."""
    progress, reader = StartProgress(), LogReader()
    began_s = now_s = 0.0
    for raw in (LOGS / name).read_bytes().splitlines(keepends=True):
        if found := re.search(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", raw):
            moment_s = datetime.fromisoformat(f"{found[1].decode()}+00:00").timestamp()
            began_s = began_s or moment_s
            now_s = moment_s - began_s
        for each in reader.feed(raw):
            progress.take(each, now_s)
    return progress, now_s


def test_progress_through_a_real_log_has_the_seconds_of_each_stage() -> None:
    progress, now_s = replay("tp2.log")

    times = [
        (each.step.stage, each.step.subject, each.duration_s) for each in progress.times(now_s)
    ]
    assert times[1:-1] == [
        (Stage.SERVER_ARGS, "", 24.0),
        (Stage.INIT_PARALLEL, "", 2.0),
        (Stage.WEIGHTS, "", 0.0),
        (Stage.DRAFT_WEIGHTS, "", 2.0),
        (Stage.KV_CACHE, "", 0.0),
        (Stage.CAPTURE_TARGET, "target verify", 7.0),
        (Stage.CAPTURE_DRAFT, "draft decode", 5.0),
        (Stage.CAPTURE_DRAFT, "draft extend", 3.0),
    ]
    assert progress.says_ready


def test_progress_counts_what_grows_and_not_what_is_said_again() -> None:
    progress = StartProgress()

    assert progress.take(line("Load weight begin."), 1.0)
    assert progress.take(shards(1), 2.0)
    assert not progress.take(shards(1), 3.0)
    assert progress.take(shards(2), 4.0)
    assert progress.progressed_s == 4.0
    assert progress.step.format() == "loading weights (2 of 64)"


def test_progress_by_a_line_of_a_new_kind_comes_once() -> None:
    progress = StartProgress()

    assert progress.take(line("compiling kernel 1 of many"), 1.0)
    assert not progress.take(line("compiling kernel 2 of many"), 2.0)
    assert progress.take(line("compiling something else"), 3.0)


@pytest.mark.parametrize(
    "text", ["Still loading... 30 s", "port 30000 is in use. Waiting for 12 s"]
)
def test_progress_is_none_where_a_server_only_says_that_it_waits(text: str) -> None:
    progress = StartProgress()
    progress.take(line(text), 1.0)

    for second in range(2, 100):
        progress.take(line(re.sub(r"\d+", str(second), text)), float(second))

    assert progress.progressed_s == 1.0


def test_progress_is_not_made_by_those_who_ask_for_it() -> None:
    progress = StartProgress()
    progress.take(line("Load weight begin."), 1.0)

    progress.take(line('INFO:     127.0.0.1:40592 - "GET /health HTTP/1.1" 503', ""), 9.0)

    assert progress.progressed_s == 1.0
    assert progress.last_text == "TP0: Load weight begin."


def test_progress_of_a_slower_rank_does_not_go_back() -> None:
    progress = StartProgress()
    progress.take(line("Capture draft decode CUDA graph begin."), 1.0)
    progress.take(line("Capture draft extend CUDA graph begin."), 2.0)

    progress.take(line("Capture draft decode CUDA graph begin.", "TP1"), 3.0)
    progress.take(line("Load weight begin.", "TP1"), 4.0)

    assert (progress.step.stage, progress.step.subject) == (Stage.CAPTURE_DRAFT, "draft extend")
    assert progress.progressed_s == 4.0  # it is a sign of life all the same


def test_progress_shows_what_is_counted_aside() -> None:
    progress = StartProgress()
    progress.take(line("Load weight begin."), 1.0)

    progress.take(line("Compiling kernels:  12%|#         | 3/25 [00:01<00:07,  3.1it/s]", ""), 2.0)

    assert progress.aside == "Compiling kernels 3 of 25"
    assert progress.step.stage is Stage.WEIGHTS
    assert progress.progressed_s == 2.0


def test_progress_takes_the_servers_own_word_for_warm_up_only() -> None:
    progress = StartProgress()

    progress.take(line("The server is fired up and ready to roll!", ""), 5.0)

    assert progress.step.stage is Stage.WARM_UP
    assert progress.says_ready


def test_progress_enters_a_stage_that_was_learnt_over_http_once() -> None:
    progress = StartProgress()

    assert progress.enter(Stage.WARM_UP, 3.0)
    assert not progress.enter(Stage.WARM_UP, 9.0)
    assert progress.progressed_s == 3.0


def test_progress_with_endless_new_words_stays_bounded() -> None:
    progress = StartProgress()

    for count in range(10_000):
        word = "".join(chr(97 + int(digit)) for digit in str(count))
        progress.take(line(f"word {word}"), float(count))

    assert progress.progressed_s < 5000.0
