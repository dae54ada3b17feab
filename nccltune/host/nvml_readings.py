"""Single readings through an NVML that is already open, and what its errors mean on a real host.

Nothing here imports pynvml: ``nccltune.host.hardware`` opens it and hands the module over, tests
hand over a fake.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nccltune.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

T = TypeVar("T")

SYS_ROOT = Path("/sys")

# Reading and writing. pynvml's own name for the first is a tuple (13.615), which no call takes.
_PEER_CAPS = (0, 1)

_PEER_REFUSALS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the way between them does not support it",
    4: "it is switched off in the driver",
    6: "the driver does not know why",
}
"""nvmlGpuP2PStatus_t, beside 0 for granted and 5 for not supported."""

MASK_WORDS = 16
"""64-bit words of a NUMA node mask: 1024 nodes, the most that Linux knows."""


def host_error(nvml: ModuleType, code: int, text: str) -> HostError:
    """Say what an NVML error means on a real host, and what to do about it."""
    name, message = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
            "nvml_absent",
            f"no NVIDIA driver found: {text} (libnvidia-ml.so.1); install the driver, or start"
            " the container with GPU access (docker: --gpus all)",
        ),
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: (
            "nvml_absent",
            f"no NVIDIA driver found: {text}; load it (modprobe nvidia) or reboot the host",
        ),
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "driver_mismatch",
            f"NVML: {text.rstrip('.')}: the driver was upgraded while the old one is still loaded;"
            " reboot or reload the driver",
        ),
        nvml.NVML_ERROR_UNKNOWN: (
            "nvml_unknown",
            f"NVML: {text}: this container has probably lost its GPU devices, as 'systemctl"
            " daemon-reload' on the host does to running containers; restart the container, and"
            " name the devices at its start (docker: --device /dev/nvidia0 ...) or use the"
            " cgroupfs cgroup driver to keep it from happening again",
        ),
        nvml.NVML_ERROR_GPU_IS_LOST: (
            "gpu_lost",
            f"NVML: {text}: the GPU has fallen off the bus (see Xid lines in the kernel log);"
            " reboot the host",
        ),
        nvml.NVML_ERROR_NO_PERMISSION: (
            "nvml_permission",
            f"NVML: {text}: this user cannot open /dev/nvidia*; give it access to these devices",
        ),
    }.get(code, ("nvml_failed", f"NVML failed: {text}; see whether nvidia-smi works here"))
    return HostError(message, code=name)


def read_optional(nvml: ModuleType, read: Callable[..., T], *arguments: object) -> T | None:
    """Return a reading, or None where the driver has none to give; a lost GPU still raises."""
    unavailable = {
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_NO_PERMISSION,
        nvml.NVML_ERROR_NOT_FOUND,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_NO_DATA,
        nvml.NVML_ERROR_INVALID_ARGUMENT,
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        nvml.NVML_ERROR_UNKNOWN,  # what a sandbox may answer to a call that it does not pass on
    }
    try:
        return read(*arguments)
    except nvml.NVMLLibraryMismatchError:
        return None
    except nvml.NVMLError as error:
        if error.value in unavailable:
            return None
        raise


def read_memory(nvml: ModuleType, handle: object) -> tuple[int | None, int | None, int | None]:
    """Return total, free and used bytes; the driver's own share is neither free nor used."""
    memory = read_optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if memory is None:
        # Drivers before 510 know only the first form, which counts their own share as used.
        memory = read_optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return (None, None, None) if memory is None else (memory.total, memory.free, memory.used)


def read_processes(nvml: ModuleType, handle: object) -> tuple[tuple[int, int | None], ...] | None:
    """Return pid and used bytes of every process with a compute context."""
    found = read_optional(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return None if found is None else tuple((p.pid, p.usedGpuMemory) for p in found)


def read_peer_refusal(nvml: ModuleType, one: object, other: object) -> str | None:
    """Say why one GPU may not read and write the other's memory; empty where it may.

    None where the driver does not say.
    """
    found = [
        read_optional(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, cap) for cap in _PEER_CAPS
    ]
    if all(status == nvml.NVML_P2P_STATUS_OK for status in found):
        return ""
    refused = [status for status in found if status not in (None, nvml.NVML_P2P_STATUS_OK)]
    return _PEER_REFUSALS.get(refused[0], "not supported") if refused else None


class NumaNodes:
    """Finds the NUMA node nearest to each GPU; NVML is asked last, for it takes long over it.

    What is found for a GPU depends on no other one, nor on which of them are read.
    """

    def __init__(self, nvml: ModuleType, sys_root: Path) -> None:
        self._nvml = nvml
        self._devices = sys_root / "bus/pci/devices"
        # A virtual machine mostly has one node, and does not say that its devices belong to it.
        online = _read_text(sys_root / "devices/system/node/online")
        self._only = int(online) if online.isdecimal() else None

    def read(self, handle: object, pci_bus_id: str) -> int | None:
        """Return the node of one GPU; None where it is hidden or NVML names several."""
        domain, _, rest = pci_bus_id.partition(":")
        node = _read_text(self._devices / f"{int(domain, 16):04x}:{rest}/numa_node")
        if node.isdecimal():
            return int(node)
        if self._only is not None:
            return self._only  # whatever NVML calls it, there is no other one here
        nodes = self._ask(handle)
        return nodes[0] if len(nodes) == 1 else None

    def _ask(self, handle: object) -> list[int]:
        mask = read_optional(
            self._nvml,
            self._nvml.nvmlDeviceGetMemoryAffinity,
            handle,
            MASK_WORDS,
            self._nvml.NVML_AFFINITY_SCOPE_NODE,
        )
        return [] if mask is None else _nodes_from_mask(list(mask))


def _read_text(path: Path) -> str:
    """Return what a file of sysfs says; empty where it is not there."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _nodes_from_mask(words: list[int]) -> list[int]:
    """List the bits that are set, 64 a word.

    >>> _nodes_from_mask([2, 1])
    [1, 64]
    """
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]
