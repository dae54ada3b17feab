from __future__ import annotations

import importlib
import itertools
from typing import TYPE_CHECKING

import pytest

import nccltune.host.hardware as hardware_module
from nccltune.errors import ExitCode, HostError
from nccltune.host.hardware import (
    GpuProcess,
    read_foreign_processes,
    read_gpus,
    read_memory_used_bytes,
)
from tests.support.fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    MIB,
    NO_PERMISSION,
    NODE,
    NOT_SUPPORTED,
    OTHER_GPU,
    PHB,
    SWITCH,
    UNKNOWN,
    FakeNvml,
    FakeNvmlError,
    fake_gpu,
    fake_uuid,
    nvswitch_host,
    pcie_host,
)

if TYPE_CHECKING:
    from pathlib import Path

    from nccltune.host.hardware import Hardware


def read(nvml: FakeNvml, tmp_path: Path) -> Hardware:
    return read_gpus(nvml, sys_root=tmp_path)


def test_hardware_imported_holds_no_pynvml() -> None:
    assert not hasattr(hardware_module, "pynvml")


def test_read_gpus_on_nvswitch_host_reads_everything(tmp_path: Path) -> None:
    nvml = nvswitch_host()
    nvml.gpus[0].processes = {4711: 512 * MIB}

    hardware = read(nvml, tmp_path)

    assert hardware.driver_version == "580.159.04"
    gpu = hardware.gpus[0]
    assert (gpu.idx, gpu.uuid, gpu.name) == (0, fake_uuid(0), "NVIDIA H200")
    assert gpu.pci_bus_id == "00000000:1b:00.0"
    assert gpu.memory_total_bytes == 141 * GIB
    assert gpu.memory_free_bytes == 141 * GIB - 4 * MIB
    assert gpu.memory_used_bytes == 4 * MIB
    assert gpu.compute_capability == "sm90"
    assert gpu.is_mig_enabled is False
    assert gpu.processes == (GpuProcess(4711, 512 * MIB),)
    assert [gpu.numa_node for gpu in hardware.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert hardware.problems == ()


def test_read_gpus_on_nvswitch_host_has_full_nvlink(tmp_path: Path) -> None:
    hardware = read(nvswitch_host(), tmp_path)

    assert hardware.links[0] == ("X", *("NV18",) * 7)
    assert hardware.has_full_nvlink
    assert not hardware.is_partial


def test_read_gpus_on_pcie_host_names_the_way_between_gpus(tmp_path: Path) -> None:
    hardware = read(pcie_host(), tmp_path)

    assert hardware.links[2] == ("NODE", "NODE", "X", "PIX", "SYS", "SYS", "SYS", "SYS")
    assert not hardware.has_full_nvlink
    assert hardware.gpus[0].is_mig_enabled is False
    assert hardware.gpus[0].compute_capability == "sm120"


def test_read_gpus_with_one_gpu_has_no_nvlink(tmp_path: Path) -> None:
    hardware = read(nvswitch_host(1), tmp_path)

    assert hardware.links == (("X",),)
    assert not hardware.has_full_nvlink


def test_read_gpus_without_gpus_is_empty(tmp_path: Path) -> None:
    assert read(FakeNvml(), tmp_path).gpus == ()


def test_read_gpus_with_direct_nvlinks_counts_those_to_each_peer(tmp_path: Path) -> None:
    gpus = [fake_gpu(idx) for idx in range(3)]
    for one, other, count in ((0, 1, 4), (1, 0, 4), (0, 2, 2), (2, 0, 2)):
        gpus[one].nvlinks += [(gpus[other].bus_id, OTHER_GPU)] * count
    gpus[0].nvlinks.insert(0, (None, None))  # a link that is down
    nvml = FakeNvml(gpus, ancestor=lambda _a, _b: NODE)

    hardware = read(nvml, tmp_path)

    assert hardware.links == (("X", "NV4", "NV2"), ("NV4", "X", "NODE"), ("NV2", "NODE", "X"))
    assert not hardware.has_full_nvlink


def test_read_gpus_with_direct_nvlinks_elsewhere_ignores_granted_p2p(tmp_path: Path) -> None:
    nvml = FakeNvml(
        [fake_gpu(0), fake_gpu(1)],
        ancestor=lambda _a, _b: NODE,
        has_nvlink_p2p=lambda _a, _b: True,
    )
    for gpu in nvml.gpus:
        gpu.nvlinks = [("00000000:EE:00.0", OTHER_GPU)]

    assert read(nvml, tmp_path).links[0][1] == "NODE"


def test_read_gpus_with_unequal_switch_links_counts_the_weaker_end(tmp_path: Path) -> None:
    nvml = nvswitch_host(2)
    del nvml.gpus[1].nvlinks[12:]

    assert read(nvml, tmp_path).links == (("X", "NV12"), ("NV12", "X"))


def test_read_gpus_with_hidden_link_ends_trusts_granted_p2p(tmp_path: Path) -> None:
    nvml = nvswitch_host(2)
    for gpu in nvml.gpus:
        gpu.nvlinks = [("00000000:80:00.0", None)] * 6

    assert read(nvml, tmp_path).links[0][1] == "NV6"


@pytest.mark.parametrize(("kind", "expected"), [(SWITCH, "NV6"), (None, "NODE")])
def test_read_gpus_with_hidden_p2p_counts_only_links_to_switches(
    kind: int | None, expected: str, tmp_path: Path
) -> None:
    nvml = nvswitch_host(2)
    nvml.has_nvlink_p2p = lambda _a, _b: None
    nvml.ancestor = lambda _a, _b: NODE
    for gpu in nvml.gpus:
        gpu.nvlinks = [("00000000:80:00.0", kind)] * 6

    assert read(nvml, tmp_path).links[0][1] == expected


@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN])
def test_read_gpus_with_hidden_topology_is_partial(code: int, tmp_path: Path) -> None:
    def hidden(_one: int, _other: int) -> int:
        raise FakeNvmlError(code)

    nvml = pcie_host(2)
    nvml.ancestor = hidden

    hardware = read(nvml, tmp_path)

    assert hardware.links == (("X", None), (None, "X"))
    assert hardware.is_partial
    assert not hardware.has_full_nvlink


