"""All ranks of one launch: start them, ask them in step, leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccltune.bench.faults import RankFault, hang_fault, stuck_fault
from nccltune.bench.steps import Step, read_step
from nccltune.measurement import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nccltune.bench.prepared import PreparedServer, RankProcess
    from nccltune.bench.rank import RankJob

FAULT_GRACE_S = 0.5
"""After a first fault, how long the other ranks may still reveal a worse one: a crash often shows
second."""

REAP_DEADLINE_S = 10.0
"""For all ranks of a launch together, from the moment when the last of them was told to end. A
killed process that holds a GPU goes in well under a second, unless its driver is stuck."""

DEATH_DEADLINE_S = 1.0
"""For one dead rank to say how it died, while the others still run. Not part of the limit above: a
rank that its driver holds must not use up the time of those that are killed after it."""

STEP_PAUSE_S = 0.05
"""Between two looks at the steps of late ranks: a rank that hangs is at the same one."""

_OUTCOME_BY_ANSWER = {
    "rejected": Outcome.REJECTED,
    "unsupported": Outcome.UNSUPPORTED,
    "error": Outcome.CRASHED,
}
_WORST_FIRST = (Outcome.CRASHED, Outcome.REJECTED, Outcome.UNSUPPORTED)


class Ranks:
    """The rank processes of one launch, under one deadline.

    Args:
        servers: where to fork from; rank r uses ``servers[r % len(servers)]``.
        jobs: one a rank, in rank order.
        deadline_s: seconds until everything must be over, unless ``restart_clock`` is called.
    """

    def __init__(
        self, servers: Sequence[PreparedServer], jobs: Sequence[RankJob], deadline_s: float
    ) -> None:
        self._servers = servers
        self._deadline_s = deadline_s
        self._logs = [Path(job.log_path) for job in jobs]
        self._step_files = [Path(job.step_path) for job in jobs]
        self._processes: list[RankProcess] = []
        self.restart_clock()
        try:
            for job in jobs:
                self._processes.append(self._server(job.role.rank).fork(job))
        except BaseException:
            self.kill()
            raise

    def _server(self, rank: int) -> PreparedServer:
        return self._servers[rank % len(self._servers)]

    def restart_clock(self) -> None:
        """Give the ranks the whole deadline from now on."""
        self._end = time.monotonic() + self._deadline_s

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
            raise self._late_fault(list(waiting.values()), what)
        return [answers[process.rank] for process in processes]

    def _late_fault(self, late: Sequence[RankProcess], what: str) -> RankFault:
        earlier = self._steps(late)
        time.sleep(STEP_PAUSE_S)
        later = self._steps(late)
        # One that answers by now does not hang, and has forgotten its steps; or it fails, or has
        # died, and that is why the others are late.
        answered = [process for process in late if process.connection.poll(0)]
        for process in answered:
            fault = self._take(process, what, {})
            if fault is not None:
                return fault
        hanging = [process.rank for process in late if process not in answered]
        blamed = hanging or list(later)
        return hang_fault(
            {rank: earlier[rank] for rank in blamed},
            {rank: later[rank] for rank in blamed},
            len(self._step_files),
            f"within {self._deadline_s:g} s while {what}",
        )

    def _steps(self, late: Sequence[RankProcess]) -> dict[int, Step]:
        return {process.rank: read_step(self._step_files[process.rank]) for process in late}

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
        process.kill()
        status = self._reap([process], DEATH_DEADLINE_S)[process.pid]
        if status is not None:  # else it is stuck, and seen to again when all are killed
            self._processes.remove(process)
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
        """Wait until every rank's process has ended, its GPU memory with it, for so long at most.

        ``stuck_fault`` says which have not; called again, this waits for those once more.
        """
        ending, self._processes = self._processes, []  # before the wait: an interrupt may end that
        statuses = self._reap(ending, REAP_DEADLINE_S)
        self._processes = [process for process in ending if statuses[process.pid] is None]

    def stuck_fault(self) -> RankFault | None:
        """After ``await_gone``, name the processes that did not end; None where all have."""
        pids = {process.rank: process.pid for process in self._processes}
        return stuck_fault(pids, REAP_DEADLINE_S) if pids else None

    def _reap(self, processes: Sequence[RankProcess], within_s: float) -> dict[int, int | None]:
        """Return wait statuses by process id, None of the stuck ones; one deadline for all."""
        end = time.monotonic() + within_s
        statuses: dict[int, int | None] = {}
        for server in self._servers:
            own = [process for process in processes if self._server(process.rank) is server]
            if own:
                statuses |= server.reap(own, max(0.0, end - time.monotonic()))
        return statuses


def last_log_line(path: Path) -> str:
    """Return the last telling line of a rank's log, shortened; empty when there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    telling = [line.strip() for line in lines if "WARN" in line or "rror" in line]
    return telling[-1].rpartition("NCCL WARN ")[2][:200] if telling else ""
