"""How a supervised server ends, and in which words. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from nccltune.errors import ExitCode
from nccltune.sglang.failures import Failure, FailureKind, is_nccl_stall

if TYPE_CHECKING:
    from nccltune.sglang.start_progress import Step

DEFAULT_READY_TIMEOUT_S = 3600.0
DEFAULT_STALL_TIMEOUT_S = 630.0
"""Above SGLang's own longest limits, 480 s for a rank that loads slowly and 600 s for the warm-up
request, so that its own words about them come first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a start may take as a whole, and without getting anywhere."""

    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S


class EndKind(StrEnum):
    """Why it is over."""

    EXITED = "exited"
    """It ended by itself, with success or after it had been ready."""
    DIED = "server_died"
    """It ended before it was ready."""
    GAVE_UP = "server_gave_up"
    """It said that it cannot go on, and did not end."""
    NOT_READY = "ready_timeout"
    STALLED = "stalled"
    STOPPED = "stopped"
    """Somebody asked it to stop, through us."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a server.

    Attributes:
        exit_code: what this process should end with: the server's own status where it ended by
            itself.
        message: one line for people; empty where there is nothing to say.
        failure: what the server itself said, where it failed.
        is_nccl_like: settings of NCCL may have done it.
    """

    kind: EndKind
    exit_code: int
    message: str
    failure: Failure | None = None
    is_nccl_like: bool = False

    @property
    def is_fault(self) -> bool:
        """Whether something went wrong."""
        is_end = self.kind in (EndKind.EXITED, EndKind.STOPPED)
        return not is_end or (self.kind is EndKind.EXITED and self.exit_code != 0)


@dataclass(frozen=True, slots=True)
class Waited:
    """Where a start stands: what every message of an ending is made of.

    Attributes:
        elapsed_s: since the launch.
        idle_s: since it last got anywhere.
    """

    step: Step
    elapsed_s: float
    idle_s: float
    limits: Limits = field(default_factory=Limits)
    last_text: str = ""


def stalled(waited: Waited) -> Ending:
    """Word the end of a server that gets nowhere."""
    limits = waited.limits
    message = (
        f"stalled in {waited.step.format()}: no progress for {int(waited.idle_s)} s "
        f"(--stall-timeout-s {limits.stall_timeout_s:g}), after {int(waited.elapsed_s)} s of "
        f"--ready-timeout-s {limits.ready_timeout_s:g}{_last(waited)}"
    )
    is_nccl_like = is_nccl_stall(waited.step.stage)
    return Ending(EndKind.STALLED, ExitCode.DEADLINE, message, is_nccl_like=is_nccl_like)


def not_ready(waited: Waited) -> Ending:
    """Word the end of a server that takes too long, though it may still get somewhere."""
    limits = waited.limits
    message = (
        f"not ready after {int(waited.elapsed_s)} s (--ready-timeout-s "
        f"{limits.ready_timeout_s:g}), in {waited.step.format()}; last progress "
        f"{int(waited.idle_s)} s ago, within "
        f"--stall-timeout-s {limits.stall_timeout_s:g}{_last(waited)}"
    )
    return Ending(EndKind.NOT_READY, ExitCode.DEADLINE, message)


def gave_up(waited: Waited, failure: Failure, grace_s: float) -> Ending:
    """Word the end of a server that failed and would not end."""
    message = (
        f"the server failed in {waited.step.format()} and did not end by itself within "
        f"{grace_s:.0f} s: {failure.format()}"
    )
    is_nccl_like = failure.is_nccl
    return Ending(EndKind.GAVE_UP, ExitCode.SERVER, message, failure, is_nccl_like)


def died(waited: Waited, failure: Failure, how: str, exit_code: int) -> Ending:
    """Word the end of a server that was not ready yet."""
    if exit_code == 0:
        return Ending(EndKind.EXITED, 0, "the command ended before a server was ready")
    message = (
        f"the server died ({how}) after {int(waited.elapsed_s)} s in {waited.step.format()}: "
        f"{failure.format()}"
    )
    return Ending(EndKind.DIED, exit_code, message, failure, failure.is_nccl)


def exited(failure: Failure, how: str, exit_code: int, served_s: float) -> Ending:
    """Word the end of a server that had been ready."""
    if exit_code == 0:
        return Ending(EndKind.EXITED, 0, "")
    message = f"the server ended ({how}) after {int(served_s)} s of service"
    if failure.kind is not FailureKind.UNKNOWN:
        message += f": {failure.format()}"
    return Ending(EndKind.EXITED, exit_code, message, failure, failure.is_nccl)


def stopped(number: int, how: str, exit_code: int) -> Ending:
    """Word the end of a server that somebody asked to stop."""
    name = signal.Signals(number).name
    return Ending(EndKind.STOPPED, exit_code, f"stopped by {name}; the server ended ({how})")


def _last(waited: Waited) -> str:
    return f"; its last line: {waited.last_text}" if waited.last_text else "; it wrote nothing"
