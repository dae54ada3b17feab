from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from nccltune.measurement import Outcome, PayloadRequest
from nccltune.paths import shipped_recordings_dir
from nccltune.recording import (
    RecordedLaunch,
    Recording,
    RecordingBench,
    format_recording,
    list_recordings,
    load_recording,
)
from nccltune.search.recording_plan import BASELINE_EVERY
from nccltune.search.space import Space, facts_of_recording

NAMES = ("h200-2x-nvlink", "h200-2x-shm")
SIZES_BYTES = (14336, 43008, 86016, 172032, 344064, 1376256, 67108864)
LATER_CALLS = "2026-11-29T21"
"""Launches that started at or after this are not of the first call."""


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
    [("h200-2x-nvlink", 186, 169), ("h200-2x-shm", 190, 173)],
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


def test_shipped_recording_keeps_every_raw_sample(recording: Recording) -> None:
    for launch in recording.launches:
        assert launch.started_at
        assert {len(times.samples_us) for times in launch.payloads} == {12}


def test_shipped_recording_tells_its_origin(recording: Recording) -> None:
    manifest = recording.manifest
    transport = {"NCCL_P2P_DISABLE": "1"} if recording.name.endswith("shm") else {}

    assert manifest.origin.startswith("nccltune recording make, in ")
    assert f"--name {recording.name} " in (manifest.command or "")
    assert manifest.tool_version == "0.1.0"
    assert (manifest.gpus, manifest.world_size) == ("2x NVIDIA H200 (NVLink, NV18)", 2)
    assert (manifest.driver, manifest.nccl) == ("580.159.04", "2.28.9")
    assert (manifest.torch, manifest.recorded_at) == ("2.11.0+cu130", "2026-11-29T18:13:52+00:00")
    assert manifest.base_environment == {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "NCCL_GRAPH_REGISTER": "0",
        **transport,
    }
    assert [shape.graph_count for shape in manifest.payloads] == [123] * 6 + [4]


def test_shipped_recording_has_defaults_between_its_candidates(recording: Recording) -> None:
    since_defaults = 0
    assert recording.launches[0].settings == {}
    for launch in recording.launches:
        since_defaults = since_defaults + 1 if launch.settings else 0
        assert since_defaults <= BASELINE_EVERY


def test_shipped_recording_is_one_though_made_in_several_calls(recording: Recording) -> None:
    defaults = [launch for launch in recording.launches if not launch.settings]
    later = [launch for launch in defaults if (launch.started_at or "") >= LATER_CALLS]
    first = [launch for launch in defaults if launch not in later]

    assert (len(first), len(later)) in {(13, 5), (12, 6)}
    for size_bytes in SIZES_BYTES:
        ratio = default_us(later, size_bytes) / default_us(first, size_bytes)
        assert ratio == pytest.approx(1.0, abs=0.02)


def default_us(launches: list[RecordedLaunch], size_bytes: int) -> float:
    """Return the median over launches of a payload's median, in us."""
    return statistics.median(
        times.median_us
        for launch in launches
        for times in launch.payloads
        if times.size_bytes == size_bytes
    )


def test_shipped_recording_holds_only_what_a_search_can_propose(recording: Recording) -> None:
    space = Space(facts_of_recording(recording.manifest), recording.manifest.base_environment)

    for settings in RecordingBench(recording).candidates:
        params = space.params(settings)
        assert params is not None
        assert space.settings(params) == settings


def test_shipped_recording_answers_the_default_payloads_in_full(recording: Recording) -> None:
    bench = RecordingBench(recording)
    requests = [PayloadRequest(size_bytes, graph_count=123) for size_bytes in SIZES_BYTES]

    for settings in bench.candidates:
        assert bench.launch(settings, requests).is_complete


def test_shipped_recording_is_written_as_the_tool_writes(recording: Recording) -> None:
    assert format_recording(recording) == shipped_path(recording.name).read_text(encoding="utf-8")


# Read by eye from the files, the fastest and the slowest of 12 samples.
@pytest.mark.parametrize(
    ("name", "launch_idx", "settings", "size_bytes", "extremes_us"),
    [
        pytest.param("h200-2x-nvlink", 0, {}, 43008, (7.462, 7.480), id="nvlink_first"),
        pytest.param(
            "h200-2x-nvlink",
            1,
            {"NCCL_PROTO": "allreduce:Simple", "NCCL_CGA_CLUSTER_SIZE": "0"},
            67108864,
            (282.800, 285.488),
            id="nvlink_second",
        ),
        pytest.param(
            "h200-2x-nvlink",
            -1,
            {
                "NCCL_MIN_CTAS": "32",
                "NCCL_CGA_CLUSTER_SIZE": "4",
                "NCCL_THREAD_THRESHOLDS": "-2 -2 -2 8 -2 -2",
            },
            344064,
            (8.834, 8.856),
            id="nvlink_last",
        ),
        pytest.param(
            "h200-2x-shm",
            2,
            {"NCCL_MIN_CTAS": "1", "NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"},
            14336,
            (10.294, 10.658),
            id="shm_third",
        ),
        pytest.param(
            "h200-2x-shm",
            180,
            {"NCCL_MAX_CTAS": "4", "NCCL_CGA_CLUSTER_SIZE": "1", "NCCL_SHM_LOCALITY": "1"},
            67108864,
            (2351.272, 2393.936),
            id="shm_last_of_the_second_call",
        ),
    ],
)
def test_shipped_recording_has_the_numbers_of_its_source(
    name: str,
    launch_idx: int,
    settings: dict[str, str],
    size_bytes: int,
    extremes_us: tuple[float, float],
) -> None:
    launch = load_recording(shipped_path(name)).launches[launch_idx]

    assert launch.settings == settings
    (times,) = (times for times in launch.payloads if times.size_bytes == size_bytes)
    assert (min(times.samples_us), max(times.samples_us)) == pytest.approx(extremes_us, abs=0.0005)
