"""Asks whether nccltune works for a user, as ``nccltune-start`` asks before each server's start."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
from pathlib import Path

_TIMEOUT_S = 30.0
_OPTIONS = ("-EP", "-m", "nccltune", "run", "--help")
_ENVIRON = {"PATH": os.defpath}


def problem_for(user: str, python: Path) -> str:
    """Return what keeps a user from nccltune; empty for nothing, or where that cannot be tried.

    Args:
        user: name or number; empty for the one that this process runs as.
        python: the interpreter that nccltune is installed for.
    """
    identity: dict[str, object] = {}
    if user:
        try:
            entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
        except KeyError:
            return "this host does not know that user"
        if entry.pw_uid != os.geteuid():
            if os.geteuid() != 0:
                return ""
            groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
            identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
    words = [str(python), *_OPTIONS]
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            words,
            cwd="/",
            env=_ENVIRON,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            **identity,
        )
    except subprocess.TimeoutExpired:
        return f"{python}: no answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        if identity and error.errno == errno.EPERM:
            return ""  # this process may not become another user
        return f"{python}: {os.strerror(error.errno or 0).lower()}"
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return f"{python}: {last[0]}"
