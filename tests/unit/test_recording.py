from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nccltune.errors import BusyError, FileError, UsageProblem
from nccltune.measurement import Launch, Outcome, PayloadMeasurement, PayloadRequest
from nccltune.recording import (
    Manifest,
    PayloadShape,
    RecordedLaunch,
    RecordedTimes,
    Recording,
    RecordingBench,
    RecordingWriter,
    find_recording,
    format_recording,
    list_recordings,
    load_recording,
    parse_recording,
    save_recording,
)

PATH = Path("two.json")
SMALL, LARGE = 43008, 67108864
FOLK = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}


def make_manifest() -> Manifest:
    return Manifest(
        origin="made up for a test",
        command="nccltune recording make",
        tool_version="0.1.0",
        gpus="2x TEST",
        driver=None,
        nccl="2.28.9",
        torch=None,
        recorded_at="2026-01-02T03:04:05+00:00",
        method="none",
        base_environment={"NCCL_NVLS_ENABLE": "0"},
        world_size=2,
        payloads=(PayloadShape(SMALL, 123), PayloadShape(LARGE, 4)),
    )


def make_launch(settings: dict[str, str], small_us: float, large_us: float) -> RecordedLaunch:
    return RecordedLaunch(
        settings,
        Outcome.OK,
        (
            RecordedTimes.from_samples(SMALL, [small_us, small_us + 1.0, small_us + 2.0]),
            RecordedTimes(LARGE, median_us=large_us, min_us=large_us - 1.0, p90_us=large_us + 1.0),
        ),
    )


def make_recording(*launches: RecordedLaunch) -> Recording:
    return Recording("two", make_manifest(), launches)


def test_candidate_count_counts_no_spelling_twice_and_no_baseline() -> None:
    spellings = [{"NCCL_PROTO": "ll"}, {"NCCL_PROTO": "allreduce:LL"}, {"NCCL_PROTO": "Simple"}]
    recording = make_recording(*(make_launch(each, 10.0, 20.0) for each in ({}, *spellings)))

    assert recording.candidate_count == 2


def make_requests(*sizes_bytes: int) -> list[PayloadRequest]:
    return [PayloadRequest(size_bytes, graph_count=4) for size_bytes in sizes_bytes]


def live_launch(settings: dict[str, str], small_us: float) -> Launch:
    payloads = tuple(
        PayloadMeasurement.from_samples(size, [small_us, small_us + 0.5], is_data_ok=True)
        for size in (SMALL, LARGE)
    )
    return Launch(settings, Outcome.OK, payloads, duration_s=1.5, memory_bytes=(7, 8))


BASELINE = make_launch({}, 7.0, 250.0)
TUNED = make_launch({"NCCL_NTHREADS": "256"}, 6.0, 251.0)


# format


def test_recording_written_and_read_is_the_same() -> None:
    failed = RecordedLaunch(
        {"NCCL_BUFFSIZE": "1000"},
        Outcome.CRASHED,
        message="rank 1 died of SIGFPE\nin the first all-reduce",
        started_at="2026-01-02T03:04:06+00:00",
        duration_s=2.25,
        failed_rank=1,
        phases_s={"start": 0.5},
        memory_bytes=(1024, 2048),
    )
    wrong = RecordedLaunch(
        {"NCCL_NTHREADS": "480"},
        Outcome.WRONG_DATA,
        (RecordedTimes.from_samples(SMALL, [3.0], is_data_ok=False),),
    )
    manifest = replace(make_manifest(), fingerprint={"gpu_count": 2})
    recording = Recording("two", manifest, (BASELINE, failed, wrong, TUNED, BASELINE))

    text = format_recording(recording)

    assert parse_recording(text, PATH) == recording
    assert sum('"settings"' in line for line in text.splitlines()) == 5


def test_samples_are_kept_raw_and_summary_is_derived() -> None:
    times = RecordedTimes.from_samples(SMALL, [9.0, 7.0, 8.0])

    assert times.samples_us == (9.0, 7.0, 8.0)
    assert (times.min_us, times.median_us) == (7.0, 8.0)
    assert times.p10_us == pytest.approx(7.2)


