from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.doctor import Status, gpu_checks
from nccltune.doctor.containers import find_gpu_containers, has_device_links
from nccltune.doctor.pci import has_acs_redirect, read_pci_path
from tests.support import fake_nvml
from tests.support.doctor_hosts import DoctorHost, assert_status, doctor_host, launch_words
from tests.support.fake_nvml import (
    GIB,
    LIBRARY_NOT_FOUND,
    FakeNvml,
    fake_gpu,
    nvswitch_host,
    pcie_host,
)

DEPENDENT = ("gpu_links", "peer_access", "gpu_users", "shm", "iommu_acs")
REDIRECT, TRANSLATED = 0b101, 0b1000000
"""ACS control words: source validation with request redirect; direct translated alone."""


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    return doctor_host(tmp_path / "root")


@pytest.fixture
def pcie(host: DoctorHost) -> DoctorHost:
    host.nvml = pcie_host()
    return host


# NVML.


def test_nvml_of_a_healthy_host_is_fine(host: DoctorHost) -> None:
    checks = host.look()

    assert_status(checks["nvml"], Status.OK, "580.159.04", "8 GPUs")
    assert_status(checks["gpus"], Status.OK, "8x NVIDIA H200")


@pytest.mark.parametrize(
    ("code", "message", "fix"),
    [
        (LIBRARY_NOT_FOUND, "no NVIDIA driver", "--gpus all"),
        (fake_nvml.DRIVER_NOT_LOADED, "no NVIDIA driver", "modprobe nvidia"),
        (fake_nvml.LIB_RM_VERSION_MISMATCH, "upgraded while the old one", "reboot or reload"),
        (fake_nvml.UNKNOWN, "lost its GPU devices", "restart the container"),
        (fake_nvml.GPU_IS_LOST, "fallen off the bus", "reboot the host"),
        (fake_nvml.NO_PERMISSION, "cannot open /dev/nvidia", "give it access"),
    ],
)
def test_nvml_that_cannot_be_used_is_a_failure_with_its_cure(
    host: DoctorHost, code: int, message: str, fix: str
) -> None:
    host.nvml = FakeNvml(init_error=code)

    checks = host.look()

    assert_status(checks["nvml"], Status.FAIL, message, fix)
    assert {checks[name].status for name in DEPENDENT} == {Status.SKIP}


def test_nvml_of_one_lost_gpu_names_it(host: DoctorHost) -> None:
    host.nvml.gpus[3].errors["handle"] = fake_nvml.GPU_IS_LOST

    assert_status(host.look()["nvml"], Status.FAIL, "GPU 3", "off the bus")


def test_mig_is_a_failure(host: DoctorHost) -> None:
    host.nvml.gpus[0].mig = 1

    assert_status(host.look()["gpus"], Status.FAIL, "MIG", "nvidia-smi -mig 0")


def test_mig_instances_in_the_environment_are_a_failure(host: DoctorHost) -> None:
    host.environ["CUDA_VISIBLE_DEVICES"] = "MIG-0123"

    assert_status(host.look()["gpus"], Status.FAIL, "MIG-0123")


def test_launch_that_wants_more_gpus_than_there_are_is_a_failure(
    host: DoctorHost, tmp_path: Path
) -> None:
    host.nvml = nvswitch_host(4)

    assert_status(host.look(*launch_words(tmp_path))["gpus"], Status.FAIL, "needs 8 GPUs", "--tp")


def test_launch_with_too_few_visible_gpus_is_a_failure(host: DoctorHost, tmp_path: Path) -> None:
    host.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

    check = host.look(*launch_words(tmp_path))["gpus"]

    assert_status(check, Status.FAIL, "needs 8 GPUs", "CUDA_VISIBLE_DEVICES")


def test_gpus_of_different_models_are_told(host: DoctorHost) -> None:
    host.nvml.gpus[7].name = "NVIDIA H100"

    assert_status(host.look()["gpus"], Status.WARN, "7x NVIDIA H200", "1x NVIDIA H100")


