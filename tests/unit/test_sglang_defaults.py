from __future__ import annotations

import pytest

from nccltune.sglang.command import parse_launch
from nccltune.sglang.defaults import (
    SGLANG_BASE_ENVIRONMENT,
    EnvironmentWrite,
    base_environment,
    is_at_least,
    release_of,
    writes_for,
)


def written(
    flags: str, version: str | None = None, environ: dict[str, str] | None = None
) -> dict[str, EnvironmentWrite]:
    command = parse_launch(f"python -m sglang.launch_server --model m {flags}".split())
    writes = writes_for(command, version, environ)
    assert len({write.variable for write in writes}) == len(writes)
    return {write.variable: write for write in writes}


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.10.post1", (0, 5, 10)),
        ("0.5.15.post1+cu130", (0, 5, 15)),
        ("v0.6.0rc1", (0, 6, 0)),
        ("main", None),
        ("", None),
        (None, None),
    ],
)
def test_release_of_reads_three_numbers(
    version: str | None, release: tuple[int, int, int] | None
) -> None:
    assert release_of(version) == release


def test_is_at_least_with_unknown_version_counts_as_newest() -> None:
    assert is_at_least(None, (9, 9, 9))
    assert not is_at_least("0.5.9", (0, 5, 10))
    assert is_at_least("0.5.10.post1", (0, 5, 10))


@pytest.mark.parametrize("version", [None, "0.5.20", "0.5.23", "0.6.0", "nightly"])
def test_base_environment_of_new_release_has_four_variables(version: str | None) -> None:
    assert base_environment(version, 8) == {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_GRAPH_REGISTER": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.5.15.post1", "0.5.18"])
def test_base_environment_of_old_release_leaves_graph_registration(version: str) -> None:
    assert "NCCL_GRAPH_REGISTER" not in base_environment(version, 8)


def test_base_environment_of_one_gpu_leaves_graph_registration() -> None:
    assert "NCCL_GRAPH_REGISTER" not in base_environment(None, 1)


def test_base_environment_constant_is_the_newest() -> None:
    assert dict(SGLANG_BASE_ENVIRONMENT) == base_environment("0.5.23", 8)


def test_base_environment_is_what_a_plain_launch_writes() -> None:
    writes = written("--tp 8")

    assert {name: write.value for name, write in writes.items()} == base_environment(None, 8)
    assert [name for name, write in writes.items() if write.is_forced] == [
        "CUDA_DEVICE_MAX_CONNECTIONS"
    ]


def test_writes_for_symm_mem_forces_cumem_and_nvls() -> None:
    writes = written("--tp 8 --enable-symm-mem")

    assert writes["NCCL_CUMEM_ENABLE"] == EnvironmentWrite(
        "NCCL_CUMEM_ENABLE", "1", True, "--enable-symm-mem"
    )
    assert writes["NCCL_NVLS_ENABLE"].value == "1"
    assert writes["NCCL_NVLS_ENABLE"].is_forced


def test_writes_for_nvls_forces_nvls_alone() -> None:
    writes = written("--tp 8 --enable-nccl-nvls")

    assert writes["NCCL_NVLS_ENABLE"] == EnvironmentWrite(
        "NCCL_NVLS_ENABLE", "1", True, "--enable-nccl-nvls"
    )
    assert (writes["NCCL_CUMEM_ENABLE"].value, writes["NCCL_CUMEM_ENABLE"].is_forced) == (
        "0",
        False,
    )


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("--enable-kv-cache-sharding", "1"),
        ("--enable-kv-cache-sharding --enable-memory-saver", "0"),
        ("--enable-kv-cache-sharding --nnodes 2", "0"),
        ("--moe-a2a-backend deepep_v2", "1"),
        ("--moe-a2a-backend deepep", "0"),
    ],
)
def test_writes_for_other_reasons_of_cumem_leave_the_operators_value(
    flags: str, value: str
) -> None:
    write = written(f"--tp 8 {flags}")["NCCL_CUMEM_ENABLE"]

    assert (write.value, write.is_forced) == (value, False)


def test_writes_for_deepep_v2_sets_its_own_variable() -> None:
    assert written("--tp 8 --moe-a2a-backend deepep_v2")["EP_REUSE_NCCL_COMM"].value == "0"


@pytest.mark.parametrize("version", [None, "0.5.18", "0.5.23"])
def test_writes_for_deterministic_inference_destroys_algorithm_and_channels(
    version: str | None,
) -> None:
    writes = written("--tp 8 --enable-deterministic-inference", version)

    assert writes["NCCL_ALGO"].value == "allreduce:tree"
    assert writes["NCCL_MIN_NCHANNELS"].value == writes["NCCL_MAX_NCHANNELS"].value == "8"
    names = ("NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
    assert all(writes[name].is_forced for name in names)


def test_writes_for_deterministic_inference_before_0518_pins_only_the_algorithm() -> None:
    writes = written("--tp 8 --enable-deterministic-inference", "0.5.15.post1")

    assert "NCCL_ALGO" in writes
    assert "NCCL_MAX_NCHANNELS" not in writes


def test_writes_for_deterministic_inference_takes_the_channel_count_from_the_environment() -> None:
    environ = {"SGLANG_DETERMINISTIC_NCCL_NCHANNELS": "4"}

    writes = written("--tp 8 --enable-deterministic-inference", None, environ)

    assert writes["NCCL_MAX_NCHANNELS"].value == "4"


def test_writes_for_deterministic_inference_on_one_gpu_writes_nothing() -> None:
    assert "NCCL_ALGO" not in written("--enable-deterministic-inference")


@pytest.mark.parametrize(
    ("flags", "version", "is_written", "is_forced"),
    [
        ("--dcp-size 2", None, True, False),
        ("--dcp-size 2 --enable-symm-mem", None, True, True),
        ("--dcp-size 2", "0.5.12.post1", False, False),
        ("", None, False, False),
    ],
)
def test_writes_for_decode_context_parallel_sets_graph_mixing(
    flags: str, version: str | None, is_written: bool, is_forced: bool
) -> None:
    write = written(f"--tp 8 {flags}", version).get("NCCL_GRAPH_MIXING_SUPPORT")

    assert (write is not None) == is_written
    assert bool(write and write.is_forced) == is_forced


@pytest.mark.parametrize("flags", ["", "--tp 8 --disable-cuda-graph"])
def test_writes_for_launch_without_shared_graphs_leaves_graph_registration(flags: str) -> None:
    assert "NCCL_GRAPH_REGISTER" not in written(flags)


@pytest.mark.parametrize("name", ["NCCL_PROTO", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_P2P_LEVEL"])
def test_writes_for_never_touches_what_sglang_leaves_alone(name: str) -> None:
    flags = "--tp 8 --enable-symm-mem --enable-deterministic-inference --dcp-size 2"

    assert name not in written(flags)
