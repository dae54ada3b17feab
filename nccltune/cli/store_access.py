"""What helps a user who may not read the store: no step between profiles does."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.paths import state_dir

if TYPE_CHECKING:
    from nccltune.live.profile_standing import LiveProfile


def access_advice(profile: LiveProfile) -> str:
    """Say what to open for this user; empty where nothing on the way to the store is closed."""
    barred = _barred(Path(profile.path)) if profile.problem else None
    if barred is None:
        return ""
    reader, owner = user_name(os.geteuid()), user_name(barred.stat().st_uid)
    return (
        f"let {reader} read {barred}, which belongs to {owner}, or set NCCLTUNE_HOME to a "
        "folder of its own"
    )


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
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
