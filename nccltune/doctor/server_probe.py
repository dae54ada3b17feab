"""Runs inside the server's interpreter, whatever its age, and tells what that would load.

Nothing of this project can be imported there. The answer goes to the descriptor that is named on
the command line, since whoever is imported may print. torch is loaded to see which NCCL it brings;
no GPU is touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from importlib import import_module, metadata
from typing import Any

LIBRARY = "libnccl.so.2"
PLUGIN_GROUP = "sglang.srt.plugins"
WHEELS = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu14")


def loaded_libraries() -> list[str]:
    """List the NCCL libraries that are mapped into this process, in order."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        for line in maps:
            path = "/" + line.rstrip("\n").partition("/")[2]
            if os.path.basename(path).startswith("libnccl.so"):  # noqa: PTH119
                found.append(path)
    return list(dict.fromkeys(found))


def nccl_version(library: ctypes.CDLL) -> str | None:
    """Ask a loaded library for its version; the number is coded as nccl.h has it."""
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    value = number.value
    if value < 10000:  # up to 2.8
        return f"{value // 1000}.{value // 100 % 10}.{value % 100}"
    return f"{value // 10000}.{value // 100 % 100}.{value % 100}"


def describe_library(path: str) -> dict[str, object]:
    """Load a library as the server does, and say which file that was."""
    before = loaded_libraries()
    try:
        library = ctypes.CDLL(path)
        version = nccl_version(library)
    except (OSError, AttributeError) as error:
        return {"path": path, "problem": str(error)}
    real = os.path.realpath(path)
    if os.path.sep not in path:  # the loader's own choice: what is new, or was there before
        fresh = [name for name in loaded_libraries() if name not in before]
        real = (fresh or before or [path])[0]
    return {"path": real, "version": version}


def version_of(name: str) -> str | None:
    """Return what a distribution's metadata says; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def wheel_library() -> str | None:
    """Return the library of the wheel that torch depends on, where there is one."""
    for folder in sys.path:
        path = os.path.join(folder or ".", "nvidia", "nccl", "lib", LIBRARY)  # noqa: PTH118
        if os.path.isfile(path):  # noqa: PTH113
            return os.path.abspath(path)  # noqa: PTH100
    return None


def plugins() -> list[dict[str, str]]:
    """List what is registered for SGLang to call when it starts."""
    points: Any = metadata.entry_points()  # a mapping before Python 3.10
    has_select = hasattr(points, "select")
    chosen = points.select(group=PLUGIN_GROUP) if has_select else points.get(PLUGIN_GROUP, ())
    return [{"name": point.name, "value": point.value} for point in chosen]


def load_torch() -> str:
    """Import torch, and with it the NCCL that it brings; return what went wrong, if anything."""
    try:
        import_module("torch")
    except Exception as error:  # noqa: BLE001 - a broken torch is an answer
        return f"{type(error).__name__}: {error}"
    return ""


def tell() -> dict[str, object]:
    """Collect everything that is asked of this interpreter."""
    torch_version = version_of("torch")
    answer: dict[str, object] = {
        "executable": sys.executable,
        "python_version": platform.python_version(),
        "sglang_version": version_of("sglang"),
        "torch_version": torch_version,
        "torch_problem": load_torch() if torch_version is not None else "",
        "wheels": {name: version_of(name) for name in WHEELS if version_of(name) is not None},
        "plugins": plugins(),
    }
    mapped = loaded_libraries()
    answer["torch_nccl"] = describe_library(mapped[0] if mapped else wheel_library() or LIBRARY)
    chosen = os.environ.get("SGLANG_NCCL_SO_PATH")
    if chosen:
        answer["chosen_nccl"] = describe_library(chosen)
    return answer


if __name__ == "__main__":
    told = json.dumps(tell()).encode()
    with os.fdopen(int(sys.argv[1]), "wb") as pipe:
        pipe.write(told)
