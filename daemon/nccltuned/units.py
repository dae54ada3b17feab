"""Whether a server is one of systemd's, which only the host's administrator can make it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from nccltune.live.procfs import PROC_ROOT, read_stat, user_of

_TIMEOUT_S = 5.0
_MAX_ANCESTORS = 64
_USERS_SLICE = "user.slice"


def is_of_unit(pid: int, invocation_id: str, root: Path = PROC_ROOT) -> bool:
    """Tell whether a process is the server of a unit: its main process, or started by that.

    Its own word for it is an environment variable, which anybody can set. So the kernel is asked
    for the unit, and systemd for that unit's run and main process, which has to be of the same
    user: cron is a unit too, and starts what its users want.

    Blocks: call it in a child.
    """
    unit = _unit_of(pid, root)
    if unit is None:
        return False
    facts = _show(unit)
    main_pid = facts.get("MainPID", "")
    if facts.get("InvocationID") != invocation_id or not main_pid.isdecimal():
        return False
    user = user_of(pid, root)
    is_main = int(main_pid) in _ancestry(pid, root)
    return is_main and user is not None and user == user_of(int(main_pid), root)


def _unit_of(pid: int, root: Path) -> str | None:
    """Return the host's unit that a process runs in; None where it runs in none, or a user's."""
    try:
        lines = (root / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        _number, controllers, path = [*line.split(":", 2), "", ""][:3]
        parts = PurePosixPath(path).parts[1:]
        if controllers in ("", "name=systemd") and parts and parts[0] != _USERS_SLICE:
            return next((part for part in parts if part.endswith(".service")), None)
    return None


def _ancestry(pid: int, root: Path) -> Iterator[int]:
    """Yield a process and what it was started by, one after the other."""
    for _ in range(_MAX_ANCESTORS):
        yield pid
        fields = read_stat(pid, root)
        if fields is None or pid <= 1:
            return
        pid = int(fields[1])


def _show(unit: str) -> dict[str, str]:
    import subprocess

    words = ["systemctl", "--system", "show", "--property=MainPID", "--property=InvocationID"]
    try:
        done = subprocess.run(
            [*words, "--", unit], capture_output=True, timeout=_TIMEOUT_S, check=False, text=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs}
