from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.measurement import Outcome, PayloadRequest
from nccltune.paths import shipped_recordings_dir
from nccltune.recording import (
    RecordedTimes,
    Recording,
    RecordingBench,
    format_recording,
    list_recordings,
    load_recording,
)

NAMES = ("h200-2x-nvlink", "h200-2x-shm")
SIZES_BYTES = (14336, 43008, 86016, 172032, 344064, 1376256, 67108864)
FOLK = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}


def shipped_path(name: str) -> Path:
    return shipped_recordings_dir() / f"{name}.json"


@pytest.fixture(scope="module", params=NAMES)
def recording(request: pytest.FixtureRequest) -> Recording:
    return load_recording(shipped_path(request.param))


def test_list_recordings_names_the_shipped_ones() -> None:
    shipped = {found.name: found.path for found in list_recordings() if found.where == "shipped"}

    assert {name: shipped.get(name) for name in NAMES} == {
        name: shipped_path(name) for name in NAMES
    }


@pytest.mark.parametrize(
    ("name", "launch_count", "distinct_count"),
    [("h200-2x-nvlink", 132, 122), ("h200-2x-shm", 129, 119)],
)
def test_shipped_recording_holds_every_launch(
    name: str, launch_count: int, distinct_count: int
) -> None:
    recording = load_recording(shipped_path(name))

    assert recording.name == name
    assert len(recording.launches) == launch_count
    assert len(recording.by_settings()) == distinct_count
    assert shipped_path(name).stat().st_size < 1_000_000


def test_shipped_recording_measured_every_payload_with_right_data(recording: Recording) -> None:
    assert recording.sizes_bytes == SIZES_BYTES
    assert {launch.outcome for launch in recording.launches} == {Outcome.OK}


def test_shipped_recording_tells_its_origin(recording: Recording) -> None:
    manifest = recording.manifest

    assert "not made by this tool" in manifest.origin
    assert (manifest.command, manifest.tool_version) == (None, None)
    assert (manifest.gpus, manifest.world_size) == ("2x NVIDIA H200 (NVLink, NV18)", 2)
    assert (manifest.driver, manifest.nccl) == ("580.159.04", "2.28.9")
    assert (manifest.torch, manifest.recorded_at) == ("2.11.0+cu130", "2026-11-29")
    assert manifest.base_environment["NCCL_NVLS_ENABLE"] == "0"
    assert ("NCCL_P2P_DISABLE" in manifest.base_environment) == recording.name.endswith("shm")
    assert [shape.graph_count for shape in manifest.payloads] == [122] * 6 + [4]


def test_shipped_recording_repeats_the_defaults_and_has_the_folk_profile(
    recording: Recording,
) -> None:
    bench = RecordingBench(recording)

    assert len(bench.baseline_launches()) >= 8
    assert FOLK in bench.candidates
    assert bench.nearest(FOLK, []) == FOLK


def test_shipped_recording_answers_the_default_payloads_in_full(recording: Recording) -> None:
    bench = RecordingBench(recording)
    requests = [PayloadRequest(size_bytes, graph_count=123) for size_bytes in SIZES_BYTES]

    for settings in bench.candidates:
        assert bench.launch(settings, requests).is_complete


def test_shipped_recording_is_written_as_the_tool_writes(recording: Recording) -> None:
    assert format_recording(recording) == shipped_path(recording.name).read_text(encoding="utf-8")


# Read by eye from the sweep's own files.
@pytest.mark.parametrize(
    ("name", "launch_idx", "settings", "times"),
    [
        pytest.param(
            "h200-2x-nvlink",
            0,
            {"NCCL_BUFFSIZE": "1048576", "NCCL_PROTO": "allreduce:Simple"},
            RecordedTimes(43008, median_us=21.607, min_us=21.373, p90_us=21.709),
            id="nvlink_first",
        ),
        pytest.param(
            "h200-2x-nvlink",
            1,
            {"NCCL_NTHREADS": "64", "NCCL_PROTO": "allreduce:LL", "NCCL_ALGO": "allreduce:Ring"},
            RecordedTimes(67108864, median_us=2468.636, min_us=2465.832, p90_us=2472.552),
            id="nvlink_second",
        ),
        pytest.param(
            "h200-2x-nvlink",
            -1,
            {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 32 -2 -2", "NCCL_NTHREADS": "64"},
            RecordedTimes(344064, median_us=14.454, min_us=14.116, p90_us=14.595),
            id="nvlink_last",
        ),
        pytest.param(
            "h200-2x-shm",
            2,
            {"NCCL_PROTO": "allreduce:LL"},
            RecordedTimes(14336, median_us=13.412, min_us=12.958, p90_us=13.489),
            id="shm_third",
        ),
        pytest.param(
            "h200-2x-shm",
            -1,
            {"NCCL_NTHREADS": "64"},
            RecordedTimes(67108864, median_us=6951.868, min_us=6848.696, p90_us=7080.632),
            id="shm_last",
        ),
    ],
)
def test_shipped_recording_has_the_numbers_of_its_source(
    name: str, launch_idx: int, settings: dict[str, str], times: RecordedTimes
) -> None:
    launch = load_recording(shipped_path(name)).launches[launch_idx]

    assert launch.settings == settings
    assert times in launch.payloads