Spoil = Callable[[str], str]


def swap(old: str, new: str) -> Spoil:
    def spoil(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "too early", id="truncated"),
        pytest.param(lambda text: text[:-4], "too early", id="last_bracket_missing"),
        pytest.param(lambda _: "", "empty", id="empty"),
        pytest.param(lambda _: "[1]", "must be an object", id="no_object"),
        pytest.param(swap("recording/1", "recording/2"), "nccltune.recording/2", id="schema"),
        pytest.param(swap('"schema": "nccltune.recording/1",', ""), "schema", id="no_schema"),
        pytest.param(swap('"two"', '"../two"'), "../two", id="name_is_path"),
        pytest.param(swap('"2x TEST"', "2"), "'gpus', not 2", id="manifest_type"),
        pytest.param(swap('"origin"', '"orign"'), "origin", id="manifest_typing_error"),
        pytest.param(swap('"world_size": 2', '"world_size": 1'), "world_size", id="one_rank"),
        pytest.param(swap("2026-01-02T", "yesterday "), "yesterday", id="no_moment"),
        pytest.param(swap("123", "0"), "graph_count", id="no_graph"),
        pytest.param(swap("67108864", "43008"), "none twice", id="size_twice"),
        pytest.param(swap('"launches"', '"lunches"'), "launches", id="no_launches"),
    ],
)
def test_parse_bad_document_is_refused(spoil: Spoil, expected: str) -> None:
    text = spoil(format_recording(make_recording(BASELINE, TUNED)))

    with pytest.raises(FileError) as caught:
        parse_recording(text, PATH)

    assert expected in str(caught.value)
    assert str(caught.value).startswith("two.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(swap("[6.0,", "[-6.0,"), "-6.0", id="negative_sample"),
        pytest.param(swap("[6.0,", "[0,"), "not 0", id="zero_sample"),
        pytest.param(swap("[6.0,", "[true,"), "true", id="bool_sample"),
        pytest.param(swap("[6.0,", '["6.0",'), '"6.0"', id="text_sample"),
        pytest.param(swap("[6.0,7.0,8.0]", "[]"), "samples_us", id="no_sample"),
        pytest.param(swap("251.0", "1e999"), "median_us", id="infinite_median"),
        pytest.param(swap("251.0", "9" * 400), "median_us", id="huge_median"),
        pytest.param(swap("251.0", "249.0"), "ascend", id="median_below_minimum"),
        pytest.param(swap('"median_us":251.0,', ""), "median_us", id="no_median"),
        pytest.param(swap('"67108864":', '"1024":'), "1024", id="unknown_payload"),
        pytest.param(swap('"67108864":', '"64MiB":'), "64MiB", id="size_with_unit"),
        pytest.param(swap('"43008":', '"67108864":'), "67108864", id="payload_twice"),
        pytest.param(swap('"256"', "256"), "NCCL_NTHREADS", id="setting_not_text"),
        pytest.param(swap('"outcome":"ok"', '"outcome":"fine"'), "fine", id="unknown_outcome"),
        pytest.param(swap('"outcome"', '"outcom"'), "outcome", id="typing_error"),
        pytest.param(swap('"outcome":', '"extra":1,"outcome":'), "extra", id="unknown_key"),
        pytest.param(swap("]}", '],"is_data_ok":false}'), "wrong data", id="ok_with_wrong_data"),
    ],
)
def test_parse_bad_launch_names_line_and_text(spoil: Spoil, expected: str) -> None:
    lines = format_recording(make_recording(BASELINE, TUNED, BASELINE)).splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if '"256"' in text)
    lines[line - 1] = spoil(lines[line - 1])

    with pytest.raises(FileError) as caught:
        parse_recording("\n".join(lines), PATH)

    assert str(caught.value).startswith(f"two.json:{line}: ")
    assert expected in str(caught.value)


