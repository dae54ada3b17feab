"""The hook's distribution, written into the interpreter that runs SGLang.

Written file by file, in the form that every installer leaves behind (metadata, RECORD, INSTALLER),
so that no network, no pip in that interpreter and no build tool is needed, and ``pip list`` and
``pip uninstall`` know it all the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccltune.envvars import CATALOGUE, Kind
from nccltune.errors import FileError, HostError, UsageProblem
from nccltune.host.server_python import find_python

PACKAGE = "nccltune_hook"
GROUP = "sglang.srt.plugins"
OLDEST_PYTHON = (3, 9)

_ASK_TIMEOUT_S = 30.0
_ASK = """
import importlib.metadata as metadata, json, sys, sysconfig
try:
    sglang = metadata.version("sglang")
except metadata.PackageNotFoundError:
    sglang = None
print(json.dumps([sys.version_info[:2], sysconfig.get_path("purelib"), sglang]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter that the hook goes into.

    Attributes:
        packages: its folder of pure Python packages.
        sglang: version of the SGLang that is installed there; None for none.
    """

    path: Path
    packages: Path
    sglang: str | None


def read_interpreter(path: Path) -> Interpreter:
    """Ask an interpreter where its packages are.

    Raises:
        UsageProblem: it is no Python, or too old a one.
        FileError: its folder of packages cannot be written.
    """
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UsageProblem(f"--python {path}: no such program", code="bad_python")
    try:
        # Isolated: what this process has in its environment says nothing about a server.
        done = subprocess.run(
            [str(path), "-I", "-c", _ASK],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=True,
        )
        version, packages, sglang = json.loads(done.stdout)
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        cause = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        raise UsageProblem(
            f"--python {path}: does not answer as a Python of 3.8 or newer does: {''.join(cause)}",
            code="bad_python",
        ) from None
    if tuple(version) < OLDEST_PYTHON:
        wanted, found = (".".join(map(str, each)) for each in (OLDEST_PYTHON, version))
        raise UsageProblem(f"--python {path}: is {found}, {wanted} is needed", code="bad_python")
    folder = Path(packages)
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        raise FileError(folder, "cannot be written; run this as the user who owns it")
    return Interpreter(path, folder, sglang)


def find_interpreters(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return interpreters with SGLang that need no search: this one, that of ``sglang`` on PATH."""
    candidates = [sys.executable, find_python(("sglang", "serve"), environ)]
    candidates.append(shutil.which("python3", path=environ.get("PATH")))
    found: dict[Path, Path] = {}
    for candidate in filter(None, candidates):
        try:
            interpreter = read_interpreter(Path(candidate))
        except (UsageProblem, FileError):
            continue
        if interpreter.sglang is not None:
            found.setdefault(interpreter.packages, interpreter.path)
    return tuple(found.values())


def names_text() -> str:
    """Return the file that tells the hook which variables a profile may set."""
    names = sorted(n for n, variable in CATALOGUE.items() if variable.kind is not Kind.FORBIDDEN)
    head = "# Variables that a profile may set, from nccltune's catalogue; tests compare the two."
    return "\n".join([head, *names]) + "\n"


def hook_files(source: Path) -> dict[str, str]:
    """Return the distribution: path below the folder of packages -> text, the entry point last.

    Args:
        source: the folder with its ``pyproject.toml``.

    Raises:
        HostError: the folder is not there, as in an installation that lost its data files.
    """
    try:
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        files = {
            f"{PACKAGE}/{path.name}": path.read_text(encoding="utf-8")
            for path in sorted((source / PACKAGE).glob("*.py"))
        }
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise HostError(
            f"{source}: the hook that nccltune ships is not there ({error}); install nccltune anew",
            code="no_hook",
        ) from None
    files[f"{PACKAGE}/names.txt"] = names_text()
    info = info_dir(project["version"])
    files[f"{info}/METADATA"] = _metadata(project)
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: nccltune\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/INSTALLER"] = "nccltune\n"
    points = project["entry-points"][GROUP]
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    entry_points = f"[{GROUP}]\n{lines}"
    record = {**files, f"{info}/entry_points.txt": entry_points}
    rows = [f"{path},{_hash(text)},{len(text.encode())}" for path, text in record.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    # Nothing finds the package before this file is there, and then it is whole.
    files[f"{info}/entry_points.txt"] = entry_points
    return files


def info_dir(version: str) -> str:
    """Return the name of the distribution's folder of metadata."""
    return f"{PACKAGE}-{version}.dist-info"


def installed_dirs(packages: Path) -> tuple[Path, ...]:
    """Return the hook's folders in an interpreter, metadata first, so that nothing loads a half."""
    infos = sorted(packages.glob(f"{PACKAGE}-*.dist-info"))
    package = packages / PACKAGE
    return (*infos, *([package] if package.is_dir() else []))


def _metadata(project: Mapping[str, Any]) -> str:
    fields = {
        "Metadata-Version": "2.4",
        "Name": project["name"],
        "Version": project["version"],
        "Summary": project["description"],
        "License-Expression": project["license"],
        "Requires-Python": project["requires-python"],
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def _hash(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
