"""All ranks of one launch: start them, ask them in step, leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccltune.measurement import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nccltune.bench.prepared import PreparedServer, RankProcess
    from nccltune.bench.rank import RankJob

FAULT_GRACE_S = 0.5
"""After a first fault, how long the other ranks may still reveal a worse one: a crash often shows
second."""

_OUTCOME_BY_ANSWER = {
    "rejected": Outcome.REJECTED,
    "unsupported": Outcome.UNSUPPORTED,
    "error": Outcome.CRASHED,
}
_WORST_FIRST = (Outcome.CRASHED, Outcome.REJECTED, Outcome.UNSUPPORTED)
_HOST_FAULT = re.compile(
    r"no CUDA-capable device|busy or unavailable|device unavailable|driver version is insufficient"
    r"|No CUDA GPUs are available|system not yet initialized|fell off the bus",
    re.IGNORECASE,
)


class RankFault(Exception):
    """A launch cannot go on.

    Attributes:
        outcome: how it ended.
        rank: the rank that failed, None when it was several.
    """

    def __init__(self, outcome: Outcome, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.rank = rank


class Ranks:
    """The rank processes of one launch, under one deadline.

    Args:
        servers: where to fork from; rank r uses ``servers[r % len(servers)]``.
        jobs: one a rank, in rank order.
        deadline_s: seconds until everything must be over.

    Attributes:
        is_stuck: a process was killed and does not end: its driver holds it.
    """

    def __init__(
        self, servers: Sequence[PreparedServer], jobs: Sequence[RankJob], deadline_s: float
    ) -> None:
        self._servers = servers
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._logs = [Path(job.log_path) for job in jobs]
        self._processes: list[RankProcess] = []
        self.is_stuck = False
        try:
            for job in jobs:
                self._processes.append(self._server(job.role.rank).fork(job))
        except BaseException:
            self.kill()
            raise

    def _server(self, rank: int) -> PreparedServer:
        return self._servers[rank % len(self._servers)]

    def await_start(self) -> None:
        """Wait until every rank has taken its environment."""
        self._collect(self._processes, "starting")

    def ask(self, what: str, command: str, *arguments: object) -> list[Any]:
        """Give every rank the same command and return their answers in rank order.

        Raises:
            RankFault: a rank refused, failed, died or did not answer before the deadline.
        """
        for process in self._processes:
            with suppress(OSError):  # a dead rank shows when its answer is collected
                process.connection.send((command, *arguments))
        return self._collect(self._processes, what)

    def ask_first(self, what: str, command: str) -> Any:
        """Give rank 0 a command and return its answer."""
        with suppress(OSError):
            self._processes[0].connection.send((command,))
        return self._collect(self._processes[:1], what)[0]

    def _collect(self, processes: Sequence[RankProcess], what: str) -> list[Any]:
        waiting: dict[Connection, RankProcess] = {p.connection: p for p in processes}
        answers: dict[int, Any] = {}
        faults: list[RankFault] = []
        end = self._end
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for connection in ready:
                process = waiting.pop(connection)  # type: ignore[call-overload]
                fault = self._take(process, what, answers)
                if fault is not None:
                    faults.append(fault)
                    end = min(end, time.monotonic() + FAULT_GRACE_S)
        if faults:
            raise min(faults, key=lambda fault: _WORST_FIRST.index(fault.outcome))
        if waiting:
            late = sorted(process.rank for process in waiting.values())
            named = ", ".join(map(str, late))
            message = f"rank {named} did not answer within {self._deadline_s:g} s while {what}"
            raise RankFault(Outcome.TIMEOUT, message, late[0] if len(late) == 1 else None)
        return [answers[process.rank] for process in processes]

    def _take(self, process: RankProcess, what: str, answers: dict[int, Any]) -> RankFault | None:
        try:
            kind, value = process.connection.recv()
        except (EOFError, OSError):
            return RankFault(Outcome.CRASHED, self._describe_death(process, what), process.rank)
        except Exception as error:  # noqa: BLE001 - a damaged process can write anything
            message = f"rank {process.rank} answered nonsense while {what}: {error}"
            return RankFault(Outcome.CRASHED, message, process.rank)
        if kind == "ok":
            answers[process.rank] = value
            return None
        return RankFault(
            _OUTCOME_BY_ANSWER[kind], f"rank {process.rank} while {what}: {value}", process.rank
        )

    def _describe_death(self, process: RankProcess, what: str) -> str:
        self._processes.remove(process)
        process.kill()
        status = self._server(process.rank).reap(process)
        how = "died"
        if status is not None and os.WIFSIGNALED(status):
            how = f"died of {signal.Signals(os.WTERMSIG(status)).name}"
        elif status is not None and os.WIFEXITED(status):
            how = f"exited with status {os.WEXITSTATUS(status)}"
        tail = last_log_line(self._logs[process.rank])
        return f"rank {process.rank} {how} while {what}" + (f": {tail}" if tail else "")

    def leave(self) -> None:
        """Let every rank go; ``await_gone`` waits for them.

        Raises:
            RankFault: one does not answer any more.
        """
        self.ask("leaving", "leave")

    def kill(self) -> None:
        """End what is left, at once, and wait until it is gone."""
        for process in self._processes:
            process.kill()
        self.await_gone()

    def await_gone(self) -> None:
        """Wait until every rank's process has ended, its GPU memory with it."""
        while self._processes:
            process = self._processes.pop()  # before the wait, for an interrupt may end that
            status = self._server(process.rank).reap(process)
            self.is_stuck |= status is None


def last_log_line(path: Path) -> str:
    """Return the last telling line of a rank's log, shortened; empty when there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    telling = [line.strip() for line in lines if "WARN" in line or "rror" in line]
    return telling[-1].rpartition("NCCL WARN ")[2][:200] if telling else ""


def host_outcome(fault: RankFault) -> Outcome:
    """Return the fault's outcome; ``host_failed`` where the GPU or driver is gone."""
    return Outcome.HOST_FAILED if _HOST_FAULT.search(str(fault)) else fault.outcome