def test_parse_not_a_number_is_refused() -> None:
    text = format_recording(make_recording(BASELINE)).replace("250.0", "NaN")

    with pytest.raises(FileError, match="NaN"):
        parse_recording(text, PATH)


def test_parse_launch_lacking_a_payload_is_refused() -> None:
    short = replace(TUNED, payloads=TUNED.payloads[:1])
    text = format_recording(make_recording(BASELINE, short))

    with pytest.raises(FileError, match="lacks payload 67108864"):
        parse_recording(text, PATH)


def test_load_unreadable_file_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"name": "\xff"}')

    with pytest.raises(FileError, match=r"binary\.json.*UTF-8"):
        load_recording(binary)
    with pytest.raises(FileError, match=r"gone\.json.*No such file"):
        load_recording(tmp_path / "gone.json")
    with pytest.raises(FileError, match="directory"):
        load_recording(tmp_path)


# finding


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NCCLTUNE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_find_recording_by_name_prefers_the_one_made_here(state_dir: Path) -> None:
    shipped_path = find_recording("h200-2x-shm")[1]
    save_recording(make_recording(BASELINE), state_dir / "recordings" / "h200-2x-shm.json")

    recording, path = find_recording("h200-2x-shm")

    assert path != shipped_path
    assert recording.name == "two"
    entry = next(found for found in list_recordings() if found.name == "h200-2x-shm")
    assert (entry.path, entry.where) == (path, "state")


def test_find_recording_by_path_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_recording(make_recording(BASELINE), path)

    assert find_recording(str(path)) == (make_recording(BASELINE), path)


@pytest.mark.usefixtures("state_dir")
def test_find_recording_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageProblem, match=r"'nope'.*h200-2x-nvlink, h200-2x-shm"):
        find_recording("nope")


# bench


def test_launch_baseline_hands_out_recorded_launches_in_turn() -> None:
    recording = make_recording(BASELINE, TUNED, make_launch({}, 8.0, 260.0))
    bench = RecordingBench(recording)

    answers = [bench.launch({}, make_requests(LARGE)).median_us[LARGE] for _ in range(3)]

    assert answers == [250.0, 260.0, 250.0]
    assert [launch.median_us[LARGE] for launch in bench.baseline_launches()] == [250.0, 260.0]
    assert bench.source == "recording:two"


def test_launch_candidate_pools_its_launches() -> None:
    settings = {"NCCL_NTHREADS": "256"}
    several = [make_launch(settings, small_us, 250.0) for small_us in (6.0, 9.0, 7.0)]
    recording = make_recording(BASELINE, *several)

    pooled = RecordingBench(recording).launch(settings, make_requests(SMALL, LARGE))
    one_by_one = RecordingBench(recording, is_pooled=False)

    assert pooled.median_us == {SMALL: 8.0, LARGE: 250.0}
    assert pooled.payloads[0].samples_us == (6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 7.0, 8.0, 9.0)
    assert pooled.payloads[1].p10_us is None
    answers = [one_by_one.launch(settings, make_requests(SMALL)).median_us for _ in range(4)]
    assert [answer[SMALL] for answer in answers] == [7.0, 10.0, 8.0, 7.0]


def test_launch_answers_in_request_order_and_only_what_was_asked() -> None:
    bench = RecordingBench(make_recording(BASELINE, TUNED))

    both = bench.launch(TUNED.settings, make_requests(LARGE, SMALL))
    one = bench.launch(TUNED.settings, make_requests(SMALL))

    assert [payload.size_bytes for payload in both.payloads] == [LARGE, SMALL]
    assert both.is_complete
    assert list(one.median_us) == [SMALL]


def test_launch_caller_has_seen_enough_is_pruned() -> None:
    bench = RecordingBench(make_recording(BASELINE, TUNED))
    seen: list[int] = []

    def stop(payload: PayloadMeasurement) -> bool:
        seen.append(payload.size_bytes)
        return False

    launch = bench.launch(TUNED.settings, make_requests(SMALL, LARGE), keep_going=stop)

    assert seen == [SMALL]
    assert list(launch.median_us) == [SMALL]
    assert (launch.is_pruned, launch.is_complete) == (True, False)