def test_single_gpu_has_nothing_to_compare(host: DoctorHost) -> None:
    host.nvml = nvswitch_host(1)

    checks = host.look()

    assert checks["gpus"].status is Status.OK
    assert checks["nvml"].message.endswith("for 1 GPU")
    assert {checks[n].status for n in DEPENDENT if n != "gpu_users"} == {Status.SKIP}


# Links and peer access.


def test_links_are_counted(pcie: DoctorHost) -> None:
    assert_status(pcie.look()["gpu_links"], Status.OK, "16 SYS", "8 NODE", "4 PIX")


def test_hidden_topology_is_told(pcie: DoctorHost) -> None:
    pcie.nvml.ancestor = lambda _a, _b: fake_nvml.PHB

    assert_status(pcie.look()["gpu_links"], Status.WARN, "28 PHB", "hidden")


def test_nvlinks_of_different_width_are_told(host: DoctorHost) -> None:
    host.nvml.gpus[2].nvlinks = host.nvml.gpus[2].nvlinks[:17]

    assert_status(host.look()["gpu_links"], Status.WARN, "NV17", "NV18", "nvlink --status")


def test_nvlink_between_some_pairs_only_is_told(host: DoctorHost) -> None:
    host.nvml.gpus[2].nvlinks = []

    assert_status(host.look()["gpu_links"], Status.WARN, "joins only some pairs")


def test_peer_access_everywhere_is_fine(host: DoctorHost) -> None:
    assert_status(host.look()["peer_access"], Status.OK, "all 8 GPUs")


@pytest.mark.parametrize(
    ("status", "reason"), [(1, "chipset"), (2, "the GPU does not"), (4, "driver"), (5, "supported")]
)
def test_peer_access_that_is_refused_says_why(pcie: DoctorHost, status: int, reason: str) -> None:
    pcie.nvml.peer_status = lambda a, b: status if {a, b} == {1, 4} else 0

    assert_status(pcie.look()["peer_access"], Status.WARN, "GPUs 1 and 4", reason, "IOMMU")


def test_peer_access_that_two_pairs_lack_names_one_more(pcie: DoctorHost) -> None:
    pcie.nvml.peer_status = lambda a, b: int({a, b} in ({1, 4}, {2, 5}))

    assert_status(pcie.look()["peer_access"], Status.WARN, "GPUs 1 and 4 and 1 more pair:")


def test_peer_access_refused_in_spite_of_nvlink_is_a_failure(host: DoctorHost) -> None:
    host.nvml.peer_status = lambda _a, _b: 5

    assert_status(host.look()["peer_access"], Status.FAIL, "27 more pairs", "NVLink is there")


def test_peer_access_that_the_driver_hides_is_skipped(pcie: DoctorHost) -> None:
    pcie.nvml.peer_status = lambda _a, _b: None

    assert pcie.look()["peer_access"].status is Status.SKIP


# Who uses them.


def process(host: DoctorHost, pid: int, *argv: str) -> None:
    """Let a process run on the first GPU."""
    fields = ["S", "1", "1", "1", *["0"] * 15, "4711", *["0"] * 20]
    host.put(f"proc/{pid}/stat", f"{pid} (x y) {' '.join(fields)}\n")
    host.put(f"proc/{pid}/cmdline", "\0".join(argv) + "\0")
    host.nvml.gpus[0].processes[pid] = GIB


def test_ranks_of_sglang_are_no_strangers(host: DoctorHost) -> None:
    process(host, 41, "sglang::scheduler_TP0")
    assert_status(host.look()["gpu_users"], Status.OK, "1 SGLang process runs there")

    process(host, 42, "python", "-m", "sglang.launch_server", "--tp", "8")
    assert_status(host.look()["gpu_users"], Status.OK, "2 SGLang processes run there")


def test_strangers_are_named(host: DoctorHost) -> None:
    process(host, 41, "sglang::scheduler_TP0")
    process(host, 43, "python", "train.py", "--data", "sglang.txt")

    assert_status(host.look()["gpu_users"], Status.WARN, "pid 43 (python train.py", "GPU 0")


