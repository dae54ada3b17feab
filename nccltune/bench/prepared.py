"""The launcher's side of the prepared server: start it, fork ranks, learn how they ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nccltune.errors import RankError
from nccltune.live.procfs import read_stat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nccltune.bench.rank import RankJob

START_DEADLINE_S = 120.0
"""Importing torch from a cold network file system has been seen to take a minute."""

UNKNOWN_STATUS = -1
"""For a wait status: the process has ended, and nobody is left who knows how."""

_ORPHAN_POLL_S = 0.01


class ServerGone(RankError):
    """The process that ranks are forked from has ended, killed most often as memory ran out."""

    def __init__(self, status: int | None) -> None:
        how = "is gone"
        if status is not None and status < 0:
            how = f"was killed ({signal.Signals(-status).name})"
        advice = "the kernel does so when memory ends: make room, and run the command again"
        message = f"the process that ranks are forked from {how}; {advice}"
        super().__init__(message, code="rank_server_gone")


@dataclass(slots=True)
class RankProcess:
    """A forked rank: its process (and group) id, and the connection that it answers on."""

    rank: int
    pid: int
    connection: Connection

    def kill(self) -> None:
        """End the rank's whole process group, whatever it is doing."""
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)


class PreparedServer:
    """A server process, started at once; ``await_ready`` before it is used.

    Args:
        module: device module that it imports: ``nccltune.bench.device``, or a stand-in in tests.
        environ: the whole environment of the server; a rank's own replaces it after the fork.

    Attributes:
        is_gone: it did not answer any more when it was asked last.
        versions: what results depend on, once it is ready.
    """

    def __init__(self, module: str, environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nccltune.bench.server", str(theirs.fileno()), module],
                pass_fds=[theirs.fileno()],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # ours belongs to the report
                start_new_session=True,
            )
        self._control = Connection(ours.detach())
        self.is_gone = False
        self.versions: dict[str, str] = {}

    def await_ready(self) -> None:
        """Wait until it can fork.

        Raises:
            RankError: the device module cannot be imported (torch is missing, say), or the server
                died.
        """
        if not self._control.poll(START_DEADLINE_S):
            self.close()
            message = f"the rank server did not start within {START_DEADLINE_S:.0f} s"
            raise RankError(message, code="rank_server_timeout")
        try:
            kind, value = self._control.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "error", f"it ended with exit status {self._process.wait()}"
        if kind == "ok":
            self.versions = dict(value)
            return
        self.close()
        advice = "install torch, or use the interpreter that has it"
        if "nccl" in value.lower():
            advice = "check SGLANG_NCCL_SO_PATH, or install torch with CUDA"
        raise RankError(
            f"rank processes cannot start: {value}; {advice}", code="rank_server_failed"
        )

    def fork(self, job: RankJob) -> RankProcess:
        """Start one rank.

        Raises:
            ServerGone: this server cannot any more.
        """
        try:
            self._control.send(("fork", job))
            pid = self._control.recv()
            connection = Connection(reduction.recv_handle(self._control))
        except (EOFError, OSError) as error:
            self.is_gone = True
            raise self.gone_error() from error
        except BaseException:
            # Ctrl-C between question and answer: the next answer would be taken for this one.
            self.close()
            raise
        return RankProcess(job.role.rank, pid, connection)

    def reap(self, processes: Sequence[RankProcess], within_s: float) -> dict[int, int | None]:
        """Wait for ranks that are ending; return wait statuses by process id.

        The status is None where one does not end within so many seconds, and ``UNKNOWN_STATUS``
        where the server itself has ended.
        """
        for process in processes:
            process.connection.close()
        pids = [process.pid for process in processes]
        end_s = time.monotonic() + within_s
        try:
            self._control.send(("reap", (pids, within_s)))
            statuses: dict[int, int | None] = self._control.recv()
        except (EOFError, OSError):
            self.is_gone = True
            return {pid: UNKNOWN_STATUS if _await_orphan(pid, end_s) else None for pid in pids}
        except BaseException:
            self.close()  # as in fork
            raise
        return statuses

    def gone_error(self) -> ServerGone:
        """Say how the server ended."""
        with suppress(subprocess.TimeoutExpired):
            return ServerGone(self._process.wait(timeout=1.0))
        return ServerGone(None)

    def close(self) -> None:
        """End the server; ranks that are left die with it."""
        # Closing alone does not end the connection where an interrupt has left a duplicate of it.
        with suppress(OSError), socket.socket(fileno=os.dup(self._control.fileno())) as control:
            control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _await_orphan(pid: int, end_s: float) -> bool:
    """Wait for a rank whose parent has died; False if it has not ended by then (monotonic)."""
    while read_stat(pid) is not None:
        if time.monotonic() > end_s:
            return False
        time.sleep(_ORPHAN_POLL_S)
    return True
