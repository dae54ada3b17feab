"""One boot: a server is started, looked at, measured and ended, and nothing of it is left."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.bench.leftovers import list_segments, remove_segments
from nccltune.errors import FileError, HostError, NccltuneError, ServerError
from nccltune.live.listeners import descendants
from nccltune.live.procfs import read_process
from nccltune.store import append_launch_record
from nccltune.supervise import Ending, EndKind, Limits, Moment, Supervision
from nccltune.verify.load.rounds import LoadPlan, measure
from nccltune.verify.model import Boot
from nccltune.verify.serving.keeper import keeper_command, read_server_pid
from nccltune.verify.serving.preflight import ReadyArm, await_port
from nccltune.verify.serving.seen import look, servers_among
from nccltune.verify.serving.vigil import ServerParts, Vigil, parts_of

if TYPE_CHECKING:
    from nccltune.verify.serving.memory import MemoryWatch

PORT_FREE_LIMIT_S = 30.0
STOP_GRACE_S = 20.0
"""For a server that was measured, and has nothing to finish, to end by itself."""

FALL_LIMIT_S = 15.0
"""So long a server may take to end after one of its processes has."""

_NOTICE_S = 2.0


class LogFile:
    """Takes a server's output (``supervise.Sink``).

    Raises:
        FileError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise FileError(path, f"cannot be written ({error.strerror})") from None

    def write(self, _descriptor: int, data: bytes) -> None:
        """Take what came; on a full disk it is lost, and the server goes on."""
        with suppress(OSError):
            self._file.write(data)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Booter:
    """Makes boots, one after the other.

    Args:
        plan: what each server is asked.
        limits: of each start.
        memory: sees GPU memory come back.
        on_moment: is told where a start is, several times a second.
        on_measure: is told what the load is doing.
        on_stop: is told that a server is being ended.
        note: is told what the reader should know.
    """

    def __init__(
        self,
        plan: LoadPlan,
        limits: Limits,
        memory: MemoryWatch,
        *,
        on_moment: Callable[[Moment], None],
        on_measure: Callable[[str], None],
        on_stop: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self._plan, self._limits, self._memory = plan, limits, memory
        self._on_moment, self._on_measure, self._on_stop = on_moment, on_measure, on_stop
        self._note = note

    def boot(self, ready: ReadyArm, position: int, log_path: Path) -> Boot:
        """Start a server, measure it and end it.

        Raises:
            ServerError: it did not get ready, did not answer as asked, or died.
            BusyError: somebody else listens where it would.
            HostError: the driver does not answer.
        """
        await_port(ready, PORT_FREE_LIMIT_S)
        self._memory.begin()
        segments = list_segments()
        log = LogFile(log_path)
        try:
            return self._run(ready, position, log)
        except ServerError as error:
            if held := self._memory.held():
                raise ServerError(f"{error}; and {held}", code=error.code) from error
            raise
        finally:
            log.close()
            remove_segments(segments)

    def settle(self) -> None:
        """See GPU memory come back after a boot, once that is kept.

        Raises:
            HostError: it does not.
        """
        if held := self._memory.held():
            raise HostError(
                f"{held}: see with nvidia-smi who holds it, then go on with --resume",
                code="gpu_memory_held",
            )

    def _run(self, ready: ReadyArm, position: int, log: LogFile) -> Boot:
        receiving, sending = os.pipe()
        with os.fdopen(receiving, "rb", 0) as answer, os.fdopen(sending, "wb", 0) as telling:
            os.set_inheritable(sending, True)
            server = Supervision(
                keeper_command(ready.arm.argv, sending),
                ready.environ,
                endpoint=ready.endpoint,
                limits=self._limits,
                sink=log,
                is_one_stream=True,
                observers=(self,),
                warn=self._note,
            )
            started_at = _now()

            def on_started(_keeper: int) -> None:
                telling.close()  # the keeper's end is the last one, and closes with it
                pid = read_server_pid(answer.fileno(), ready.arm.argv[0])
                self._record(ready, pid, started_at)

            with server:
                try:
                    server.start(on_started)
                    ending = server.wait_ready()
                    if ending is not None:
                        raise _ended(ending)
                    start_s = _ready_s(server.moment())
                    boot = self._measure(server, ready)
                    self._on_stop()
                finally:
                    _stop(server)
        return replace(boot, position=position, started_at=started_at, start_s=start_s)

    def update(self, moment: Moment) -> None:
        """Hand a moment of the start on (``supervise.Observer``)."""
        self._on_moment(moment)

    def _measure(self, server: Supervision, ready: ReadyArm) -> Boot:
        pids = {server.pid, *descendants(server.pid)}
        found = servers_among(pids)
        parts = parts_of(found) if found else ServerParts({"the server": server.pid}, {})

        def end_rest() -> None:
            """A server that lives on without one of its processes answers nothing any more."""
            if not _has_ended(server.pid, FALL_LIMIT_S):
                server.pass_on(signal.SIGKILL)

        with Vigil(parts, end_rest) as vigil:
            try:
                seen = look(found, ready.endpoint, ready.arm.profile)
                measured = measure(ready.endpoint, self._plan, self._on_measure)
            except ServerError as error:
                if not vigil.wait(_NOTICE_S):
                    raise
                raise _fallen(vigil.fallen, server, f" (the load saw: {error})") from error
            if vigil.fallen:  # after the last answer, and before anybody asked it to
                raise _fallen(vigil.fallen, server)
        for remark in measured.remarks:
            self._note(remark)
        return Boot(
            arm=ready.arm.name,
            position=0,
            started_at="",
            start_s=0.0,
            runs=measured.runs,
            ttft_short_ms=measured.ttft_short_ms,
            ttft_long_ms=measured.ttft_long_ms,
            seen=seen,
        )

    def _record(self, ready: ReadyArm, pid: int, launched_at: str) -> None:
        process = read_process(pid)
        record = replace(
            ready.record,
            pid=pid,
            started_ticks=0 if process is None else process.started_ticks,
            launched_at=launched_at,
        )
        try:
            append_launch_record(record)
        except NccltuneError as error:
            self._note(f"this launch is not on record: {error}")


def _ended(ending: Ending) -> ServerError:
    """Word the end of a start."""
    code = str(EndKind.DIED) if ending.kind is EndKind.EXITED else str(ending.kind)
    return ServerError(ending.message or "the server ended before it was ready", code=code)


def _fallen(name: str, server: Supervision, cause: str = "") -> ServerError:
    """Wait for the end of a server that lost a process while it was measured, and word it."""
    _has_ended(server.pid, 2 * FALL_LIMIT_S)
    ending = server.wait_end()
    how = ending.message or f"the server ended (status {ending.exit_code})"
    return ServerError(f"{name} ended in the middle: {how}{cause}", code="server_died")


def _stop(server: Supervision) -> None:
    """Ask a server to end, and give it time; what is left is killed when it is closed."""
    if server.is_running:
        server.pass_on(signal.SIGTERM)
        _has_ended(server.pid, STOP_GRACE_S)
        server.close()


def _has_ended(pid: int, limit_s: float) -> bool:
    """Wait for the end of a child that nobody has fetched yet; tells whether it has come."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def _ready_s(moment: Moment) -> float:
    return moment.waited.elapsed_s - (moment.served_s or 0.0)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
