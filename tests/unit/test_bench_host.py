from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.bench.cpus import CpuTopology
from nccltune.bench.fitness import (
    estimate_rank_bytes,
    estimate_shm_bytes,
    read_shm_free_bytes,
)
from nccltune.bench.host import HostPlan, plan_host, preflight, rank_environ
from nccltune.envvars.settings import search_domain
from nccltune.errors import BusyError, ExitCode, HostError
from nccltune.host.gpu_choice import choose_gpus
from nccltune.host.hardware import read_gpus
from tests.support.fake_nvml import GIB, MIB, FakeNvml, fake_uuid, nvswitch_host, pcie_host

PLENTY_BYTES = 64 * GIB
DOCKER_SHM_BYTES = 64 * MIB
LARGEST_BYTES = 64 * MIB


def plan(nvml: FakeNvml, rank_count: int, *, is_shared: bool = False) -> HostPlan:
    hardware = read_gpus(nvml, sys_root=Path("/nonexistent"))
    gpus = choose_gpus(hardware, None, rank_count, is_shared=is_shared)
    cpus = CpuTopology(tuple(frozenset({cpu}) for cpu in range(16)))
    return plan_host(hardware, gpus, is_shared=is_shared, cpus=cpus)


def check(
    tested: HostPlan,
    environ: dict[str, str] | None = None,
    *,
    shm_free_bytes: int | None = PLENTY_BYTES,
    payload_bytes: int = LARGEST_BYTES,
    own_pids: tuple[int, ...] = (),
    is_forced: bool = False,
) -> list[str]:
    return preflight(
        tested,
        environ or {},
        shm_free_bytes=shm_free_bytes,
        payload_bytes=payload_bytes,
        own_pids=own_pids,
        is_forced=is_forced,
    )


