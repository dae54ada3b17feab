"""A process between us and one server: when we die, however that happens, it ends the server.

    python -I -S -c CODE NUMBER COMMAND...

Run as a program of its own with the server's environment, which it hands on untouched. It is told
of our death by SIGTERM, asks the server to end, and kills whatever is left after a while, also
processes that have left the group: their orphans become its own children. Killed itself, it takes
the server with it. It says on descriptor NUMBER which process the server is, or why there is none,
and ends as the server ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from nccltune.children import hand_down, learn_ends
from nccltune.errors import ServerError
from nccltune.live.listeners import descendants

GRACE_S = 5.0
"""For a server to end after we have died."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 1.0
_KILL_LIMIT_S = 30.0
_TELL_LIMIT_S = 30.0
_PASSED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_AWAITED = (*_PASSED, signal.SIGCHLD)
_CODE = "import sys; sys.path.insert(0, {root!r}); from {module} import main; main(sys.argv[1:])"


def keeper_command(argv: Sequence[str], telling: int) -> list[str]:
    """Return the command that keeps a server.

    Args:
        argv: of the server.
        telling: an inheritable descriptor; gets the server's process id and a line break, or a
            line that says why it cannot be started.
    """
    # Neither the server's PYTHON variables nor site packages have a say in this process.
    root = str(Path(__file__).resolve().parents[3])
    code = _CODE.format(root=root, module=__name__)
    return [sys.executable, "-I", "-S", "-c", code, str(telling), *argv]


def read_server_pid(receiving: int, program: str) -> int:
    """Read from the keeper which process the server is.

    Raises:
        ServerError: it cannot be started.
    """
    text = b""
    end_s = time.monotonic() + _TELL_LIMIT_S
    while not text.endswith(b"\n") and time.monotonic() < end_s:
        if not select.select([receiving], [], [], _TICK_S)[0]:
            continue
        piece = os.read(receiving, 4096)
        if not piece:
            break
        text += piece
    answer = text.decode(errors="replace").strip()
    if answer.isdecimal():
        return int(answer)
    reason = answer or "the process that keeps it did not start"
    raise ServerError(f"{program}: cannot be started: {reason}", code="cannot_start")


def main(words: Sequence[str]) -> NoReturn:
    """Keep a server until it has ended, and end in the same way."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    learn_ends()
    parent_pid = os.getppid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    own_pid = os.getpid()

    def die_with_keeper() -> None:
        hand_down()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own_pid:
            os._exit(1)

    telling, argv = int(words[0]), list(words[1:])
    os.set_inheritable(telling, False)
    try:
        # Held until the end: it would fetch a server that has ended when it is taken down.
        process = subprocess.Popen(
            argv, env=_environ(), close_fds=False, preexec_fn=die_with_keeper
        )
    except (OSError, subprocess.SubprocessError) as error:
        _tell(telling, str(getattr(error, "strerror", None) or error).lower())
        os._exit(127)
    _tell(telling, str(process.pid))
    status = _keep(process.pid, parent_pid)
    _kill_rest(own_pid)
    _end_as(status)


def _keep(server: int, parent_pid: int) -> int:
    """Wait for the server's end, and see to it once our parent has gone; returns its status."""
    kill_at_s: float | None = None
    while True:
        status = _reap(server)
        if status is not None:
            return status
        found = signal.sigtimedwait(_AWAITED, _TICK_S)
        number = 0 if found is None or found.si_signo == signal.SIGCHLD else found.si_signo
        if os.getppid() != parent_pid:
            number = 0
            if kill_at_s is None:
                kill_at_s, number = time.monotonic() + GRACE_S, signal.SIGTERM
            elif time.monotonic() > kill_at_s:
                number = signal.SIGKILL
        if number:
            with suppress(ProcessLookupError):
                os.kill(server, number)


def _reap(server: int) -> int | None:
    """Fetch every child that has ended; returns the server's status once it has."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, found = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == server:
                status = os.waitstatus_to_exitcode(found)
    return status


def _kill_rest(own_pid: int) -> None:
    """Kill what the server has left behind, and wait until it is gone."""
    end_s = time.monotonic() + _KILL_LIMIT_S
    while (left := descendants(own_pid)) and time.monotonic() < end_s:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        time.sleep(0.01)


def _end_as(status: int) -> NoReturn:
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core, if any, is the server's
        with suppress(OSError, ValueError):  # SIGKILL has no handler to set
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


def _environ() -> dict[bytes, bytes]:
    """Return the environment as it was handed over: Python adds LC_CTYPE by itself (PEP 538)."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries)
    return {name: value for name, equals, value in pairs if name and equals}


def _tell(descriptor: int, text: str) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)
