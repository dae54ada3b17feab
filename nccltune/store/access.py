"""What helps a user who may not read the store: no step between profiles does."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from nccltune.errors import NccltuneError
from nccltune.paths import state_dir


def access_advice(path: Path) -> str:
    """Say what to open for this user; empty where nothing on the way to a file is closed.

    Args:
        path: of the active profile, or of the state file; what is relative lies in the store.
    """
    barred = _barred(path)
    if barred is None:
        return ""
    reader, owner = f"user {_login_name(os.geteuid())}", user_name(barred.stat().st_uid)
    # What a folder on the way has to grant is to be entered; nobody needs to list it.
    right = f"let {reader} into {barred}" if barred.is_dir() else f"let {reader} read {barred}"
    return f"{right}, which belongs to {owner}, or set NCCLTUNE_HOME to a folder of its own"


def _barred(path: Path) -> Path | None:
    """Return the first folder, or the file itself, that this user may not look into."""
    try:
        path = path if path.is_absolute() else state_dir() / path
        for folder in reversed(path.parents):
            if folder.is_dir() and not os.access(folder, os.X_OK):
                return folder
        return path if path.exists() and not os.access(path, os.R_OK) else None
    except (NccltuneError, OSError):
        return None


def user_name(uid: int | None) -> str:
    """Name a user; a number where no name is known."""
    if uid is None:
        return "a user unknown"
    name = _login_name(uid)
    return f"user {name}" if name == str(uid) else name


def _login_name(uid: int) -> str:
    """Return the name of a user, or the number where no name is known."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
