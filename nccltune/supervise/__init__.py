"""Stays with a server from its start to its end."""

from __future__ import annotations

from nccltune.supervise.endings import (
    DEFAULT_READY_TIMEOUT_S,
    DEFAULT_STALL_TIMEOUT_S,
    Ending,
    EndKind,
    Limits,
    Waited,
)
from nccltune.supervise.output import PassThrough, Sink
from nccltune.supervise.supervision import Observer, Supervision
from nccltune.supervise.watch import Moment

__all__ = [
    "DEFAULT_READY_TIMEOUT_S",
    "DEFAULT_STALL_TIMEOUT_S",
    "EndKind",
    "Ending",
    "Limits",
    "Moment",
    "Observer",
    "PassThrough",
    "Sink",
    "Supervision",
    "Waited",
]