def test_plan_host_gives_each_rank_a_gpu_and_cpus() -> None:
    tested = plan(nvswitch_host(), 4)

    assert tested.rank_count == 4
    assert tested.uuids == tuple(fake_uuid(idx) for idx in range(4))
    assert tested.links == tuple(
        tuple("X" if a == b else "NV18" for b in range(4)) for a in range(4)
    )
    assert [len(cpus) for cpus in tested.cpu_sets] == [4, 4, 4, 4]
    assert [tested.device_ordinal(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_plan_host_shared_puts_every_rank_on_ordinal_zero() -> None:
    tested = plan(nvswitch_host(1), 4, is_shared=True)

    assert tested.uuids == (fake_uuid(0),)
    assert len(tested.gpus) == len(tested.cpu_sets) == 4
    assert {tested.device_ordinal(rank) for rank in range(4)} == {0}


def test_plan_host_on_this_machines_cpus_binds_every_rank() -> None:
    hardware = read_gpus(nvswitch_host(2), sys_root=Path("/nonexistent"))

    tested = plan_host(hardware, hardware.gpus, is_shared=False)

    assert all(cpus <= os.sched_getaffinity(0) for cpus in tested.cpu_sets)


def test_preflight_on_fit_host_is_silent() -> None:
    assert check(plan(nvswitch_host(), 8)) == []
    assert check(plan(pcie_host(), 8)) == []


def test_preflight_passes_the_plans_notes_on() -> None:
    tested = replace(plan(nvswitch_host(), 2), notes=("few cores",))

    assert check(tested) == ["few cores"]


def test_preflight_with_foreign_process_names_gpu_pid_and_memory() -> None:
    nvml = nvswitch_host(4)
    nvml.gpus[2].processes = {4711: 70123 * MIB, 4712: None}

    with pytest.raises(BusyError) as caught:
        check(plan(nvml, 4))

    message = str(caught.value)
    assert caught.value.code == "gpu_busy"
    assert caught.value.exit_code is ExitCode.BUSY
    assert f"GPU 2 ({fake_uuid(2)})" in message
    assert "pid 4711 (70123 MiB), pid 4712 (memory unknown)" in message
    assert "--force" in message


def test_preflight_with_many_processes_stays_one_short_line() -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[0].processes = dict.fromkeys(range(100, 140), MIB)

    with pytest.raises(BusyError, match=r"pid 103 \(1 MiB\) and 36 more: end that"):
        check(plan(nvml, 2))


def test_preflight_with_foreign_process_forced_only_warns() -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[1].processes = {4711: MIB}

    (warning,) = check(plan(nvml, 2), is_forced=True)

    assert warning.startswith("forced: GPU 1 ")


def test_preflight_with_process_on_unused_gpu_is_silent() -> None:
    nvml = nvswitch_host(4)
    nvml.gpus[3].processes = {4711: MIB}

    assert check(plan(nvml, 2)) == []


def test_preflight_with_own_processes_is_silent() -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[0].processes = {4711: MIB}

    assert check(plan(nvml, 2), own_pids=(4711,)) == []


def test_preflight_shared_looks_at_its_gpu_once() -> None:
    nvml = nvswitch_host(1)
    nvml.gpus[0].processes = {4711: MIB}

    assert len(check(plan(nvml, 4, is_shared=True), is_forced=True)) == 1


@pytest.mark.parametrize("is_listed", [True, False])
def test_preflight_with_memory_in_use_by_nobody_warns(is_listed: bool) -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[1].used_bytes = 5 * GIB
    if not is_listed:
        nvml.gpus[1].errors["processes"] = 4

    (warning,) = check(plan(nvml, 2))

    assert "GPU 1" in warning
    assert "5120 MiB are in use by processes that do not show here" in warning


def test_estimate_shm_bytes_counts_ring_and_chain_connections() -> None:
    assert estimate_shm_bytes(2) == 4 * 2 * 9_637_888
    assert estimate_shm_bytes(8) == 22 * 2 * 9_637_888
    assert estimate_shm_bytes(8, 16) == 8 * estimate_shm_bytes(8)


@pytest.mark.parametrize("rank_count", [4, 8])
def test_preflight_with_dockers_shm_on_pcie_names_need_and_cure(rank_count: int) -> None:
    with pytest.raises(HostError) as caught:
        check(plan(pcie_host(), rank_count), shm_free_bytes=DOCKER_SHM_BYTES)

    message = str(caught.value)
    assert caught.value.code == "shm_too_small"
    assert "/dev/shm has 64 MiB free" in message
    assert f"{rank_count} ranks need about {estimate_shm_bytes(rank_count) >> 20} MiB" in message
    assert "--shm-size=" in message
    assert "--ipc=host" in message


def test_preflight_with_dockers_shm_forced_only_warns() -> None:
    warnings = check(plan(pcie_host(), 8), shm_free_bytes=DOCKER_SHM_BYTES, is_forced=True)

    assert len(warnings) == 1
    assert warnings[0].startswith("forced: /dev/shm")


def test_preflight_with_shm_for_defaults_only_warns_about_candidates() -> None:
    (warning,) = check(plan(pcie_host(), 8), shm_free_bytes=GIB)

    assert "candidates with many channels and large buffers may not fit" in warning


def test_shm_estimate_counts_larger_buffers_once_for_each_connection() -> None:
    larger_bytes = estimate_shm_bytes(2, 2, 16 << 20) - estimate_shm_bytes(2, 2)

    assert larger_bytes == 8 * (12 << 20)


@pytest.mark.parametrize("rank_count", [2, 4, 6, 8])
def test_shm_advice_holds_every_candidate_that_a_search_proposes(rank_count: int) -> None:
    needs_bytes = [
        estimate_shm_bytes(rank_count, int(channels), int(buffer_bytes))
        for channels in search_domain("NCCL_MIN_CTAS")
        for buffer_bytes in search_domain("NCCL_BUFFSIZE")
    ]
    tested, environ = plan(pcie_host(), rank_count), {"NCCL_P2P_DISABLE": "1"}

    (warning,) = check(tested, environ, shm_free_bytes=max(needs_bytes) - 1)
    advised = re.search(r"--shm-size=(\d+)g", warning)

    assert advised is not None
    assert max(needs_bytes) <= int(advised[1]) * GIB < max(needs_bytes) + GIB
    assert check(tested, environ, shm_free_bytes=int(advised[1]) * GIB) == []


@pytest.mark.parametrize(("nvml", "rank_count"), [(nvswitch_host(), 8), (pcie_host(), 2)])
def test_preflight_with_dockers_shm_and_direct_links_warns(nvml: FakeNvml, rank_count: int) -> None:
    (warning,) = check(plan(nvml, rank_count), shm_free_bytes=DOCKER_SHM_BYTES)

    assert "enough as long as the GPUs reach one another directly" in warning


@pytest.mark.parametrize("environ", [{"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "LOC"}])
def test_preflight_with_dockers_shm_and_p2p_off_refuses(environ: dict[str, str]) -> None:
    with pytest.raises(HostError, match="--shm-size"):
        check(plan(nvswitch_host(), 2), environ, shm_free_bytes=DOCKER_SHM_BYTES)


def test_preflight_with_hidden_links_and_dockers_shm_refuses() -> None:
    tested = replace(plan(nvswitch_host(), 2), links=(("X", None), (None, "X")))

    with pytest.raises(HostError, match="--shm-size"):
        check(tested, shm_free_bytes=DOCKER_SHM_BYTES)


def test_preflight_with_shm_switched_off_needs_none() -> None:
    tested = plan(pcie_host(), 8)

    (warning,) = check(tested, {"NCCL_SHM_DISABLE": "1"}, shm_free_bytes=MIB)

    assert "enough as long as" in warning


def test_preflight_without_dev_shm_warns_where_it_is_needed() -> None:
    assert check(plan(nvswitch_host(), 2), shm_free_bytes=None) == []
    (warning,) = check(plan(pcie_host(), 8), shm_free_bytes=None)
    assert "cannot be looked at" in warning


def test_preflight_shared_needs_no_shm() -> None:
    assert check(plan(pcie_host(), 4, is_shared=True), shm_free_bytes=0) == []


def test_preflight_with_full_gpu_names_both_numbers() -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[1].used_bytes = nvml.gpus[1].total_bytes - 500 * MIB

    with pytest.raises(HostError) as caught:
        check(plan(nvml, 2))

    message = str(caught.value)
    needed_mib = estimate_rank_bytes(LARGEST_BYTES, 2) >> 20
    assert caught.value.code == "gpu_memory_too_small"
    assert f"GPU 1 ({fake_uuid(1)}) has 500 MiB free" in message
    assert f"payloads up to {LARGEST_BYTES} B need about {needed_mib} MiB" in message


def test_preflight_with_full_gpu_cannot_be_forced() -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[0].used_bytes = nvml.gpus[0].total_bytes

    with pytest.raises(HostError):
        check(plan(nvml, 2), is_forced=True)


def test_preflight_shared_needs_memory_for_every_rank() -> None:
    nvml = nvswitch_host(1)
    each_bytes = estimate_rank_bytes(MIB, 4)
    nvml.gpus[0].total_bytes = 4 * each_bytes + 4 * MIB

    assert check(plan(nvml, 4, is_shared=True), payload_bytes=MIB) == []
    nvml.gpus[0].total_bytes -= 1
    with pytest.raises(HostError, match="free memory"):
        check(plan(nvml, 4, is_shared=True), payload_bytes=MIB)


def test_preflight_with_unknown_free_memory_warns() -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[0].errors["memory"] = 3

    (warning,) = check(plan(nvml, 2))

    assert "does not say how much memory is free" in warning


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"NCCL_P2P_LEVEL": "PXB"}, "NCCL_P2P_LEVEL=PXB"),
        ({"NCCL_P2P_LEVEL": "SYS"}, "NCCL_P2P_LEVEL=SYS"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
    ],
)
def test_preflight_with_inherited_setting_against_nvlink_warns(
    environ: dict[str, str], word: str
) -> None:
    (warning,) = check(plan(nvswitch_host(), 2), environ)

    assert word in warning
    assert "NVLink joins every pair" in warning


@pytest.mark.parametrize(
    "environ", [{"NCCL_P2P_LEVEL": "NVL"}, {"NCCL_P2P_DISABLE": "0"}, {"NCCL_P2P_LEVEL": ""}]
)
def test_preflight_with_harmless_inherited_setting_is_silent(environ: dict[str, str]) -> None:
    assert check(plan(nvswitch_host(), 2), environ) == []


def test_preflight_with_inherited_p2p_level_on_pcie_is_silent() -> None:
    assert check(plan(pcie_host(), 8), {"NCCL_P2P_LEVEL": "SYS"}) == []


def test_read_shm_free_bytes_reads_a_folder_or_nothing(tmp_path: Path) -> None:
    assert (read_shm_free_bytes(tmp_path) or 0) > 0
    assert read_shm_free_bytes(tmp_path / "absent") is None


CALLER = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LD_LIBRARY_PATH": "/cuda/lib64",
    "PYTHONPATH": "/src",
    "SGLANG_NCCL_SO_PATH": "/opt/libnccl.so.2",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "LD_PRELOAD": "/lib/evil.so",
    "NCCL_ALGO": "Tree",
    "NCCL_CONF_FILE": "/home/me/nccl.conf",
    "CUDA_VISIBLE_DEVICES": "7",
    "CUDA_LAUNCH_BLOCKING": "1",
    "OMP_NUM_THREADS": "1",
}


def rank_variables(
    base: dict[str, str],
    settings: dict[str, str],
    *,
    rank: int = 1,
    is_shared: bool = False,
    conf_names: tuple[str, ...] = (),
) -> dict[str, str]:
    tested = plan(nvswitch_host(), 2, is_shared=is_shared)
    return rank_environ(base, tested, rank, settings, environ=CALLER, conf_names=conf_names)


def test_rank_environ_takes_only_what_is_allowed_from_the_caller() -> None:
    assert rank_variables({}, {}) == {
        "PATH": "/bin",
        "HOME": "/home/me",
        "LD_LIBRARY_PATH": "/cuda/lib64",
        "PYTHONPATH": "/src",
        "SGLANG_NCCL_SO_PATH": "/opt/libnccl.so.2",
        "CUDA_VISIBLE_DEVICES": f"{fake_uuid(0)},{fake_uuid(1)}",
        "NCCL_CONF_FILE": "/dev/null",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }


def test_rank_environ_lets_settings_win_over_base() -> None:
    base = {"NCCL_CUMEM_ENABLE": "0", "NCCL_ALGO": "allreduce:ring"}

    environ = rank_variables(base, {"NCCL_ALGO": "allreduce:tree"})

    assert environ["NCCL_CUMEM_ENABLE"] == "0"
    assert environ["NCCL_ALGO"] == "allreduce:tree"


@pytest.mark.parametrize("where", ["base", "settings"])
def test_rank_environ_keeps_multicast_off_whatever_is_asked(where: str) -> None:
    asked = {"NCCL_NVLS_ENABLE": "1", "NVSHMEM_DISABLE_NVLS": "0"}
    base, settings = (asked, {}) if where == "base" else ({}, asked)

    environ = rank_variables(base, settings)

    assert environ["NCCL_NVLS_ENABLE"] == "0"
    assert environ["NVSHMEM_DISABLE_NVLS"] == "1"


def test_rank_environ_differs_between_ranks_only_when_shared() -> None:
    assert rank_variables({}, {}, rank=0) == rank_variables({}, {}, rank=1)

    environ = rank_variables({"NCCL_SOCKET_IFNAME": "eth0"}, {}, rank=1, is_shared=True)

    assert environ["CUDA_VISIBLE_DEVICES"] == fake_uuid(0)
    assert environ["NCCL_HOSTID"] == "nccltune-rank1"
    assert environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert environ["NCCL_IB_DISABLE"] == "1"


def test_rank_environ_keeps_configuration_files_out() -> None:
    names = ("NCCL_GRAPH_FILE", "NCCL_NTHREADS", "NCCL_ALGO", "NCCL_PROTO", "PATH")

    environ = rank_variables(
        {"NCCL_ALGO": "allreduce:ring"}, {"NCCL_PROTO": "allreduce:LL"}, conf_names=names
    )

    assert environ["NCCL_NTHREADS"] == ""
    assert environ["NCCL_GRAPH_FILE"] == "/dev/null"
    assert environ["NCCL_ALGO"] == "allreduce:ring"
    assert environ["NCCL_PROTO"] == "allreduce:LL"
    assert environ["PATH"] == "/bin"


def test_rank_environ_ignores_a_configuration_file_that_base_names() -> None:
    environ = rank_variables({"NCCL_CONF_FILE": "/etc/my.conf"}, {})

    assert environ["NCCL_CONF_FILE"] == "/dev/null"


def test_rank_environ_finds_the_file_in_the_home_folder(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_TUNED_NAME=1\n")
    tested = plan(nvswitch_host(), 2)

    environ = rank_environ({}, tested, 0, {}, environ={"HOME": str(tmp_path)})

    assert environ["NCCL_TUNED_NAME"] == ""


def test_rank_environ_by_default_reads_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("TZ", "UTC")

    environ = rank_environ({}, plan(nvswitch_host(), 2), 0, {})

    assert environ["TZ"] == "UTC"
    assert "NCCL_ALGO" not in environ
