"""What a starting SGLang says of its stages: real logs, and wording of other releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.sglang.log_stages import LogLine, LogReader, Mark, Stage, StageEvent, read_event

LOGS = Path(__file__).resolve().parents[1] / "data" / "sglang-logs"
START_OF_TP2 = [
    (Stage.SERVER_ARGS, Mark.BEGIN),
    (Stage.INIT_PARALLEL, Mark.BEGIN),
    (Stage.INIT_PARALLEL, Mark.END),
    (Stage.WEIGHTS, Mark.BEGIN),
    (Stage.WEIGHTS, Mark.END),
    (Stage.DRAFT_WEIGHTS, Mark.BEGIN),
    (Stage.DRAFT_WEIGHTS, Mark.END),
    (Stage.DRAFT_WEIGHTS, Mark.BEGIN),
    (Stage.DRAFT_WEIGHTS, Mark.END),
    (Stage.KV_CACHE, Mark.BEGIN),
    (Stage.KV_CACHE, Mark.END),
    (Stage.KV_CACHE, Mark.BEGIN),
    (Stage.KV_CACHE, Mark.END),
    (Stage.CAPTURE_TARGET, Mark.BEGIN),
    (Stage.CAPTURE_TARGET, Mark.END),
    (Stage.CAPTURE_DRAFT, Mark.BEGIN),
    (Stage.CAPTURE_DRAFT, Mark.END),
    (Stage.CAPTURE_DRAFT, Mark.BEGIN),
    (Stage.CAPTURE_DRAFT, Mark.END),
    (Stage.READY, Mark.BEGIN),
    (Stage.WARM_UP, Mark.BEGIN),
]


def read(*chunks: bytes) -> list[LogLine]:
    reader = LogReader()
    lines = [line for chunk in chunks for line in reader.feed(chunk)]
    return [*lines, *reader.finish()]


def events(lines: list[LogLine]) -> list[StageEvent]:
    return [line.event for line in lines if line.event is not None]


@pytest.mark.parametrize(("name", "rank"), [("tp1.log", ""), ("tp2.log", "TP0")])
def test_reader_of_a_real_log_finds_every_stage_in_its_order(name: str, rank: str) -> None:
    lines = read((LOGS / name).read_bytes())

    found = [
        (line.event.stage, line.event.mark)
        for line in lines
        if line.event is not None and line.rank in ("", rank) and line.event.mark is not Mark.STEP
    ]

    assert found == START_OF_TP2


def test_reader_of_a_real_log_tells_ranks_apart() -> None:
    lines = read((LOGS / "tp2.log").read_bytes())

    assert {line.rank for line in lines} == {"", "TP0", "TP1"}
    verify = [line.rank for line in lines if line.event and line.event.subject == "target verify"]
    assert {"TP0", "TP1"} <= set(verify)


def test_reader_of_a_real_log_counts_captures_under_what_is_captured() -> None:
    steps = [each for each in events(read((LOGS / "tp2.log").read_bytes())) if each.total]

    counted = {(each.stage, each.subject, each.done, each.total) for each in steps if each.stage}
    assert counted == {
        (Stage.CAPTURE_TARGET, "target verify", 0, 1),
        (Stage.CAPTURE_TARGET, "target verify", 1, 1),
        (Stage.CAPTURE_DRAFT, "draft decode", 0, 1),
        (Stage.CAPTURE_DRAFT, "draft decode", 1, 1),
        (Stage.CAPTURE_DRAFT, "draft extend", 0, 1),
        (Stage.CAPTURE_DRAFT, "draft extend", 1, 1),
    }


@pytest.mark.parametrize("size", [1, 7, 37, 1000])
@pytest.mark.parametrize("name", ["tp1.log", "tp2.log"])
def test_reader_finds_the_same_events_however_the_output_is_cut(name: str, size: int) -> None:
    content = (LOGS / name).read_bytes()
    pieces = [content[at : at + size] for at in range(0, len(content), size)]

    assert events(read(*pieces)) == events(read(content))


def test_reader_learns_where_the_server_listens() -> None:
    urls = [each.url for each in events(read((LOGS / "tp1.log").read_bytes())) if each.url]

    assert urls == ["http://127.0.0.1:30123"]


def test_reader_shows_a_bar_that_has_no_end_yet() -> None:
    reader = LogReader()

    first = list(
        reader.feed(b"\rLoading safetensors checkpoint shards:  25% Completed | 1/4 [00:0")
    )
    second = list(reader.feed(b"1<00:03,  1.20s/it]\rLoading safetensors checkpoint shards:  50% "))
    third = list(reader.feed(b"Completed | 2/4 [00:02<00:02,  1.20s/it]\n"))

    counts = [[each.done for each in events(lines)] for lines in (first, second, third)]
    assert counts == [[1], [], [2]]


def test_reader_finds_a_line_that_landed_behind_a_bar() -> None:
    glued = (
        b"\rCapturing batches (bs=8 avail_mem=1.0 GB):   0%|          | 0/8 [00:00<?, ?it/s]"
        b"[2026-11-29 13:42:01 TP1] Scheduler hit an exception: Traceback\n"
    )

    lines = read(b"[2026-11-29 13:42:00 TP0] Capture target verify CUDA graph begin.\n", glued)

    assert [(line.rank, line.text[:18]) for line in lines][-1] == ("TP1", "Scheduler hit an e")
    assert events(lines)[-1] == StageEvent(
        Stage.CAPTURE_TARGET, Mark.STEP, "target verify", done=0, total=8
    )


def test_reader_takes_the_second_model_for_the_draft() -> None:
    log = (
        b"[2026-11-29 13:41:58 TP0] Load weight begin. avail mem=1 GB\n"
        b"Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.2s/it]\n"
        b"[2026-11-29 13:41:58 TP0] Load weight end. elapsed=0.24 s\n"
        b"[2026-11-29 13:41:59 TP0] Load weight begin. avail mem=1 GB\n"
        b"Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:01<00:00,  1.2s/it]\n"
    )

    assert [each.stage for each in events(read(log))] == [
        Stage.WEIGHTS,
        Stage.WEIGHTS,
        Stage.WEIGHTS,
        Stage.DRAFT_WEIGHTS,
        Stage.DRAFT_WEIGHTS,
    ]


@pytest.mark.parametrize(
    ("text", "stage", "mark"),
    [
        ("Init parallel begin.", Stage.INIT_PARALLEL, Mark.BEGIN),
        ("Init parallel ends. elapsed=0.99 s", Stage.INIT_PARALLEL, Mark.END),
        ("Init torch distributed begin.", Stage.INIT_PARALLEL, Mark.BEGIN),
        ("Capture cuda graph begin. This can take", Stage.CAPTURE_TARGET, Mark.BEGIN),
        ("Capture cuda graph end. Time elapsed: 5 s", Stage.CAPTURE_TARGET, Mark.END),
        ("Capture draft cuda graph begin. This", Stage.CAPTURE_DRAFT, Mark.BEGIN),
        ("Capture draft extend cuda graph begin.", Stage.CAPTURE_DRAFT, Mark.BEGIN),
        ("Capture target prefill CUDA graph begin.", Stage.CAPTURE_TARGET, Mark.BEGIN),
        ("server_args=ServerArgs(model_path='/m')", Stage.SERVER_ARGS, Mark.BEGIN),
        ("The server is fired up and ready to roll!", Stage.READY, Mark.BEGIN),
    ],
)
def test_event_in_the_wording_of_any_release_is_found(text: str, stage: Stage, mark: Mark) -> None:
    event = read_event(text)

    assert event is not None
    assert (event.stage, event.mark) == (stage, mark)


@pytest.mark.parametrize(
    "text",
    [
        "Capture cuda graph failed: CUDA out of memory",
        "Decode batch, #running-req: 1, accept rate: 0.50, gen throughput (token/s): 8.44",
        "token usage: 50% | 3 of 4",
        "",
    ],
)
def test_event_of_a_line_about_no_stage_is_none(text: str) -> None:
    assert read_event(text) is None


def test_event_of_a_bar_in_bytes_counts_percent() -> None:
    event = read_event("model-00001.safetensors:  12%|#2        | 1.2G/9.8G [00:10<01:10, 120MB/s]")

    assert event == StageEvent(None, Mark.STEP, "model-00001.safetensors", done=12, total=100)


def test_reader_survives_bytes_that_are_no_text_and_lines_without_end() -> None:
    lines = read(b"\xff\xfe\x00 noise\n", b"x" * 300_000, b"y" * 300_000, b"\nafter\n")

    assert [line.text for line in lines][-1] == "after"
    assert max(len(line.text) for line in lines) <= 64 * 1024


def test_stages_are_ordered_as_a_start_goes_through_them() -> None:
    assert [stage.order for stage in Stage] == list(range(len(Stage)))
    assert [stage for stage in Stage if stage.is_capture] == [
        Stage.CAPTURE_TARGET,
        Stage.CAPTURE_DRAFT,
    ]
