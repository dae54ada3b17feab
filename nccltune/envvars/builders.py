"""Short ways to write entries of the catalogue."""

from __future__ import annotations

from nccltune.envvars import domains
from nccltune.envvars.model import Kind, ReadAt, Variable


def switch_variable(
    name: str,
    summary: str,
    reason: str,
    *,
    default: str,
    values: tuple[str, ...] = ("0", "1"),
    read_at: ReadAt = ReadAt.CACHED,
    since: str = "",
    until: str = "",
    sglang: str = "",
    pinned: str = "",
) -> Variable:
    """Describe an injectable variable whose value is a number that stands for a mode."""
    return Variable(
        name,
        Kind.INJECTABLE,
        summary,
        reason,
        domain=" or ".join(values) if len(values) < 3 else ", ".join(values),
        default=default,
        read_at=read_at,
        since=since,
        until=until,
        sglang=sglang,
        pinned=pinned,
        check=domains.switch(*values),
    )