def test_strangers_of_other_containers_are_named_by_number(host: DoctorHost) -> None:
    host.nvml.gpus[5].processes[77] = None

    assert_status(host.look()["gpu_users"], Status.WARN, "pid 77 (not visible here) on GPU 5")


def test_memory_in_use_by_nobody_is_told(host: DoctorHost) -> None:
    host.nvml.gpus[1].used_bytes = 30 * GIB

    assert_status(host.look()["gpu_users"], Status.WARN, "30720 MiB")


# Shared memory.


@pytest.mark.parametrize(
    ("free_bytes", "status", "word"),
    [
        (64 << 20, Status.FAIL, "--shm-size"),
        (1 << 30, Status.WARN, "may not fit"),
        (32 << 30, Status.OK, "enough"),
    ],
)
def test_shared_memory_is_measured_against_what_ranks_need(
    pcie: DoctorHost, monkeypatch: pytest.MonkeyPatch, free_bytes: int, status: Status, word: str
) -> None:
    monkeypatch.setattr(gpu_checks, "read_shm_free_bytes", lambda _path: free_bytes)

    assert_status(pcie.look()["shm"], status, "MiB free", word)


def test_shared_memory_matters_little_behind_nvlink(
    host: DoctorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "read_shm_free_bytes", lambda _path: 64 << 20)

    assert_status(host.look()["shm"], Status.WARN, "reach one another directly", "--shm-size")


# IOMMU and ACS.


def config(*capabilities: tuple[int, int], length: int = 4096) -> bytes:
    """Return a configuration space with extended capabilities: id and the word at offset 6."""
    space = bytearray(length)
    position = 0x100
    for idx, (capability, control) in enumerate(capabilities):
        following = position + 0x40 if idx + 1 < len(capabilities) else 0
        header = capability | 1 << 16 | following << 20
        space[position : position + 4] = header.to_bytes(4, "little")
        space[position + 6 : position + 8] = control.to_bytes(2, "little")
        position += 0x40
    return bytes(space)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (config((0x0001, 0xFFFF), (0x000D, REDIRECT)), True),
        (config((0x000D, TRANSLATED)), False),
        (config((0x0001, 0xFFFF)), False),
        (config(), False),
        (config((0x000D, REDIRECT))[:64], None),
        (config((0x000D, REDIRECT))[:256], None),
        (b"\xff" * 4096, None),
        (config((0x0001, 0))[:0x100] + (0x0001 | 0x100 << 20).to_bytes(4, "little"), False),
    ],
    ids=["redirect", "other bits", "no acs", "none", "user", "cut", "gone", "loop"],
)
def test_acs_is_read_from_the_extended_space(content: bytes, expected: bool | None) -> None:
    assert has_acs_redirect(content) is expected


def bridge(host: DoctorHost, gpu_idx: int, content: bytes, *, iommu: str | None = None) -> str:
    """Put a bridge above a GPU; return the bridge's address."""
    address = f"0000:{0x1B + gpu_idx:02x}:00.0"
    above = f"0000:00:{gpu_idx:02x}.0"
    folder = host.root / "sys/devices/pci0000:00" / above / address
    folder.mkdir(parents=True)
    (folder.parent / "config").write_bytes(content)
    link = host.root / "sys/bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    if iommu is not None:
        host.put(f"sys/kernel/iommu_groups/{gpu_idx}/type", f"{iommu}\n")
        (folder / "iommu_group").symlink_to(host.root / f"sys/kernel/iommu_groups/{gpu_idx}")
    return above


def test_pci_path_lists_the_bridges_above(pcie: DoctorHost) -> None:
    above = bridge(pcie, 0, config((0x000D, REDIRECT)), iommu="DMA-FQ")

    path = read_pci_path("00000000:1b:00.0", pcie.root / "sys")

    assert (path.address, path.iommu_type) == ("0000:1b:00.0", "DMA-FQ")
    assert path.redirecting == (above,)


def test_acs_above_gpus_is_told_with_the_command(pcie: DoctorHost) -> None:
    above = bridge(pcie, 0, config((0x000D, REDIRECT)))

    assert_status(pcie.look()["iommu_acs"], Status.WARN, f"ACS on {above}", f"setpci -s {above}")


