"""A stand-in for ``pynvml``: made-up hosts behind the calls that nccltune makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
GIB = 1 << 30

LIBRARY_NOT_FOUND = 12
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18
NOT_SUPPORTED = 3
NO_PERMISSION = 4
UNKNOWN = 999

ERROR_TEXTS = {
    1: "Uninitialized",
    2: "Invalid Argument",
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    6: "Not Found",
    DRIVER_NOT_LOADED: "Driver Not Loaded",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    GPU_IS_LOST: "GPU is lost",
    LIB_RM_VERSION_MISMATCH: "RM has detected an NVML/RM version mismatch.",
    UNKNOWN: "Unknown Error",
}

SWITCH = 2
OTHER_GPU = 0
PIX, PXB, PHB, NODE, SYS = 10, 20, 30, 40, 50


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return ERROR_TEXTS.get(self.value, f"NVML Error with code {self.value}")


class FakeMismatchError(Exception):
    pass


@dataclass
class FakeGpu:
    """A GPU; a reading that is an ``int`` of ``errors`` fails with that NVML code."""

    uuid: str
    bus_id: str
    name: str = "NVIDIA H200"
    total_bytes: int = 141 * GIB
    used_bytes: int = 4 * MIB
    processes: dict[int, int | None] = field(default_factory=dict)
    mig: int = 0
    capability: tuple[int, int] = (9, 0)
    numa_nodes: tuple[int, ...] = (0,)
    nvlinks: list[tuple[str | None, int | None]] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


class FakeNvml(ModuleType):
    """The calls of ``pynvml`` over a list of fake GPUs.

    Attributes:
        ancestor: level by two indices; a raised error is the driver's.
        has_nvlink_p2p: by two indices; None where the driver does not say.
        peer_status: nvmlGpuP2PStatus_t by two indices; None where the driver does not say.
        open_count: sessions that are open now.
        calls: how often each call was made.
    """

    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = NO_PERMISSION
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = DRIVER_NOT_LOADED
    NVML_ERROR_LIBRARY_NOT_FOUND = LIBRARY_NOT_FOUND
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = GPU_IS_LOST
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = LIB_RM_VERSION_MISMATCH
    NVML_ERROR_NO_DATA = 21
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
    NVML_ERROR_UNKNOWN = UNKNOWN
    NVML_FEATURE_ENABLED = 1
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_GPU = OTHER_GPU
    NVML_TOPOLOGY_INTERNAL = 0
    NVML_TOPOLOGY_SINGLE = PIX
    NVML_TOPOLOGY_MULTIPLE = PXB
    NVML_TOPOLOGY_HOSTBRIDGE = PHB
    NVML_TOPOLOGY_NODE = NODE
    NVML_TOPOLOGY_SYSTEM = SYS
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_AFFINITY_SCOPE_NODE = 0
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - pynvml's name
    NVMLError = FakeNvmlError
    NVMLLibraryMismatchError = FakeMismatchError

    def __init__(
        self,
        gpus: list[FakeGpu] | None = None,
        *,
        ancestor: Callable[[int, int], int] = lambda _a, _b: SYS,
        has_nvlink_p2p: Callable[[int, int], bool | None] = lambda _a, _b: False,
        peer_status: Callable[[int, int], int | None] = lambda _a, _b: 0,
        init_error: int | None = None,
        driver_version: str = "580.159.04",
        is_old_driver: bool = False,
    ) -> None:
        super().__init__("pynvml")
        self.gpus = gpus or []
        self.ancestor = ancestor
        self.has_nvlink_p2p = has_nvlink_p2p
        self.peer_status = peer_status
        self.init_error = init_error
        self.driver_version = driver_version
        self.is_old_driver = is_old_driver
        self.open_count = 0
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            self.calls[name] += 1
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise FakeNvmlError(self.init_error)
        self.open_count += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open_count -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._check_open()
        return self.driver_version

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check_open()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, idx: int) -> FakeGpu:  # noqa: N802
        return self._read(self.gpus[idx], "handle")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return self._read(gpu, "handle")
        raise FakeNvmlError(6)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._read(gpu, "uuid").uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._read(gpu, "name").name

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=self._read(gpu, "pci").bus_id)

    def nvmlDeviceGetMemoryInfo(  # noqa: N802
        self, gpu: FakeGpu, version: int | None = None
    ) -> SimpleNamespace:
        self._read(gpu, "memory")
        if version is not None and self.is_old_driver:
            raise FakeNvmlError(13)
        free_bytes = gpu.total_bytes - gpu.used_bytes
        return SimpleNamespace(total=gpu.total_bytes, free=free_bytes, used=gpu.used_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:  # noqa: N802
        return self._read(gpu, "capability").capability

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        return [self._read(gpu, "mig").mig, gpu.mig]

    def nvmlDeviceGetComputeRunningProcesses(  # noqa: N802
        self, gpu: FakeGpu
    ) -> list[SimpleNamespace]:
        self._read(gpu, "processes")
        if self.is_old_driver:
            raise FakeMismatchError
        return [SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in gpu.processes.items()]

    def nvmlDeviceGetMemoryAffinity(  # noqa: N802
        self, gpu: FakeGpu, word_count: int, scope: int
    ) -> list[int]:
        self._read(gpu, "affinity")
        assert scope == self.NVML_AFFINITY_SCOPE_NODE
        words = [0] * word_count
        for node in gpu.numa_nodes:
            words[node // 64] |= 1 << node % 64
        return words

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link_idx: int) -> int:  # noqa: N802
        self._read(gpu, "nvlink")
        if link_idx >= len(gpu.nvlinks):
            raise FakeNvmlError(2 if gpu.nvlinks else NOT_SUPPORTED)
        return int(gpu.nvlinks[link_idx] != (None, None))

    def nvmlDeviceGetNvLinkRemotePciInfo(  # noqa: N802
        self, gpu: FakeGpu, link_idx: int
    ) -> SimpleNamespace:
        remote, _ = gpu.nvlinks[link_idx]
        if remote is None:
            raise FakeNvmlError(NOT_SUPPORTED)
        return SimpleNamespace(busId=remote)

    def nvmlDeviceGetNvLinkRemoteDeviceType(  # noqa: N802
        self, gpu: FakeGpu, link_idx: int
    ) -> int:
        _, kind = gpu.nvlinks[link_idx]
        if kind is None:
            raise FakeNvmlError(NOT_SUPPORTED)
        return kind

    def nvmlDeviceGetP2PStatus(  # noqa: N802
        self, one: FakeGpu, other: FakeGpu, caps_idx: int
    ) -> int:
        if caps_idx in (0, 1):
            status = self.peer_status(self.gpus.index(one), self.gpus.index(other))
            if status is None:
                raise FakeNvmlError(NOT_SUPPORTED)
            return status
        assert caps_idx == self.NVML_P2P_CAPS_INDEX_NVLINK
        granted = self.has_nvlink_p2p(self.gpus.index(one), self.gpus.index(other))
        if granted is None:
            raise FakeNvmlError(NOT_SUPPORTED)
        return 0 if granted else 5

    def nvmlDeviceGetTopologyCommonAncestor(  # noqa: N802
        self, one: FakeGpu, other: FakeGpu
    ) -> int:
        return self.ancestor(self.gpus.index(one), self.gpus.index(other))

    def _check_open(self) -> None:
        if self.open_count < 1:
            raise FakeNvmlError(1)

    def _read(self, gpu: FakeGpu, what: str) -> FakeGpu:
        self._check_open()
        if what in gpu.errors:
            raise FakeNvmlError(gpu.errors[what])
        return gpu


def fake_uuid(idx: int) -> str:
    """A UUID whose first digits tell GPUs apart."""
    return f"GPU-{idx}a{idx:06x}-0000-4000-8000-{idx:012x}"


def fake_gpu(idx: int, **changes: object) -> FakeGpu:
    """One of eight GPUs, four on each NUMA node."""
    gpu = FakeGpu(fake_uuid(idx), f"00000000:{0x1B + idx:02X}:00.0", numa_nodes=(idx // 4,))
    for name, value in changes.items():
        setattr(gpu, name, value)
    return gpu


def nvswitch_host(count: int = 8) -> FakeNvml:
    """H200s behind NVSwitch, 18 links each."""
    links = [(f"00000000:{0x80 + i % 4:02X}:00.0", SWITCH) for i in range(18)]
    gpus = [fake_gpu(idx, nvlinks=list(links)) for idx in range(count)]
    return FakeNvml(gpus, ancestor=_pcie_level, has_nvlink_p2p=lambda _a, _b: True)


def island_host(count: int = 8, *, size: int = 4) -> FakeNvml:
    """GPUs whose NVLinks end at the edge of a board (``size`` 4) or of a bridged pair (2)."""
    gpus = [fake_gpu(idx) for idx in range(count)]
    for idx, gpu in enumerate(gpus):
        peers = [n for n in range(count) if n != idx and n // size == idx // size]
        gpu.nvlinks = [(gpus[peer].bus_id, OTHER_GPU) for peer in peers for _ in range(4)]
    return FakeNvml(gpus, ancestor=_pcie_level)


def pcie_host(count: int = 8) -> FakeNvml:
    """PCIe cards: pairs behind one switch, four on a socket."""
    gpus = [fake_gpu(idx, name="NVIDIA RTX PRO 6000", capability=(12, 0)) for idx in range(count)]
    for gpu in gpus:
        gpu.errors["mig"] = NOT_SUPPORTED
    return FakeNvml(gpus, ancestor=_pcie_level)


def _pcie_level(one: int, other: int) -> int:
    if one // 2 == other // 2:
        return PIX
    return NODE if one // 4 == other // 4 else SYS