@pytest.mark.parametrize(("count", "is_partial"), [(2, False), (4, True)])
def test_read_gpus_with_flattened_topology_is_partial_from_three_gpus(
    count: int, is_partial: bool, tmp_path: Path
) -> None:
    nvml = pcie_host(count)
    nvml.ancestor = lambda _a, _b: PHB

    assert read(nvml, tmp_path).is_partial is is_partial


def test_read_gpus_with_unavailable_readings_gives_none_and_never_zero(tmp_path: Path) -> None:
    nvml = nvswitch_host(1)
    nvml.gpus[0].errors = {
        "memory": NOT_SUPPORTED,
        "capability": NOT_SUPPORTED,
        "mig": NO_PERMISSION,
        "affinity": NOT_SUPPORTED,
        "processes": NO_PERMISSION,
    }

    gpu = read(nvml, tmp_path).gpus[0]

    assert gpu.memory_total_bytes is None
    assert gpu.memory_free_bytes is None
    assert gpu.memory_used_bytes is None
    assert gpu.compute_capability is None
    assert gpu.is_mig_enabled is None
    assert gpu.numa_node is None
    assert gpu.processes is None


def test_read_gpus_with_process_of_hidden_memory_keeps_none(tmp_path: Path) -> None:
    nvml = nvswitch_host(1)
    nvml.gpus[0].processes = {7: None}

    assert read(nvml, tmp_path).gpus[0].processes == (GpuProcess(7, None),)


def test_read_gpus_on_old_driver_falls_back(tmp_path: Path) -> None:
    nvml = nvswitch_host(1)
    nvml.is_old_driver = True

    gpu = read(nvml, tmp_path).gpus[0]

    assert gpu.memory_used_bytes == 4 * MIB
    assert gpu.processes is None


def test_read_gpus_with_mig_enabled_says_so(tmp_path: Path) -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[1].mig = 1

    assert [gpu.is_mig_enabled for gpu in read(nvml, tmp_path).gpus] == [False, True]