def test_iommu_that_translates_is_told(pcie: DoctorHost) -> None:
    bridge(pcie, 0, config(), iommu="DMA")

    assert_status(pcie.look()["iommu_acs"], Status.WARN, "0000:1b:00.0", "iommu=pt")


def test_iommu_that_passes_through_is_fine(pcie: DoctorHost) -> None:
    bridge(pcie, 0, config(), iommu="identity")

    assert pcie.look()["iommu_acs"].status is Status.OK


def test_acs_that_only_root_can_read_is_skipped(pcie: DoctorHost) -> None:
    bridge(pcie, 0, config((0x000D, REDIRECT))[:64])

    assert_status(pcie.look()["iommu_acs"], Status.SKIP, "as root")


def test_pci_tree_that_is_hidden_is_skipped(pcie: DoctorHost) -> None:
    assert_status(pcie.look()["iommu_acs"], Status.SKIP, "no PCI tree")


def test_acs_does_not_matter_to_nvlink(host: DoctorHost) -> None:
    bridge(host, 0, config((0x000D, REDIRECT)), iommu="DMA")

    assert_status(host.look()["iommu_acs"], Status.OK, "NVLink")


# Containers that a reload of systemd would cut off.

DOCKER = "/system.slice/docker-" + "0123456789ab" + "c" * 52 + ".scope"
POD = "/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + "f" * 64 + ".scope"
CGROUPFS = "/docker/" + "0123456789ab" + "c" * 52


def container(host: DoctorHost, pid: int, cgroup: str, *, has_gpu: bool = True) -> None:
    host.put(f"proc/{pid}/cgroup", f"0::{cgroup}\n")
    folder = host.root / f"proc/{pid}/fd"
    folder.mkdir(parents=True)
    (folder / "0").symlink_to("/dev/null")
    if has_gpu:
        (folder / "7").symlink_to("/dev/nvidia3")


def test_gpu_containers_under_systemd_are_named_with_the_way_out(host: DoctorHost) -> None:
    container(host, 100, DOCKER)
    container(host, 101, DOCKER)
    container(host, 102, POD)

    check = host.look()["gpu_containers"]

    words = ("docker 0123456789ab, ", "cri-containerd ffffffffffff", "create-dev-char-symlinks")
    assert_status(check, Status.WARN, "docker", "daemon-reload", *words[1:])
    assert check.message.count("0123456789ab") == 1


def test_gpu_containers_of_the_other_cgroup_driver_are_safe(host: DoctorHost) -> None:
    container(host, 100, CGROUPFS)

    assert host.look()["gpu_containers"].status is Status.OK


def test_containers_without_a_gpu_are_safe(host: DoctorHost) -> None:
    container(host, 100, DOCKER, has_gpu=False)

    assert host.look()["gpu_containers"].status is Status.OK


def test_gpu_containers_are_found_by_nvml_where_open_files_are_hidden(host: DoctorHost) -> None:
    container(host, 100, DOCKER, has_gpu=False)

    assert [each.engine for each in find_gpu_containers(host.root / "proc", {100})] == ["docker"]


def test_gpu_containers_keep_their_gpus_where_device_links_exist(host: DoctorHost) -> None:
    container(host, 100, DOCKER)
    links = host.root / "dev/char"
    links.mkdir()
    for name, number in (("nvidia0", 0), ("nvidia1", 1), ("nvidiactl", 255)):
        host.put(f"dev/{name}", "")
        (links / f"195:{number}").symlink_to(f"../{name}")

    assert_status(host.look()["gpu_containers"], Status.OK, "a reload of systemd keeps them")
    (links / "195:1").unlink()
    assert not has_device_links(host.root / "dev")


def test_gpu_containers_do_not_matter_without_systemd(host: DoctorHost) -> None:
    container(host, 100, DOCKER)
    host.put("proc/1/comm", "tini\n")

    assert host.look()["gpu_containers"].status is Status.SKIP


def test_fake_gpu_has_the_address_that_bridges_are_put_above() -> None:
    assert fake_gpu(0).bus_id == "00000000:1B:00.0"