def test_launch_recorded_failure_is_answered_as_it_was() -> None:
    settings = {"NCCL_BUFFSIZE": "1000"}
    crashed = RecordedLaunch(
        settings, Outcome.CRASHED, TUNED.payloads[:1], message="rank 1 died", failed_rank=1
    )
    good = make_launch(settings, 6.0, 250.0)
    bench = RecordingBench(make_recording(BASELINE, good, crashed))

    launch = bench.launch(settings, make_requests(SMALL, LARGE))

    assert (launch.outcome, launch.message, launch.failed_rank) == (
        Outcome.CRASHED,
        "rank 1 died",
        1,
    )
    assert list(launch.median_us) == [SMALL]


def test_bench_launch_that_failed_by_the_hosts_fault_is_left_out() -> None:
    busy = RecordedLaunch({"NCCL_NTHREADS": "64"}, Outcome.HOST_BUSY)
    bench = RecordingBench(
        make_recording(BASELINE, busy, TUNED, replace(TUNED, outcome=busy.outcome))
    )

    assert bench.candidates == (TUNED.settings,)
    assert bench.launch(TUNED.settings, make_requests(SMALL)).outcome is Outcome.OK


def test_launch_size_not_recorded_names_the_recorded_ones() -> None:
    bench = RecordingBench(make_recording(BASELINE))

    with pytest.raises(UsageProblem, match="1024 bytes, only 43008, 67108864"):
        bench.launch({}, make_requests(SMALL, 1024))


def test_launch_settings_not_recorded_is_a_bug() -> None:
    bench = RecordingBench(make_recording(BASELINE))

    with pytest.raises(ValueError, match="NCCL_NTHREADS"):
        bench.launch({"NCCL_NTHREADS": "64"}, make_requests(SMALL))


def test_bench_without_baseline_is_refused() -> None:
    failed = RecordedLaunch({}, Outcome.TIMEOUT)

    with pytest.raises(FileError, match=r"two\.json: .*defaults"):
        RecordingBench(make_recording(TUNED, failed), path=PATH)


def bench_of(*candidates: dict[str, str]) -> RecordingBench:
    launches = [make_launch(settings, 6.0, 250.0) for settings in candidates]
    return RecordingBench(make_recording(BASELINE, *launches))