@pytest.mark.parametrize(
    ("sysfs", "affinity", "expected"),
    [
        pytest.param("1\n", (0,), 1, id="sysfs"),
        pytest.param("-1\n", (2,), 2, id="nvml"),
        pytest.param(None, (70,), 70, id="second word"),
        pytest.param("-1\n", (0, 1), None, id="several"),
        pytest.param("-1\n", (), None, id="none"),
    ],
)
def test_read_gpus_finds_numa_node(
    sysfs: str | None, affinity: tuple[int, ...], expected: int | None, tmp_path: Path
) -> None:
    nvml = FakeNvml([fake_gpu(0, numa_nodes=affinity)])
    if sysfs is not None:
        folder = tmp_path / "bus/pci/devices/0000:1b:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(sysfs)

    assert read(nvml, tmp_path).gpus[0].numa_node == expected


def write_sysfs(root: Path, online: str | None, nodes: dict[int, str]) -> None:
    """Lay out sysfs: the host's nodes, and the node of some GPUs by number."""
    if online is not None:
        (root / "devices/system/node").mkdir(parents=True)
        (root / "devices/system/node/online").write_text(f"{online}\n")
    for idx, node in nodes.items():
        folder = root / f"bus/pci/devices/0000:{0x1B + idx:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")


@pytest.mark.parametrize(
    ("online", "in_sysfs", "in_nvml", "expected", "asked_count"),
    [
        pytest.param("0-1", ("1",) * 8, (0,), [1] * 8, 0, id="sysfs knows"),
        pytest.param("0", ("-1",) * 8, (0,), [0] * 8, 0, id="one node"),
        pytest.param("2", ("-1",) * 8, (2,), [2] * 8, 0, id="one node of another number"),
        pytest.param("0", ("-1",) * 8, (1,), [0] * 8, 0, id="one node that NVML does not know"),
        pytest.param("0-1", ("-1",) * 8, (1,), [1] * 8, 8, id="several nodes"),
        pytest.param("0,2", ("-1",) * 8, (2,), [2] * 8, 8, id="several nodes with a gap"),
        pytest.param(None, ("-1",) * 8, (0,), [0] * 8, 8, id="nodes hidden"),
        pytest.param(None, (), (0,), [0] * 8, 8, id="sysfs hidden"),
        pytest.param("0-1", ("-1",) * 8, (), [None] * 8, 8, id="nobody knows"),
        pytest.param("0", ("0", "-1", "0"), (1,), [0] * 8, 0, id="sysfs knows some of one node"),
        pytest.param("0-1", ("0", "-1", "0"), (1,), [0, 1, 0, *[1] * 5], 6, id="sysfs knows some"),
    ],
)
def test_read_gpus_asks_nvml_for_numa_nodes_no_more_than_needed(
    online: str | None,
    in_sysfs: tuple[str, ...],
    in_nvml: tuple[int, ...],
    expected: list[int | None],
    asked_count: int,
    tmp_path: Path,
) -> None:
    write_sysfs(tmp_path, online, dict(enumerate(in_sysfs)))
    nvml = FakeNvml([fake_gpu(idx, numa_nodes=in_nvml) for idx in range(8)])

    assert [gpu.numa_node for gpu in read(nvml, tmp_path).gpus] == expected
    assert nvml.calls["nvmlDeviceGetMemoryAffinity"] == asked_count


def test_read_gpus_does_not_take_one_failed_reading_for_all(tmp_path: Path) -> None:
    write_sysfs(tmp_path, "0-1", {})
    nvml = FakeNvml([fake_gpu(idx, numa_nodes=(0,)) for idx in range(3)])
    nvml.gpus[0].errors["affinity"] = NOT_SUPPORTED

    assert [gpu.numa_node for gpu in read(nvml, tmp_path).gpus] == [None, 0, 0]


