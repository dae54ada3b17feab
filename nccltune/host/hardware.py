"""What the driver says about this host's GPUs: the only module that opens NVML.

NVML is opened for each reading and closed after it, but for the last one of a process. A reading
that the driver does not give is None, never 0.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.host.fingerprint import Fingerprint, LinkMatrix
from nccltune.host.nvml_links import Endpoint, read_link_names, read_nvlinks
from nccltune.host.nvml_readings import (
    SYS_ROOT,
    NumaNodes,
    host_error,
    read_memory,
    read_optional,
    read_peer_refusal,
    read_processes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from nccltune.errors import HostError

SAME_GPU = "X"
"""Link of a GPU with itself, as ``nvidia-smi topo`` shows it."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a compute context on a GPU; its memory is None where the driver hides it."""

    pid: int
    memory_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """Somebody else's process on a GPU."""

    uuid: str
    process: GpuProcess


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as read at one moment.

    Attributes:
        idx: NVML's number, by PCI address. CUDA may count differently, so processes are given
            UUIDs.
        pci_bus_id: in lower case, ``00000000:1b:00.0``.
        compute_capability: ``sm90``.
        is_mig_enabled: None where it could not be read.
        processes: with a compute context; None where the driver does not list them.

    Memory and processes are None after a brief reading.
    """

    idx: int
    uuid: str
    name: str
    pci_bus_id: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    memory_used_bytes: int | None
    compute_capability: str | None
    is_mig_enabled: bool | None
    numa_node: int | None
    processes: tuple[GpuProcess, ...] | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs and how they reach one another.

    Attributes:
        links: by position in ``gpus``, twice: ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE``,
            ``SYS``; ``X`` on the diagonal; None where the driver does not say.
        problems: GPUs that could not be read, in words.
    """

    driver_version: str | None
    gpus: tuple[Gpu, ...]
    links: LinkMatrix
    problems: tuple[str, ...] = ()

    @property
    def has_full_nvlink(self) -> bool:
        """Whether every GPU reaches every other one by NVLink."""
        names = self._names()
        return bool(names) and all(name is not None and name.startswith("NV") for name in names)

    @property
    def is_partial(self) -> bool:
        """Whether part of the topology is hidden, as in many containers and virtual machines."""
        names = self._names()
        is_flattened = len(self.gpus) > 2 and set(names) == {"PHB"}
        return is_flattened or None in names or any(gpu.numa_node is None for gpu in self.gpus)

    def restricted_to(self, gpus: Sequence[Gpu]) -> Hardware:
        """Return the part that these GPUs make up, in their order, repeated ones included."""
        position = {gpu.uuid: i for i, gpu in enumerate(self.gpus)}
        order = [position[gpu.uuid] for gpu in gpus]
        links = tuple(tuple(self.links[i][j] for j in order) for i in order)
        return Hardware(self.driver_version, tuple(gpus), links)

    def fingerprint(
        self, gpus: Sequence[Gpu], *, nccl_version: str | None, torch_version: str | None = None
    ) -> Fingerprint:
        """Return what a profile found on these GPUs, one a rank, depends on."""
        part = self.restricted_to(gpus)
        return Fingerprint(
            gpu_names=tuple(gpu.name for gpu in gpus),
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            driver_version=self.driver_version,
            nccl_version=nccl_version,
            link_matrix=part.links,
            numa_nodes=tuple(gpu.numa_node for gpu in gpus),
            world_size=len(gpus),
            torch_version=torch_version,
            is_partial=part.is_partial,
        )

    def _names(self) -> list[str | None]:
        return [name for row in self.links for name in row if name != SAME_GPU]


def read_gpus(
    nvml: ModuleType | None = None,
    *,
    sys_root: Path = SYS_ROOT,
    only: Collection[int] | None = None,
    is_brief: bool = False,
    is_last: bool = False,
) -> Hardware:
    """Read the GPUs of this host and the links between them; none is no error here.

    Args:
        nvml: stands in for ``pynvml`` in tests.
        sys_root: where sysfs is mounted.
        only: NVML's numbers of the GPUs to read; None for every GPU.
        is_brief: leave out memory and processes, which no fingerprint holds.
        is_last: leave NVML open, for this process ends soon and the kernel closes it, too.

    Raises:
        HostError: NVML cannot be used at all: no driver, a driver that was upgraded under a running
            system, a container that lost its devices, or nothing but GPUs that cannot be read.
    """
    with _session(nvml, stays_open=is_last) as module:
        gpus: list[Gpu] = []
        endpoints: list[Endpoint] = []
        failures: list[tuple[int, HostError]] = []
        numa_nodes = NumaNodes(module, sys_root)
        for idx in range(module.nvmlDeviceGetCount()):
            if only is not None and idx not in only:
                continue
            try:
                handle = module.nvmlDeviceGetHandleByIndex(idx)
                gpu = _read_gpu(module, handle, idx, numa_nodes, is_brief=is_brief)
                endpoint = Endpoint(handle, gpu.pci_bus_id, read_nvlinks(module, handle))
            except module.NVMLError as error:
                failures.append((idx, host_error(module, error.value, str(error))))
            else:
                gpus.append(gpu)
                endpoints.append(endpoint)
        if failures and not gpus:
            raise failures[0][1]
        return Hardware(
            driver_version=read_optional(module, module.nvmlSystemGetDriverVersion),
            gpus=tuple(gpus),
            links=_read_links(module, endpoints),
            problems=tuple(f"GPU {idx} cannot be read: {error}" for idx, error in failures),
        )


