"""The prepared process that ranks are forked from: torch is imported, CUDA never touched.

Forking saves a rank the import of torch, which is most of the cost of a fresh interpreter, and
still gives it clean NCCL caches. Run as ``python -m nccltune.bench.server FD MODULE``; it ends when
the launcher's end of FD closes.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from nccltune.bench.rank import RankJob, run_rank

REAP_POLL_S = 0.002


def main() -> None:
    """Import the device module, say which versions it brings.

    Then fork a rank for every request.
    """
    control = Connection(int(sys.argv[1]))
    module: Any = None
    greeting: tuple[str, object]
    try:
        module = importlib.import_module(sys.argv[2])
        greeting = ("ok", module.versions())
    except Exception as error:  # noqa: BLE001 - the launcher turns it into a sentence for people
        greeting = ("error", f"{type(error).__name__}: {error}".splitlines()[0])
    with suppress(OSError):  # the launcher was killed meanwhile: then nobody forks, see below
        control.send(greeting)
    if greeting[0] == "error":
        return
    gc.freeze()
    living: set[int] = set()
    try:
        while True:
            command, argument = control.recv()
            if command == "fork":
                living.add(_fork_rank(control, argument, module))
            elif command == "reap":
                statuses = _reap(*argument)
                living.difference_update(pid for pid, one in statuses.items() if one is not None)
                control.send(statuses)
    except (EOFError, OSError):  # OSError: it went in the middle of a message
        for pid in living:  # the launcher is gone: so go its ranks, with whatever they started
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _reap(pids: list[int], within_s: float) -> dict[int, int | None]:
    """Return the wait statuses of ranks that are ending, None of those that do not end in time."""
    statuses: dict[int, int | None] = dict.fromkeys(pids)
    end = time.monotonic() + within_s
    while True:
        for pid in [pid for pid, status in statuses.items() if status is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = status
        if None not in statuses.values() or time.monotonic() >= end:
            return statuses
        time.sleep(REAP_POLL_S)


def _fork_rank(control: Connection, job: RankJob, module: Any) -> int:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            control.close()
            run_rank(Connection(theirs.detach()), job, module.open_device)
            status = 0
        finally:
            # _exit: the interpreter's own teardown would run CUDA's, which can hang after a fault.
            os._exit(status)
    theirs.close()
    control.send(pid)
    reduction.send_handle(control, ours.fileno(), pid)
    ours.close()
    return pid


if __name__ == "__main__":
    main()