@pytest.mark.parametrize("online", ["0", "1", "0-1", None])
@pytest.mark.parametrize("in_sysfs", [{}, {1: "0"}, {0: "-1", 2: "1"}])
@pytest.mark.parametrize("answers", list(itertools.product(((0,), (1,), (0, 1), None), repeat=3)))
def test_read_gpus_finds_the_same_numa_node_whichever_others_are_read(
    online: str | None,
    in_sysfs: dict[int, str],
    answers: tuple[tuple[int, ...] | None, ...],
    tmp_path: Path,
) -> None:
    write_sysfs(tmp_path, online, in_sysfs)
    nvml = FakeNvml([fake_gpu(idx, numa_nodes=each or ()) for idx, each in enumerate(answers)])
    for idx, each in enumerate(answers):
        if each is None:
            nvml.gpus[idx].errors["affinity"] = NOT_SUPPORTED
    nodes = {gpu.idx: gpu.numa_node for gpu in read(nvml, tmp_path).gpus}

    subsets = [set(some) for size in (1, 2) for some in itertools.combinations(range(3), size)]
    for some in subsets:
        found = read_gpus(nvml, sys_root=tmp_path, only=some, is_brief=True).gpus
        assert {gpu.idx: gpu.numa_node for gpu in found} == {idx: nodes[idx] for idx in some}


def test_read_gpus_of_some_reads_nothing_of_the_others(tmp_path: Path) -> None:
    nvml = nvswitch_host()

    hardware = read_gpus(nvml, sys_root=tmp_path, only={6, 1, 9})

    assert [gpu.idx for gpu in hardware.gpus] == [1, 6]
    assert hardware.links == (("X", "NV18"), ("NV18", "X"))
    assert hardware.problems == ()
    assert nvml.calls["nvmlDeviceGetHandleByIndex"] == 2


def test_read_gpus_briefly_leaves_out_what_no_fingerprint_holds(tmp_path: Path) -> None:
    nvml = nvswitch_host()
    full = read(nvml, tmp_path)
    nvml.calls.clear()

    brief = read_gpus(nvml, sys_root=tmp_path, is_brief=True)

    left_out = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses")
    assert not nvml.calls.keys() & set(left_out)
    assert (brief.gpus[0].memory_used_bytes, brief.gpus[0].processes) == (None, None)
    assert brief.fingerprint(brief.gpus, nccl_version="2.28.9") == full.fingerprint(
        full.gpus, nccl_version="2.28.9"
    )


