"""Single steps of an installation, and the list of what was installed.

Schema history of ``nccltune.installed``:
    1: first version.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import FileError
from nccltune.jsontext import parse_json

SCHEMA = "nccltune.installed/1"
MANIFEST_NAME = "installed.json"
FILE_MODE = 0o644
PROGRAM_MODE = 0o755

_COMPILE_TIMEOUT_S = 60.0


class Action(StrEnum):
    """What happens to a file."""

    CREATE = "create"
    REPLACE = "replace"
    UNCHANGED = "unchanged"
    REMOVE = "remove"
    KEEP = "keep"
    """Somebody has changed it since it was installed, so that it stays as it is."""


@dataclass(frozen=True, slots=True)
class Step:
    """One file, or one folder of ours with all that is in it.

    Attributes:
        text: what the file will hold; empty where it is removed.
        mode: of the file.
    """

    action: Action
    path: Path
    text: str = ""
    mode: int = FILE_MODE

    @property
    def is_change(self) -> bool:
        """Whether anything happens."""
        return self.action not in (Action.UNCHANGED, Action.KEEP)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will be done, in order.

    Attributes:
        commands: what the operator runs afterwards.
        warnings: what to know before.
        manifest: files that are installed afterwards, with a digest of each.
        manifest_path: where that is written; the file goes when nothing is installed.
        compiled: interpreters, each with a package to compile for it.
    """

    steps: tuple[Step, ...]
    manifest_path: Path
    commands: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    manifest: Mapping[str, str] = field(default_factory=dict)
    compiled: tuple[tuple[Path, Path], ...] = ()


def digest(text: str) -> str:
    """Return the digest that the manifest keeps of a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, str]:
    """Return what was installed: path -> digest.

    Raises:
        FileError: the list is there and cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})"
        raise FileError(path, reason, code="cannot_read") from None
    document = parse_json(text, path)
    data = document.data
    files = data.get("files") if isinstance(data, dict) and data.get("schema") == SCHEMA else None
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        advice = "remove it, and name interpreters with the hook by --python"
        raise document.problem(f"is no list of installed files; {advice}")
    return dict(files)


def write_step(
    path: Path,
    text: str,
    installed: Mapping[str, str],
    *,
    is_ours: bool,
    mode: int = FILE_MODE,
) -> Step:
    """Plan to have a file with this text.

    Args:
        path: of the file.
        text: what it will hold.
        installed: the manifest.
        is_ours: whether what is there, if anything, can be told to be ours by its content.
        mode: of the file.

    Raises:
        FileError: something of somebody else's is there.
    """
    there = _read(path)
    if there is None:
        return Step(Action.CREATE, path, text, mode)
    if there == text:
        is_whole = mode != PROGRAM_MODE or os.access(path, os.X_OK)
        return Step(Action.UNCHANGED if is_whole else Action.REPLACE, path, text, mode)
    if str(path) in installed:
        is_as_left = digest(there) == installed[str(path)]
        return Step(Action.REPLACE if is_as_left else Action.KEEP, path, text, mode)
    if is_ours:
        return Step(Action.REPLACE, path, text, mode)
    raise FileError(path, "is there and not of nccltune; move it away first", code="not_ours")


def remove_step(path: Path, installed: Mapping[str, str]) -> Step:
    """Plan to have a file no more, unless somebody has changed it."""
    there = _read(path)
    is_changed = there is not None and installed.get(str(path), digest(there)) != digest(there)
    return Step(Action.KEEP if is_changed else Action.REMOVE, path)


def carry_out(plan: Plan) -> None:
    """Do everything, and note what is installed then.

    The note is written first where files are added and last where they go, so that it never misses
    a file that is there.

    Raises:
        FileError: a folder cannot be written; what was done before stays, and the same again goes
            on from there.
    """
    if plan.manifest:
        make_dir(plan.manifest_path.parent)
        text = json.dumps({"schema": SCHEMA, "files": dict(plan.manifest)}, indent=2) + "\n"
        write_atomic(plan.manifest_path, text)
    for step in plan.steps:
        if step.action in (Action.CREATE, Action.REPLACE):
            make_dir(step.path.parent)
            write_atomic(step.path, step.text, step.mode)
        elif step.action is Action.REMOVE:
            _remove(step.path)
    for interpreter, package in plan.compiled:
        # Worth a few milliseconds of every launch; a package works without it.
        command = [str(interpreter), "-I", "-m", "compileall", "-q", str(package)]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    if not plan.manifest:
        plan.manifest_path.unlink(missing_ok=True)
        with suppress(OSError):
            plan.manifest_path.parent.rmdir()  # where nothing else is kept


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise FileError(path, f"cannot be removed ({cause})", code="cannot_write") from None
    if path.parent.name.endswith(".d"):
        with suppress(OSError):
            path.parent.rmdir()  # the folder of a drop-in goes with its last file


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise FileError(path, f"cannot be read ({cause})", code="cannot_read") from None
