"""What stands between GPUs on PCI Express: IOMMU translation, and ACS on the switches above them.

Both send traffic between two GPUs up to the root of the tree and back. NVLink passes them by.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.doctor.check import Check, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nccltune.doctor.case import Case

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_TRANSLATING = frozenset({"DMA", "DMA-FQ"})
_EXTENDED_START = 0x100
_ACS_CAPABILITY = 0x000D
_NOTHING_READ = 0xFFFFFFFF
_REDIRECT_BITS = 0b11100
"""Of the ACS control word: P2P request redirect, P2P completion redirect, upstream forwarding."""

_NAMED = 3


@dataclass(frozen=True, slots=True)
class PciPath:
    """One GPU's way to the root.

    Attributes:
        is_known: whether the kernel shows the GPU in its tree at all.
        iommu_type: of its group: ``DMA``, ``DMA-FQ`` or ``identity``; None without an IOMMU, or
            where the kernel does not say.
        redirecting: bridges above it whose ACS redirects traffic between devices.
        hidden: bridges above it whose ACS cannot be read, for which one has to be root.
    """

    address: str
    is_known: bool
    iommu_type: str | None
    redirecting: tuple[str, ...]
    hidden: tuple[str, ...]


def read_pci_path(bus_id: str, sys_root: Path) -> PciPath:
    """Read what lies above one GPU.

    Args:
        bus_id: as NVML writes it, ``00000000:1b:00.0``.
        sys_root: where sysfs is.
    """
    domain, _, rest = bus_id.partition(":")
    address = f"{int(domain, 16):04x}:{rest}"
    device = sys_root / "bus" / "pci" / "devices" / address
    bridges = [p for p in device.resolve().parents if _ADDRESS.fullmatch(p.name)]
    states = {bridge.name: _redirects(bridge) for bridge in bridges}
    return PciPath(
        address=address,
        is_known=device.exists(),
        iommu_type=_iommu_type(device),
        redirecting=tuple(name for name, is_on in states.items() if is_on),
        hidden=tuple(name for name, is_on in states.items() if is_on is None),
    )


def has_acs_redirect(config: bytes) -> bool | None:
    """Look into a bridge's configuration space; None where its extended part is hidden."""
    if len(config) <= _EXTENDED_START:
        return None
    position = _EXTENDED_START
    seen: set[int] = set()
    while position >= _EXTENDED_START and position not in seen:
        seen.add(position)
        header = int.from_bytes(config[position : position + 4], "little")
        if header == _NOTHING_READ:
            return None
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(config[position + 6 : position + 8], "little")
            return bool(control & _REDIRECT_BITS)
        position = header >> 20
    return False


def _redirects(bridge: Path) -> bool | None:
    try:
        return has_acs_redirect((bridge / "config").read_bytes())
    except OSError:
        return None


def _iommu_type(device: Path) -> str | None:
    try:
        return (device / "iommu_group" / "type").read_text().strip()
    except OSError:
        return None


def check_pci(case: Case) -> Iterator[Check]:
    """Say whether IOMMU or ACS slow traffic between the GPUs, or may break it."""
    name = "iommu_acs"
    if len(case.gpus) < 2:
        yield Check(name, Status.SKIP, "no two GPUs to look at")
        return
    names = {link for i, row in enumerate(case.links) for j, link in enumerate(row) if i != j}
    if all(link is not None and link.startswith("NV") for link in names):
        yield Check(name, Status.OK, "NVLink joins every pair of GPUs, and passes IOMMU and ACS by")
        return
    yield _judge(name, [read_pci_path(gpu.pci_bus_id, case.sources.sys) for gpu in case.gpus])


def _judge(name: str, paths: Sequence[PciPath]) -> Check:
    if not any(path.is_known for path in paths):
        return Check(name, Status.SKIP, "the kernel shows no PCI tree here")
    translated = [path.address for path in paths if path.iommu_type in _TRANSLATING]
    redirecting = list(dict.fromkeys(bridge for path in paths for bridge in path.redirecting))
    hidden = list(dict.fromkeys(bridge for path in paths for bridge in path.hidden))
    parts, fixes = [], []
    if translated:
        parts.append(f"an IOMMU translates what GPUs {_some(translated)} send one another")
        fixes.append("boot the host with iommu=pt, or with the IOMMU off")
    if redirecting:
        parts.append(f"ACS on {_some(redirecting)} sends it up to the root and back")
        bridge = redirecting[0]
        fixes.append(f"turn ACS off there: setpci -s {bridge} ECAP_ACS+6.w=0000, at every boot")
    if parts:
        message = f"{' and '.join(parts)}: direct access is slow there, or fails"
        return Check(name, Status.WARN, message, "; ".join(fixes))
    if hidden:
        message = f"ACS of {_some(hidden)} cannot be read by this user"
        return Check(name, Status.SKIP, message, "run nccltune doctor as root on the host")
    return Check(name, Status.OK, "neither IOMMU nor ACS stands between the GPUs")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
