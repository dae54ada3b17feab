"""What can be told of the host at once: the driver and its GPUs from procfs, and the loaded NCCL.

The links between GPUs cannot be told so. A profile is used here only on the very GPUs that it was
made on, which are linked as they were; for other ones there is ``nccltune run``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from nccltune_hook.command import Command

PROC_ROOT = Path("/proc")
DEV_ROOT = Path("/dev")
LIBRARY_NAME = "libnccl.so.2"

_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_VERSION_IN_NAME = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)")
_WHEEL = re.compile(r"nvidia[_.-]nccl[_.-]cu\d+-([^-]+)\.dist-info", re.IGNORECASE)
_WHEEL_LIBRARY = f"nvidia/nccl/lib/{LIBRARY_NAME}"


class Unsure(Exception):
    """Whether the profile fits cannot be told from here; the text says why."""


class Foreign(Exception):
    """The profile was made for another kind of host; the text says what differs."""


class Gpu(NamedTuple):
    """One GPU, as the driver shows it in procfs."""

    uuid: str
    model: str


def check_fit(
    made_on: dict[str, Any],
    command: Command,
    environ: Any,
    *,
    proc_root: Path = PROC_ROOT,
    dev_root: Path = DEV_ROOT,
) -> str:
    """Say how far a profile holds for a launch: ``identical`` or ``equivalent`` host.

    Raises:
        Foreign: it does not.
        Unsure: that cannot be told from here.
    """
    wanted = made_on.get("gpu_uuids")
    if not isinstance(wanted, list) or made_on.get("is_partial") not in (True, False, None):
        raise Unsure("what it was made for cannot be read")
    if made_on.get("world_size") != command.tp_size:
        raise Foreign(f"world_size ({made_on.get('world_size')} there, {command.tp_size} here)")
    if command.replicas > 1:
        raise Unsure("this launch has several groups of GPUs")
    driver = read_driver(proc_root)
    gpus = visible_gpus(read_gpus(proc_root, dev_root), environ)
    _check_gpus(wanted, made_on, command, gpus)
    there = str(made_on.get("driver_version"))
    if there.split(".")[0] != driver.split(".")[0]:
        raise Foreign(f"driver_version ({there} there, {driver} here)")
    nccl = nccl_version(environ)
    if nccl is None:
        raise Unsure("the version of NCCL that the server loads is not known")
    if nccl != made_on.get("nccl_version"):
        raise Foreign(f"nccl_version ({made_on.get('nccl_version')} there, {nccl} here)")
    return "identical" if there == driver else "equivalent"


def _check_gpus(
    wanted: list[Any], made_on: dict[str, Any], command: Command, gpus: list[Gpu]
) -> None:
    order = [command.base_gpu_id + rank * command.gpu_id_step for rank in range(command.tp_size)]
    if order[-1] >= len(gpus):
        raise Foreign(f"the launch needs {order[-1] + 1} GPUs and sees {len(gpus)}")
    chosen = [gpus[idx] for idx in order]
    if [gpu.uuid for gpu in chosen] == wanted:
        return
    if [gpu.model for gpu in chosen] != made_on.get("gpu_names"):
        raise Foreign("gpu_names")
    raise Unsure("these are not the GPUs that it was made on, in that order")


def is_insisted_on(
    gpus: list[Any], environ: Any, *, proc_root: Path = PROC_ROOT, dev_root: Path = DEV_ROOT
) -> bool:
    """Tell whether a person has said of every GPU that this launch sees that it gets the profile.

    Args:
        gpus: the UUIDs for which that was said.
        environ: of the launch.
    """
    if not gpus:
        return False
    try:
        return all(
            gpu.uuid in gpus for gpu in visible_gpus(read_gpus(proc_root, dev_root), environ)
        )
    except Unsure:
        return False


def read_driver(proc_root: Path) -> str:
    """Return the driver's version.

    Raises:
        Unsure: procfs does not show it.
    """
    match = _DRIVER.search(_read(proc_root / "driver/nvidia/version"))
    if match is None:
        raise Unsure("the driver does not show itself in /proc/driver/nvidia")
    return match[1]


def read_gpus(proc_root: Path, dev_root: Path) -> list[Gpu]:
    """Return the GPUs by PCI address, as NVML counts them, those with a device file.

    Raises:
        Unsure: procfs does not show them, or not who they are.
    """
    found = []
    for path in sorted((proc_root / "driver/nvidia/gpus").glob("*/information")):
        lines = (line.partition(":") for line in _read(path).splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        if not (dev_root / f"nvidia{facts.get('Device Minor', '')}").exists():
            continue  # a container is given some of the host's GPUs, and may see all of them here
        if not _UUID.fullmatch(facts.get("GPU UUID", "")):
            raise Unsure("the driver does not show which GPUs these are")
        found.append(Gpu(facts["GPU UUID"], facts.get("Model", "")))
    if not found:
        raise Unsure("the driver shows no GPU in /proc/driver/nvidia")
    return found


def visible_gpus(gpus: list[Gpu], environ: Any) -> list[Gpu]:
    """Return what CUDA_VISIBLE_DEVICES leaves, in its order.

    Raises:
        Unsure: it names what is not there, or CUDA may count GPUs of different models otherwise.
    """
    is_by_address = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    is_counted_alike = is_by_address or len({gpu.model for gpu in gpus}) == 1
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = []
    for token in (str(idx) for idx in range(len(gpus))) if visible is None else visible.split(","):
        word = token.strip()
        if word.isascii() and word.isdecimal():
            if not is_counted_alike:
                raise Unsure("CUDA may count GPUs of different models in another order")
            fits = gpus[int(word) : int(word) + 1]
        else:
            is_uuid = word.upper().startswith("GPU-")
            fits = [gpu for gpu in gpus if is_uuid and gpu.uuid.lower().startswith(word.lower())]
        if len(fits) != 1 or fits[0] in chosen:
            raise Unsure(f"CUDA_VISIBLE_DEVICES={str(visible)[:120]} names no GPUs of this host")
        chosen.append(fits[0])
    return chosen


def nccl_version(environ: Any) -> str | None:
    """Return the version of the NCCL that decodes in servers from here; None where not known."""
    chosen = environ.get("SGLANG_NCCL_SO_PATH")
    if chosen:
        return _named_version(Path(chosen))
    return _loaded_version() or _wheel_version()


def _named_version(path: Path) -> str | None:
    match = _VERSION_IN_NAME.fullmatch(path.resolve().name)
    return None if match is None else match[1]


def _loaded_version() -> str | None:
    """Ask the library that is loaded already, as it is once torch is; load none."""
    if "torch" not in sys.modules:
        return None
    import ctypes

    number = ctypes.c_int()
    try:
        library = ctypes.CDLL(LIBRARY_NAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        if library.ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    value = number.value
    if value < 10000:  # up to 2.8
        return f"{value // 1000}.{value // 100 % 10}.{value % 100}"
    return f"{value // 10000}.{value // 100 % 100}.{value % 100}"


def _wheel_version() -> str | None:
    """Return the version of the only wheel, where its metadata speaks of the file that is there."""
    for folder in filter(None, sys.path):
        library = Path(folder, _WHEEL_LIBRARY)
        if not os.path.isfile(library):  # noqa: PTH113 - Path raises in a closed folder
            continue
        named = _named_version(library)
        matches = list(filter(None, map(_WHEEL.fullmatch, _names(folder))))
        if named is not None or len(matches) != 1:
            return named
        record = _read(Path(folder, matches[0][0], "RECORD"))
        ending = f",{library.stat().st_size}"
        is_same = any(
            line.startswith(f"{_WHEEL_LIBRARY},") and line.rstrip().endswith(ending)
            for line in record.splitlines()
        )
        return matches[0][1] if is_same else None
    return None


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is needed
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
