"""NVLinks, and the ways between GPUs, for as few questions to the driver as their answers take.

On a real host a question about two GPUs takes long enough for a launch to notice, and there are
twenty-eight pairs of eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from nccltune.host.nvml_readings import read_optional

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class NvLink:
    """One active NVLink of a GPU.

    Attributes:
        remote_bus_id: PCI address at the other end; None where the driver hides it.
        is_to_gpu: the other end is a GPU and no switch; None where the driver hides it.
    """

    remote_bus_id: str | None
    is_to_gpu: bool | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One GPU as the link matrix needs it."""

    handle: Any
    pci_bus_id: str
    nvlinks: tuple[NvLink, ...]

    def count_to(self, other: Endpoint) -> int:
        """Return how many NVLinks lead straight to another GPU."""
        return sum(link.remote_bus_id == other.pci_bus_id for link in self.nvlinks)


def read_nvlinks(nvml: ModuleType, handle: object) -> tuple[NvLink, ...]:
    """Return the active NVLinks of a GPU; none where it has none."""
    links = []
    for link_idx in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = read_optional(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link_idx)
        if state is None:
            break  # no NVLink at all, or the number of the last link is passed
        if state != nvml.NVML_FEATURE_ENABLED:
            continue
        pci = read_optional(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link_idx)
        kind = read_optional(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link_idx)
        is_to_gpu = None if kind is None else kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU
        links.append(NvLink(None if pci is None else pci.busId.lower(), is_to_gpu))
    return tuple(links)


def read_link_names(
    nvml: ModuleType, endpoints: Sequence[Endpoint]
) -> dict[tuple[int, int], str | None]:
    """Name the way from each GPU to each other one, by position, as ``nvidia-smi topo -m`` does.

    None where the driver does not say.
    """
    names: dict[tuple[int, int], str | None] = {}
    for i, j in combinations(range(len(endpoints)), 2):
        one, other = endpoints[i], endpoints[j]
        there, back = one.count_to(other), other.count_to(one)
        # What only the driver knows of two GPUs is the same from both ends.
        indirect = None if there and back else _name_indirect(nvml, one, other)
        names[i, j] = f"NV{there}" if there else indirect
        names[j, i] = f"NV{back}" if back else indirect
    return names


def _name_indirect(nvml: ModuleType, one: Endpoint, other: Endpoint) -> str | None:
    nvlink_count = _count_through_switches(nvml, one, other)
    if nvlink_count:
        return f"NV{nvlink_count}"
    level = read_optional(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one.handle, other.handle)
    names = {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",  # two GPUs on one board, behind its switch
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
        nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
    return None if level is None else names.get(level)


def _count_through_switches(nvml: ModuleType, one: Endpoint, other: Endpoint) -> int:
    # Through NVSwitch every link leads to every GPU, so that the weaker end's links count.
    possible = _weaker_end(one, other, {False, None})
    if not possible:
        return 0
    status = read_optional(
        nvml,
        nvml.nvmlDeviceGetP2PStatus,
        one.handle,
        other.handle,
        nvml.NVML_P2P_CAPS_INDEX_NVLINK,
    )
    if status is None:
        return _weaker_end(one, other, {False})
    # Where P2P is granted, a link whose end is hidden may lead there; else only one to a switch.
    return possible if status == nvml.NVML_P2P_STATUS_OK else 0


def _weaker_end(one: Endpoint, other: Endpoint, kinds: set[bool | None]) -> int:
    return min(sum(link.is_to_gpu in kinds for link in end.nvlinks) for end in (one, other))