@pytest.mark.parametrize(
    ("proposal", "expected"),
    [
        pytest.param({"NCCL_NTHREADS": "64"}, {"NCCL_NTHREADS": "128"}, id="number_nearby"),
        pytest.param(
            {"NCCL_NTHREADS": "512", "NCCL_PROTO": "allreduce:LL"},
            {"NCCL_NTHREADS": "512", "NCCL_PROTO": "allreduce:LL"},
            id="itself",
        ),
        pytest.param({"NCCL_MAX_NCHANNELS": "8"}, {"NCCL_MAX_CTAS": "16"}, id="older_name"),
        pytest.param(FOLK, FOLK, id="folk"),
        pytest.param(
            {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 8 -2 -2"},
            {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"},
            id="threshold_nearby",
        ),
        pytest.param(
            {"NCCL_THREAD_THRESHOLDS": "4 -2 -2 -2 -2 -2", "NCCL_PROTO": "allreduce:Simple"},
            {"NCCL_PROTO": "allreduce:Simple"},
            id="other_threshold_is_as_far_as_none",
        ),
    ],
)
def test_nearest_returns_the_closest_recorded(
    proposal: dict[str, str], expected: dict[str, str]
) -> None:
    bench = bench_of(
        {"NCCL_NTHREADS": "128"},
        {"NCCL_NTHREADS": "512"},
        {"NCCL_NTHREADS": "512", "NCCL_PROTO": "allreduce:LL"},
        {"NCCL_MAX_CTAS": "16"},
        {"NCCL_MAX_CTAS": "1"},
        {"NCCL_PROTO": "allreduce:Simple"},
        {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"},
        {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 32 -2 -2"},
        FOLK,
    )

    assert bench.nearest(proposal, []) == expected


def test_nearest_same_settings_in_other_words_prefers_the_exact() -> None:
    prefixed, plain = {"NCCL_PROTO": "allreduce:LL"}, {"NCCL_PROTO": "LL"}
    bench = bench_of(prefixed, plain)

    assert bench.nearest(plain, []) == plain
    assert bench.nearest(prefixed, []) == prefixed
    assert bench.nearest(plain, [plain]) == prefixed


def test_nearest_skips_tried_and_baseline_until_nothing_is_left() -> None:
    bench = bench_of({"NCCL_NTHREADS": "128"}, {"NCCL_NTHREADS": "512"})
    tried: list[dict[str, str]] = []

    while (found := bench.nearest({}, tried)) is not None:
        tried.append(dict(found))

    assert sorted(settings["NCCL_NTHREADS"] for settings in tried) == ["128", "512"]


def test_nearest_tie_does_not_depend_on_the_order_of_the_file() -> None:
    candidates = [{"NCCL_MAX_CTAS": "1"}, {"NCCL_NTHREADS": "64"}, {"NCCL_PROTO": "allreduce:LL"}]
    proposals = [{"NCCL_CGA_CLUSTER_SIZE": str(size)} for size in range(9)]

    def answers(ordered: Sequence[dict[str, str]]) -> list[object]:
        bench = bench_of(*ordered)
        return [bench.nearest(proposal, []) for proposal in proposals]

    assert answers(candidates) == answers(candidates[::-1])
    assert len({json.dumps(answer) for answer in answers(candidates)}) > 1


# writer


def test_writer_appends_over_several_openings(tmp_path: Path) -> None:
    path = tmp_path / "made" / "two.json"
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0), started_at=moment)
        writer.append(Launch({"NCCL_PROTO": "bogus"}, Outcome.REJECTED, message="code 5"))
    assert not path.exists()

    with RecordingWriter(path, "two", make_manifest()) as writer:
        assert [one.settings for one in writer.launches].count({}) == 1
        writer.append(live_launch({}, 8.0))
        finished = writer.finish()

    assert load_recording(path) == finished
    assert [launch.outcome for launch in finished.launches] == ["ok", "rejected", "ok"]
    assert finished.launches[0].started_at == "2026-01-02T03:04:05+00:00"
    assert finished.launches[0].payloads[0].samples_us == (7.0, 7.5)
    assert list(tmp_path.rglob("*")) == [path.parent, path]


def test_writer_misses_what_it_holds_in_no_spelling(tmp_path: Path) -> None:
    held = ({"NCCL_PROTO": "LL", "NCCL_MAX_NCHANNELS": "16"}, {"NCCL_MIN_CTAS": "8"})
    respelled = ({"NCCL_MAX_CTAS": "16", "NCCL_PROTO": "allreduce:ll"}, {"NCCL_MIN_NCHANNELS": "8"})
    others = [{"NCCL_PROTO": "LL"}, {"NCCL_MIN_CTAS": "16"}]

    with RecordingWriter(tmp_path / "two.json", "two", make_manifest()) as writer:
        assert writer.missing(held) == list(held)
        writer.append(live_launch(held[0], 7.0))
        writer.append(Launch(held[1], Outcome.REJECTED, message="code 5"))

        assert writer.missing([*respelled, *others, *held]) == others


def test_writer_goes_on_with_a_finished_recording(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    save_recording(make_recording(BASELINE, TUNED), path)

    with RecordingWriter(path, "two", make_manifest()) as writer:
        assert len(writer.launches) == 2
        writer.append(live_launch({}, 8.0))
        writer.finish()

    assert load_recording(path).launches[:2] == (BASELINE, TUNED)
    assert len(load_recording(path).launches) == 3


def test_writer_torn_last_line_loses_only_that_launch(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0))
        writer.append(live_launch({}, 8.0))
        journal = writer.journal_path
    journal.write_bytes(journal.read_bytes()[:-20])

    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 9.0))
        finished = writer.finish()

    firsts = [launch.payloads[0].samples_us[0] for launch in finished.launches]
    assert firsts == [7.0, 9.0]