@pytest.mark.parametrize(
    ("nvml_code", "code", "words"),
    [
        (LIBRARY_NOT_FOUND, "nvml_absent", ("no NVIDIA driver found", "--gpus all")),
        (DRIVER_NOT_LOADED, "nvml_absent", ("no NVIDIA driver found", "modprobe nvidia")),
        (LIB_RM_VERSION_MISMATCH, "driver_mismatch", ("reboot or reload the driver",)),
        (UNKNOWN, "nvml_unknown", ("Unknown Error", "daemon-reload", "restart the container")),
        (NO_PERMISSION, "nvml_permission", ("/dev/nvidia",)),
        (20, "nvml_failed", ("code 20", "nvidia-smi")),
    ],
)
def test_read_gpus_with_broken_nvml_says_what_to_do(
    nvml_code: int, code: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(HostError) as caught:
        read(FakeNvml(init_error=nvml_code), tmp_path)

    assert caught.value.code == code
    assert caught.value.exit_code is ExitCode.HOST
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_read_gpus_with_one_lost_gpu_reads_the_others(tmp_path: Path) -> None:
    nvml = nvswitch_host(3)
    nvml.gpus[1].errors["handle"] = GPU_IS_LOST

    hardware = read(nvml, tmp_path)

    assert [gpu.idx for gpu in hardware.gpus] == [0, 2]
    assert hardware.links == (("X", "NV18"), ("NV18", "X"))
    assert len(hardware.problems) == 1
    assert hardware.problems[0].startswith("GPU 1 cannot be read: ")
    assert "lost" in hardware.problems[0]


def test_read_gpus_with_gpu_lost_midway_leaves_it_out(tmp_path: Path) -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[0].errors["processes"] = GPU_IS_LOST

    assert [gpu.idx for gpu in read(nvml, tmp_path).gpus] == [1]


def test_read_gpus_with_only_lost_gpus_raises(tmp_path: Path) -> None:
    nvml = nvswitch_host(1)
    nvml.gpus[0].errors["mig"] = GPU_IS_LOST

    with pytest.raises(HostError, match="reboot the host") as caught:
        read(nvml, tmp_path)

    assert caught.value.code == "gpu_lost"


@pytest.mark.parametrize("errors", [{}, {"handle": GPU_IS_LOST}], ids=["fine", "failing"])
def test_read_gpus_closes_nvml(errors: dict[str, int], tmp_path: Path) -> None:
    nvml = FakeNvml([fake_gpu(0, errors=errors)])

    if errors:
        with pytest.raises(HostError):
            read(nvml, tmp_path)
    else:
        read(nvml, tmp_path)

    assert nvml.open_count == 0


def test_the_last_reading_of_a_process_leaves_nvml_open(tmp_path: Path) -> None:
    nvml = nvswitch_host(2)

    read_gpus(nvml, sys_root=tmp_path, is_last=True)

    assert (nvml.open_count, nvml.calls["nvmlShutdown"]) == (1, 0)


def test_read_gpus_without_driver_on_this_machine_speaks_plainly() -> None:
    try:
        read_gpus()
    except HostError as error:
        assert "no NVIDIA driver found" in str(error)  # noqa: PT017 - a GPU machine raises nothing


def test_read_memory_used_bytes_returns_each_gpu_by_uuid() -> None:
    nvml = nvswitch_host(3)
    nvml.gpus[2].used_bytes = 5 * GIB
    nvml.gpus[1].errors["memory"] = NOT_SUPPORTED

    used = read_memory_used_bytes([fake_uuid(2), fake_uuid(1), fake_uuid(0)], nvml)

    assert used == {fake_uuid(2): 5 * GIB, fake_uuid(0): 4 * MIB}
    assert nvml.open_count == 0


def test_read_memory_used_bytes_with_lost_gpu_raises() -> None:
    nvml = nvswitch_host(2)
    nvml.gpus[0].errors["memory"] = GPU_IS_LOST

    with pytest.raises(HostError) as caught:
        read_memory_used_bytes([fake_uuid(0)], nvml)

    assert caught.value.code == "gpu_lost"
    assert nvml.open_count == 0


def test_read_foreign_processes_leaves_own_ones_out() -> None:
    nvml = nvswitch_host(3)
    nvml.gpus[0].processes = {10: MIB, 11: None}
    nvml.gpus[1].processes = {12: MIB}
    nvml.gpus[2].processes = {13: MIB}

    found = read_foreign_processes([fake_uuid(0), fake_uuid(1), fake_uuid(0)], {10}, nvml)

    assert [(entry.uuid, entry.process.pid) for entry in found] == [
        (fake_uuid(0), 11),
        (fake_uuid(1), 12),
    ]
    assert found[0].process.memory_used_bytes is None


def test_restricted_to_keeps_rank_order_and_repeats(tmp_path: Path) -> None:
    hardware = read(pcie_host(), tmp_path)
    one, two, five = (hardware.gpus[idx] for idx in (1, 2, 5))

    part = hardware.restricted_to([five, one, two, one])

    assert part.gpus == (five, one, two, one)
    assert part.links[0] == ("X", "SYS", "SYS", "SYS")
    assert part.links[1] == ("SYS", "X", "NODE", "X")


def test_fingerprint_holds_the_chosen_gpus_in_rank_order(tmp_path: Path) -> None:
    hardware = read(pcie_host(), tmp_path)
    gpus = [hardware.gpus[4], hardware.gpus[0]]

    fingerprint = hardware.fingerprint(gpus, nccl_version="2.28.9", torch_version="2.11.0")

    assert fingerprint.gpu_uuids == (fake_uuid(4), fake_uuid(0))
    assert fingerprint.link_matrix == (("X", "SYS"), ("SYS", "X"))
    assert fingerprint.numa_nodes == (1, 0)
    assert fingerprint.world_size == 2
    assert fingerprint.driver_version == "580.159.04"
    assert not fingerprint.is_partial


def test_fake_nvml_agrees_with_pynvml() -> None:
    real = importlib.import_module("pynvml")
    faked = {name: value for name, value in vars(FakeNvml).items() if name.lower()[:4] == "nvml"}

    assert {name for name in faked if not hasattr(real, name)} == set()
    numbers = {name: value for name, value in faked.items() if isinstance(value, int)}
    assert numbers == {name: getattr(real, name) for name in numbers}
