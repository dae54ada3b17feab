"""Does work in child processes that may crash, hang or eat memory without harm to the caller.

The NVIDIA driver's library, a store on a dead network disk and our own faults are all behind a
launch that has to happen whatever they do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple, NoReturn

_CHUNK_BYTES = 65536
_REAP_S = 2.0
"""A driver without its persistence daemon takes the GPUs down when the last process leaves them."""
_POLL_S = 0.0003


class ApartError(Exception):
    """The child gave no answer; the message says how it ended."""


class Errand(NamedTuple):
    """A child at work. Any process that has its pipe may read the answer, once."""

    pid: int
    receiving: int


def start(work: Callable[[], Mapping[str, object]]) -> Errand:
    """Begin work in a forked child, so that the caller must have no other threads.

    Raises:
        OSError: there is no process or pipe to be had.
    """
    receiving, sending = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(receiving)
        os.close(sending)
        raise
    if pid == 0:
        _work(work, sending)
    os.close(sending)
    return Errand(pid, receiving)


def receive(errand: Errand, timeout_s: float) -> dict[str, object]:
    """Return what the work returned, as JSON brings it back.

    Raises:
        ApartError: it raised, its process ended without an answer, or none came in time.
    """
    deadline_s = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(errand.receiving, select.POLLIN)
    text = b""
    while True:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
            raise ApartError(f"no answer within {timeout_s:g} s")
        chunk = os.read(errand.receiving, _CHUNK_BYTES)
        if not chunk:
            break
        text += chunk
    try:
        data = json.loads(text)
    except ValueError:
        raise ApartError("it ended without an answer") from None
    if "answer" not in data:
        raise ApartError(str(data.get("error")))
    answer = data["answer"]
    assert isinstance(answer, dict)  # noqa: S101 - written by _work
    return answer


def end(errands: Collection[Errand]) -> dict[int, str]:
    """Kill the children that have not ended, and leave no trace of any; parents alone can.

    A child that hangs in the kernel is left there.

    Returns:
        The signal that ended it, by process id, of those that a signal ended.
    """
    left = {errand.pid for errand in errands}
    for errand in errands:
        os.close(errand.receiving)
        # The number of one that was fetched already may be another process's by now.
        with suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, errand.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(errand.pid, signal.SIGKILL)
    ended: dict[int, str] = {}
    deadline_s = time.monotonic() + _REAP_S
    while left and time.monotonic() < deadline_s:
        for pid in tuple(left):
            status = _reap(pid)
            if status is None:
                continue
            left.discard(pid)
            if os.WIFSIGNALED(status):
                ended[pid] = signal.Signals(os.WTERMSIG(status)).name
        if left:
            time.sleep(_POLL_S)
    return ended


def _reap(pid: int) -> int | None:
    """Return the wait status of a child that has ended."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if found else None


def _work(work: Callable[[], Mapping[str, object]], sending: int) -> NoReturn:
    """Do the work and end the process, without the caller's clean-up."""
    try:
        # Ignored, as it may be in what starts us, it would hide how children of the work end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            text = json.dumps({"answer": dict(work())})
        except Exception as error:  # noqa: BLE001 - told to the caller, which goes on
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(sending, rest) :]
        # The end of the answer, without waiting for this process to be taken down.
        os.close(sending)
    finally:
        os._exit(0)
