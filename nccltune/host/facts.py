"""This host as a launch meets it: its GPUs in its order, and the NCCL that its server would load.

torch is not imported, and the server's interpreter is not started where its folders tell enough.
What belongs to somebody else's server is read, and never run or loaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nccltune.errors import NccltuneError, UsageProblem
from nccltune.host.server_python import installed, output_of, package_dirs
from nccltune.seen_files import OWN, SeenFiles, is_dir, is_file

if TYPE_CHECKING:
    from types import ModuleType

    from nccltune.host.fingerprint import Fingerprint
    from nccltune.host.hardware import Gpu, Hardware

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
LIBRARY_VARIABLE = "SGLANG_NCCL_SO_PATH"
LIBRARY_NAME = "libnccl.so.2"
_WHEEL_LIBRARY = Path("nvidia", "nccl", "lib", LIBRARY_NAME)
_TORCH_LIBRARY = Path("torch", "lib", LIBRARY_NAME)
_WHEEL = r"nvidia[_.-]nccl[_.-]cu\d+"
_VERSION_IN_NAME = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)")
_VERSION_IN_FILE = re.compile(rb"NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})[+\0]")
_VERSION_BYTES = 64
"""Longer than that text."""

_CHUNK_BYTES = 2**20
_MAX_SEARCHED_BYTES = 16 * 2**20
"""NCCL 2.32.3 has it within the first 4 MiB."""
_MAX_RECORD_BYTES = 2**20
_LOAD_TIMEOUT_S = 10.0
_LOAD = """
import ctypes, sys
number = ctypes.c_int()
code = ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print(number.value if code == 0 else "")
"""


class HostFacts(NamedTuple):
    """What a decision needs to know of a host.

    Attributes:
        fingerprint: of every GPU that the launch sees.
        gpu_architecture: ``sm90``, of the first of them; None where the driver does not say.
    """

    fingerprint: Fingerprint
    gpu_architecture: str | None


def read_here(
    python: str | None,
    environ: Mapping[str, str] | None = None,
    *,
    nvml: ModuleType | None = None,
) -> Fingerprint:
    """Read the fingerprint of this host for servers of one interpreter.

    Args:
        python: the server's interpreter; None where it is not known, and then its NCCL is not.
        environ: of the launch; this process's if None.
        nvml: stands in for ``pynvml`` in tests.

    Raises:
        HostError: NVML cannot be used, there is no GPU, or MIG is on.
        UsageProblem: ``CUDA_VISIBLE_DEVICES`` names no GPU of this host.
    """
    return read_host(python, environ, nvml=nvml).fingerprint


def read_host(
    python: str | None,
    environ: Mapping[str, str] | None = None,
    *,
    files: SeenFiles = OWN,
    nvml: ModuleType | None = None,
) -> HostFacts:
    """Read what a decision needs to know of this host; arguments and errors as ``read_here``.

    Args:
        python: as there.
        environ: as there.
        files: as the server sees them.
        nvml: as there.
    """
    variables = os.environ if environ is None else environ
    facts = read_visible(variables, nvml=nvml)
    return with_nccl(facts, nccl_version(python, variables, files))


def read_visible(
    environ: Mapping[str, str], *, nvml: ModuleType | None = None, is_last: bool = False
) -> HostFacts:
    """Read the GPUs alone, and no NCCL; other arguments and errors as ``read_here``.

    Args:
        environ: as there.
        nvml: as there.
        is_last: this process ends soon, so that NVML may stay open.
    """
    # Loaded here, for who is told of the GPUs by another process needs no NVML.
    from nccltune.host.gpu_choice import numbers_named

    visible = environ.get(VISIBLE_VARIABLE)
    only = numbers_named(visible)
    if only is not None:
        # Where one of these is not to be had, the reading of all says so among them.
        with suppress(NccltuneError):
            return _read_visible(visible, only, nvml, is_last=is_last)
    return _read_visible(visible, None, nvml, is_last=is_last)


def with_nccl(facts: HostFacts, version: str | None) -> HostFacts:
    """Return the facts for servers that load this NCCL."""
    return facts._replace(fingerprint=replace(facts.fingerprint, nccl_version=version))


def nccl_version(
    python: str | None, environ: Mapping[str, str], files: SeenFiles = OWN
) -> str | None:
    """Return the version of the NCCL that decodes in a server; None where that cannot be told.

    In SGLang's order: the library of ``SGLANG_NCCL_SO_PATH``, which captured graphs use, else
    torch's: from its wheel, from torch's own folder, or from the system.
    """
    if chosen := environ.get(LIBRARY_VARIABLE):
        return _library_version(Path(chosen), (), environ, files)
    if python is None:
        return None
    folders = package_dirs(python, environ, files)
    for name in (_WHEEL_LIBRARY, _TORCH_LIBRARY):
        for folder in folders:
            if is_file(files, folder / name):
                return _library_version(folder / name, (folder,), environ, files)
    if not files.may_run or not any(is_dir(files, folder / "torch") for folder in folders):
        return None
    return _loaded_version(LIBRARY_NAME, environ)


def _read_visible(
    visible: str | None, only: Collection[int] | None, nvml: ModuleType | None, *, is_last: bool
) -> HostFacts:
    # Loaded here, as above.
    from nccltune.host.hardware import read_gpus

    hardware = read_gpus(nvml, only=only, is_brief=True, is_last=is_last)
    gpus = _choose(hardware, visible)
    return HostFacts(
        fingerprint=hardware.fingerprint(gpus, nccl_version=None),
        gpu_architecture=gpus[0].compute_capability,
    )


def _choose(hardware: Hardware, visible: str | None) -> tuple[Gpu, ...]:
    # Loaded here, as above.
    from nccltune.host.gpu_choice import choose_gpus

    try:
        return choose_gpus(hardware, visible, None, is_shared=False)
    except UsageProblem as problem:
        if problem.code != "too_few_gpus":
            raise
        return choose_gpus(hardware, visible, None, is_shared=True)[:1]


def _library_version(
    path: Path, folders: Sequence[Path], environ: Mapping[str, str], files: SeenFiles
) -> str | None:
    """Return the version of one library file, by the cheapest source that cannot be wrong."""
    if match := _VERSION_IN_NAME.fullmatch(files.resolve(path).name):
        return match[1]
    if version := _wheel_version(path, folders, files):
        return version
    return _loaded_version(str(path), environ) if files.may_run else _written_version(path, files)


def _wheel_version(path: Path, folders: Sequence[Path], files: SeenFiles) -> str | None:
    """Return what the wheel's metadata says, if the file is the very one that the wheel brought.

    Two wheels, or a library that was copied over, make metadata lie about what is loaded.
    """
    found = list(installed(folders, _WHEEL, files))
    library = files.stat(path)
    if len(found) != 1 or library is None:
        return None
    metadata, version = found[0]
    try:
        record = files.read(metadata / "RECORD", _MAX_RECORD_BYTES).decode(errors="replace")
    except OSError:
        return None
    is_same = any(
        line.startswith(f"{_WHEEL_LIBRARY},") and line.rstrip().endswith(f",{library.st_size}")
        for line in record.splitlines()
    )
    return version if is_same else None


def _written_version(path: Path, files: SeenFiles) -> str | None:
    """Return the version that stands in a library as text: NCCL prints it when it starts."""
    try:
        descriptor = files.open(path)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        end = b""
        for _ in range(_MAX_SEARCHED_BYTES // _CHUNK_BYTES):
            chunk = file.read(_CHUNK_BYTES)
            if match := _VERSION_IN_FILE.search(end + chunk):
                return match[1].decode()
            if not chunk:
                return None
            end = chunk[-_VERSION_BYTES:]
    return None


def _loaded_version(library: str, environ: Mapping[str, str]) -> str | None:
    """Load a library in a process of its own and ask it: it may be broken, and it stays loaded."""
    command = [sys.executable, "-I", "-S", "-c", _LOAD, library]
    try:
        number = int(output_of(command, environ, _LOAD_TIMEOUT_S) or "")
    except ValueError:
        return None
    if number < 10000:  # up to 2.8
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