def test_writer_torn_head_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.with_name("two.json.journal").write_text('{"schema": "ncc')

    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0))
        assert len(writer.finish().launches) == 1


def test_writer_killed_between_recording_and_journal_counts_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0))
        left_behind = writer.journal_path.read_bytes()
        writer.finish()
    writer.journal_path.write_bytes(left_behind)

    with RecordingWriter(path, "two", make_manifest()) as writer:
        assert [one.settings for one in writer.launches].count({}) == 1
        writer.append(live_launch({}, 8.0))
        writer.finish()

    assert len(load_recording(path).launches) == 2


def test_writer_damaged_line_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0))
        writer.append(live_launch({}, 8.0))
    lines = writer.journal_path.read_text().splitlines()
    lines[1] = lines[1].replace("7.0", "-7.0")
    writer.journal_path.write_text("\n".join(lines) + "\n")

    with pytest.raises(FileError, match=r"two\.json\.journal:2: .*-7\.0"):
        RecordingWriter(path, "two", make_manifest())


def test_writer_journal_of_another_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    save_recording(make_recording(BASELINE, TUNED), path)
    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0))
    save_recording(make_recording(BASELINE), path)

    with pytest.raises(FileError, match="another recording"):
        RecordingWriter(path, "two", make_manifest())


@pytest.mark.parametrize("is_finished", [False, True], ids=["journal", "recording"])
def test_writer_other_conditions_are_refused(tmp_path: Path, is_finished: bool) -> None:
    path = tmp_path / "two.json"
    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0))
        if is_finished:
            writer.finish()

    with pytest.raises(FileError, match=r"nccl '2\.28\.9', now it is '2\.30\.3'"):
        RecordingWriter(path, "two", replace(make_manifest(), nccl="2.30.3"))
    with pytest.raises(FileError, match="'two', not 'three'"):
        RecordingWriter(path, "three", make_manifest())


def test_writer_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.json"

    with (
        RecordingWriter(path, "two", make_manifest()),
        pytest.raises(BusyError, match=r"two\.json"),
    ):
        RecordingWriter(path, "two", make_manifest())


def test_writer_full_disk_keeps_the_journal_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "two.json"
    real_write = os.write

    def write_half(fd: int, data: bytes) -> int:
        real_write(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with RecordingWriter(path, "two", make_manifest()) as writer:
        writer.append(live_launch({}, 7.0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half)
            with pytest.raises(FileError, match="No space left"):
                writer.append(live_launch({}, 8.0))
        writer.append(live_launch({}, 9.0))
        finished = writer.finish()

    firsts = [launch.payloads[0].samples_us[0] for launch in finished.launches]
    assert firsts == [7.0, 9.0]


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        pytest.param(replace(live_launch({}, 7.0), is_pruned=True), "pruned", id="pruned"),
        pytest.param(replace(live_launch({}, 7.0), payloads=()), "lacks", id="incomplete"),
        pytest.param(live_launch({}, float("nan")), "positive", id="not_a_number"),
    ],
)
def test_writer_half_a_launch_is_a_bug(tmp_path: Path, launch: Launch, reason: str) -> None:
    with RecordingWriter(tmp_path / "two.json", "two", make_manifest()) as writer:
        with pytest.raises(ValueError, match=reason):
            writer.append(launch)

        assert writer.launches == ()


def test_writer_of_other_payloads_is_told_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    manifest = make_manifest()
    with RecordingWriter(path, "two", manifest) as writer:
        writer.append(live_launch({}, 7.0))
    fewer = replace(manifest, payloads=manifest.payloads[:1])

    with pytest.raises(FileError, match=r"recorded with payloads \d+ B x \d+, .* now it is \d+ B"):
        RecordingWriter(path, "two", fewer)
