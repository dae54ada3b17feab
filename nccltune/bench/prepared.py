"""The launcher's side of the prepared server: start it, fork ranks, learn how they ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nccltune.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nccltune.bench.rank import RankJob

START_DEADLINE_S = 120.0
"""Importing torch from a cold network file system has been seen to take a minute."""


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
    """A running server process.

    Args:
        module: device module that it imports: ``nccltune.bench.device``, or a stand-in in tests.
        environ: the whole environment of the server; a rank's own replaces it after the fork.

    Raises:
        RankError: the device module cannot be imported (torch is missing, say), or the server died.
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
        self.versions: dict[str, str] = self._await_versions()

    def _await_versions(self) -> dict[str, str]:
        if not self._control.poll(START_DEADLINE_S):
            self.close()
            message = f"the rank server did not start within {START_DEADLINE_S:.0f} s"
            raise RankError(message, code="rank_server_timeout")
        try:
            kind, value = self._control.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "error", f"it ended with exit status {self._process.wait()}"
        if kind == "ok":
            return dict(value)
        self.close()
        advice = "install torch, or use the interpreter that has it"
        if "nccl" in value.lower():
            advice = "check SGLANG_NCCL_SO_PATH, or install torch with CUDA"
        raise RankError(
            f"rank processes cannot start: {value}; {advice}", code="rank_server_failed"
        )

    def fork(self, job: RankJob) -> RankProcess:
        """Start one rank."""
        try:
            self._control.send(("fork", job))
            pid = self._control.recv()
            connection = Connection(reduction.recv_handle(self._control))
        except (EOFError, OSError) as error:
            message = "the process that ranks are forked from is gone; run the command again"
            raise RankError(message, code="rank_server_gone") from error
        except BaseException:
            # Ctrl-C between question and answer: the next answer would be taken for this one.
            self.close()
            raise
        return RankProcess(job.role.rank, pid, connection)

    def reap(self, process: RankProcess) -> int | None:
        """Wait for a rank that is ending; return its wait status, None if it does not end."""
        process.connection.close()
        try:
            self._control.send(("reap", process.pid))
            status: int | None = self._control.recv()
        except (EOFError, OSError):
            return None
        except BaseException:
            self.close()  # as in fork
            raise
        return status

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