def read_memory_used_bytes(
    uuids: Collection[str], nvml: ModuleType | None = None
) -> dict[str, int]:
    """Read GPU memory in use, by UUID; a GPU whose driver does not say is left out.

    Raises:
        HostError: as for ``read_gpus``; also when one of these GPUs is gone.
    """
    with _session(nvml) as module:
        used = {uuid: read_memory(module, _handle(module, uuid))[2] for uuid in uuids}
    return {uuid: used_bytes for uuid, used_bytes in used.items() if used_bytes is not None}


def read_foreign_processes(
    uuids: Collection[str], own_pids: Collection[int], nvml: ModuleType | None = None
) -> list[ForeignProcess]:
    """Read who else computes on these GPUs.

    In a container the list is incomplete: processes of other containers do not show.

    Raises:
        HostError: as for ``read_memory_used_bytes``.
    """
    with _session(nvml) as module:
        return [
            ForeignProcess(uuid, GpuProcess(pid, used_bytes))
            for uuid in dict.fromkeys(uuids)
            for pid, used_bytes in read_processes(module, _handle(module, uuid)) or ()
            if pid not in own_pids
        ]


def read_peer_refusals(
    uuids: Sequence[str], nvml: ModuleType | None = None
) -> tuple[tuple[str | None, ...], ...]:
    """Read why GPUs may not use one another's memory directly, by position twice.

    Empty where they may, and for a GPU with itself; None where the driver does not say.

    Raises:
        HostError: as for ``read_memory_used_bytes``.
    """
    with _session(nvml) as module:
        handles = [_handle(module, uuid) for uuid in uuids]
        return tuple(
            tuple("" if a is b else read_peer_refusal(module, a, b) for b in handles)
            for a in handles
        )


@contextmanager
def _session(nvml: ModuleType | None, *, stays_open: bool = False) -> Iterator[ModuleType]:
    """Open NVML, close it whatever happens unless it stays open, and turn its errors into ours."""
    module = _import_pynvml() if nvml is None else nvml
    try:
        module.nvmlInit()
        try:
            yield module
        finally:
            if not stays_open:
                with suppress(module.NVMLError):
                    module.nvmlShutdown()
    except module.NVMLError as error:
        raise host_error(module, error.value, str(error)) from error


def _import_pynvml() -> ModuleType:
    # Not at the top: it costs more than most commands, which never look at a GPU, take in all.
    import pynvml

    module: ModuleType = pynvml
    return module


def _handle(nvml: ModuleType, uuid: str) -> object:
    handle: object = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return handle


def _read_gpu(
    nvml: ModuleType, handle: object, idx: int, numa_nodes: NumaNodes, *, is_brief: bool
) -> Gpu:
    pci_bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId.lower()
    memory_bytes = (None, None, None) if is_brief else read_memory(nvml, handle)
    total_bytes, free_bytes, used_bytes = memory_bytes
    processes = None if is_brief else read_processes(nvml, handle)
    capability = read_optional(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        idx=idx,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        pci_bus_id=pci_bus_id,
        memory_total_bytes=total_bytes,
        memory_free_bytes=free_bytes,
        memory_used_bytes=used_bytes,
        compute_capability=None if capability is None else f"sm{capability[0]}{capability[1]}",
        is_mig_enabled=_read_mig(nvml, handle),
        numa_node=numa_nodes.read(handle, pci_bus_id),
        processes=None if processes is None else tuple(GpuProcess(*found) for found in processes),
    )


def _read_mig(nvml: ModuleType, handle: object) -> bool | None:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return False  # a GPU that has no such mode
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _read_links(nvml: ModuleType, endpoints: Sequence[Endpoint]) -> LinkMatrix:
    names = read_link_names(nvml, endpoints)
    positions = range(len(endpoints))
    return tuple(tuple(SAME_GPU if i == j else names[i, j] for j in positions) for i in positions)
