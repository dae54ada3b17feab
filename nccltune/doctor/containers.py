"""GPU containers that a reload of systemd would cut off from their GPUs.

Where systemd keeps a container's list of allowed devices, ``systemctl daemon-reload`` writes that
list anew from what systemd knows of, and it knows of NVIDIA's devices only where ``/dev/char`` has
links to them (nvidia-docker#1730). Whoever installs units on such a host has to know first.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.doctor.check import Check, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from nccltune.doctor.case import Case

_SCOPE = re.compile(r"/(docker|cri-containerd|crio|libpod|nerdctl)-([0-9a-f]{12})[0-9a-f]*\.scope")
_GPU_DEVICE = re.compile(r"nvidia\d+")
_NVIDIA_MAJOR = 195
_NAMED = 4


@dataclass(frozen=True, slots=True)
class GpuContainer:
    """A running container with a GPU, whose devices systemd keeps.

    Attributes:
        engine: as its scope is named: ``docker``, ``cri-containerd``, ``crio``, ``libpod``.
        id: first 12 digits, as the engines' own lists show it.
    """

    engine: str
    id: str


def has_systemd(proc_root: Path) -> bool:
    """Tell whether systemd runs this host, or this container."""
    try:
        return (proc_root / "1" / "comm").read_text().strip() == "systemd"
    except OSError:
        return False


def find_gpu_containers(
    proc_root: Path, gpu_pids: Collection[int] = ()
) -> tuple[GpuContainer, ...]:
    """Find the running containers that a reload of systemd would cut off.

    Args:
        proc_root: where procfs is.
        gpu_pids: processes that compute on a GPU, for a user who may not see what others have open.
    """
    found: dict[GpuContainer, None] = {}
    for folder in proc_root.glob("[0-9]*"):
        scope = _scope(folder)
        if scope is not None and (int(folder.name) in gpu_pids or _has_gpu_open(folder)):
            found[scope] = None
    return tuple(sorted(found, key=lambda each: (each.engine, each.id)))


def has_device_links(dev_root: Path) -> bool:
    """Tell whether ``/dev/char`` has a link for every NVIDIA GPU, which systemd then knows of."""
    numbers = [
        path.name.removeprefix("nvidia")
        for path in dev_root.glob("nvidia[0-9]*")
        if _GPU_DEVICE.fullmatch(path.name)
    ]
    links = [dev_root / "char" / f"{_NVIDIA_MAJOR}:{number}" for number in (*numbers, "255")]
    return bool(numbers) and all(link.is_symlink() for link in links)


def check_containers(case: Case) -> Iterator[Check]:
    """Say whether systemd can be reloaded on this host without harm to running containers."""
    name = "gpu_containers"
    if not has_systemd(case.sources.proc):
        yield Check(name, Status.SKIP, "no systemd runs here that could be reloaded")
        return
    gpus = case.hardware.gpus if case.hardware else ()
    pids = {process.pid for gpu in gpus for process in gpu.processes or ()}
    found = find_gpu_containers(case.sources.proc, pids)
    if not found:
        yield Check(name, Status.OK, "no GPU container runs that systemd keeps the devices of")
        return
    shown = ", ".join(f"{each.engine} {each.id}" for each in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    running = f"GPU containers under systemd's control: {shown}{more}"
    if has_device_links(case.sources.dev):
        message = f"{running}; /dev/char knows the GPUs, so that a reload of systemd keeps them"
        yield Check(name, Status.OK, message)
        return
    fix = (
        "reload when they are stopped; or make the links first: nvidia-ctk system "
        "create-dev-char-symlinks --create-all; a container that lost its GPUs must be restarted"
    )
    message = f"{running}: systemctl daemon-reload, as installing units asks for, takes their GPUs"
    yield Check(name, Status.WARN, message, fix)


def _scope(folder: Path) -> GpuContainer | None:
    with suppress(OSError):
        match = _SCOPE.search((folder / "cgroup").read_text(errors="replace"))
        if match is not None:
            return GpuContainer(match[1], match[2])
    return None


def _has_gpu_open(folder: Path) -> bool:
    with suppress(OSError):
        for link in (folder / "fd").iterdir():
            with suppress(OSError):
                if _GPU_DEVICE.fullmatch(link.readlink().name):
                    return True
    return False
