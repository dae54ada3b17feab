"""Descriptors of the service: two for every start that it follows, and some to look with."""

from __future__ import annotations

import os
import resource

from nccltune.live.procfs import is_exhausted

RESERVE = 24
"""Kept free of logs: without them the service could not see any start end."""

_WANTED = 65536


def raise_limit() -> None:
    """Take as many descriptors as this process may have, up to some ten thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def has_room() -> bool:
    """Tell whether one more start can be followed."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        taken = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as short as it gets
    except OSError as error:
        return not is_exhausted(error)
    return soft == resource.RLIM_INFINITY or taken + RESERVE < soft
