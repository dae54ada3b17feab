"""Starts a server, waits until it is ready, stays with it, and says how it ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from nccltune.errors import UsageProblem
from nccltune.sglang.endpoints import Endpoint, endpoint_at, is_answered
from nccltune.sglang.log_stages import Stage
from nccltune.supervise import endings
from nccltune.supervise.endings import Ending, Limits
from nccltune.supervise.output import OutputPump, PassThrough, Sink, has_one_stream
from nccltune.supervise.process import ServerProcess, describe_status, exit_code_of
from nccltune.supervise.readiness import Probe, find_endpoint, has_server, judge
from nccltune.supervise.watch import Moment, StartWatch

if TYPE_CHECKING:
    from nccltune.sglang.log_stages import LogLine

START_TICK_S = 0.25
SERVE_TICK_S = 1.0
STOP_GRACE_S = 10.0
"""For a server that is not ready yet, and so has no requests to finish."""

DRAIN_GRACE_S = 30.0
"""For a server whose script has ended at once when it was asked to: it has requests to finish."""

KILL_AFTER_SIGNALS = 3
"""Asked so many times, a server that will not stop is killed."""

LOOK_EVERY_S = 1.0
UNKNOWN_AFTER_S = 60.0
"""So long a script may prepare things before it starts its server, without a word from us."""

_TERM_GRACE_S = 2.0
_DRAIN_S = 5.0
_STOPPING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Observer(Protocol):
    """Is told where the server is, several times a second while it starts."""

    def update(self, moment: Moment) -> None:
        """Take the newest moment."""


class Supervision:
    """One server and all that belongs to it; at the end nothing of it is left.

    ``start``, then ``wait_ready``, then ``wait_end``; each wait returns an ending once there is
    one. Signals may be passed on from a signal handler at any time.

    Args:
        argv: the command.
        environ: its whole environment.
        endpoint: where it will listen; None where its log has to say so.
        limits: of the start.
        sink: takes its output; it goes to this process's own if None.
        is_one_stream: its stdout and stderr come as one, in their order; if None, only where this
            process's own are one.
        observers: are told where it is.
        warn: is told what the operator should know, in the thread that waits.
        tick_s: at least so often, for a service manager that wants to hear of us.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        endpoint: Endpoint | None = None,
        limits: Limits | None = None,
        sink: Sink | None = None,
        is_one_stream: bool | None = None,
        observers: Sequence[Observer] = (),
        warn: Callable[[str], None] | None = None,
        tick_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warn = warn or (lambda _text: None)
        self._argv, self._environ = argv, environ
        self._sink = sink or PassThrough()
        self._is_one_stream = has_one_stream() if is_one_stream is None else is_one_stream
        self._observers = observers
        self._tick_s = tick_s or SERVE_TICK_S
        self._clock = clock
        self._wake = threading.Event()
        self._watch = StartWatch(limits or Limits(), clock)
        self._watch.is_sglang = endpoint is not None
        self._probe = Probe(endpoint, on_change=self._wake.set)
        self._looked_s = 0.0
        self._process: ServerProcess | None = None
        self._pump: OutputPump | None = None
        self._stop_signals: list[int] = []
        self._stop_asked_s: float | None = None
        self._is_over = self._is_unknown = False

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the command was started and its end has not been seen yet."""
        return self._process is not None and not self._is_over

    @property
    def endpoint(self) -> Endpoint | None:
        """Where it listens, as far as that is known."""
        return self._probe.endpoint

    def moment(self) -> Moment:
        """Return where the server is now."""
        return self._watch.moment(self._probe.endpoint, self.pid)

    def __enter__(self) -> Supervision:
        """Do nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave nothing of the server behind, whatever happened."""
        self.close()

    def start(self, on_started: Callable[[int], None] | None = None) -> None:
        """Start the command.

        Args:
            on_started: is given its process id, while this process has no threads of ours yet.

        Raises:
            ServerError: it cannot be started.
        """
        endpoint = self._probe.endpoint
        if endpoint is not None and is_answered(endpoint):
            self._warn(f"somebody answers on {endpoint.url} already")
        self._watch.begin()
        self._process = process = ServerProcess(
            self._argv, self._environ, has_one_stream=self._is_one_stream
        )
        for number in self._stop_signals:
            process.signal(number)
        if on_started is not None:
            on_started(process.pid)
        self._pump = OutputPump(
            dict(zip(process.streams, (1, 2), strict=False)),
            process.process_fd,
            sink=self._sink,
            on_line=self._take_line,
            on_exit=self._wake.set,
        )
        self._pump.start()
        self._probe.start()

    def wait_ready(self) -> Ending | None:
        """Wait until the server takes requests; returns how it ended if it does not."""
        while True:
            ending = self._ended()
            if ending is None and self._is_ready():
                self._probe.stop()
                self._tell()
                return None
            if ending is None and not self._stop_signals:
                ending = self._watch.overdue()
                if ending is not None:
                    self._end_early()
            if ending is not None:
                return ending
            self._tell()
            self._sleep(min(START_TICK_S, self._tick_s))

    def wait_end(self) -> Ending:
        """Stay until the server ends."""
        while (ending := self._ended()) is None:
            self._tell()
            self._sleep(min(SERVE_TICK_S, self._tick_s))
        return ending

    def pass_on(self, number: int) -> None:
        """Send a signal on to the server; safe to call from a signal handler."""
        if number in _STOPPING:
            self._stop_signals.append(number)
            self._stop_asked_s = self._stop_asked_s or self._clock()
        if self._process is not None:
            self._process.signal(number)

    def close(self) -> None:
        """Kill what is left of the server and let go of everything."""
        if self.is_running:
            self._finish()

    @property
    def _server(self) -> ServerProcess:
        assert self._process is not None  # noqa: S101 - there is none before start()
        return self._process

    def _finish(self) -> int:
        """End everything in order and return the status that the command ended with."""
        self._is_over = True
        self._probe.stop()
        status = self._server.kill_all()
        if self._pump is not None:
            self._pump.finish(_DRAIN_S)
        self._server.close()
        return status

    def _ended(self) -> Ending | None:
        """Return how the server ended, if it has, or was asked to and would not."""
        server = self._server
        server.reap()
        if server.status is None and not self._is_asked_enough():
            return None
        elapsed_s = self._watch.now_s
        if self._stop_signals and server.status is not None:
            self._ask_rest(self._rest_grace_s())
        status = self._finish()
        how, code = describe_status(status), exit_code_of(status)
        if self._stop_signals:
            return endings.stopped(self._stop_signals[0], how, code)
        return self._watch.ending(how, code, elapsed_s)

    def _is_asked_enough(self) -> bool:
        if self._stop_asked_s is None or len(self._stop_signals) >= KILL_AFTER_SIGNALS:
            return self._stop_asked_s is not None
        is_serving = self._watch.ready_s is not None
        return not is_serving and self._clock() - self._stop_asked_s > STOP_GRACE_S

    def _rest_grace_s(self) -> float:
        """Say how long what the command leaves behind may take to end."""
        if not has_server(self._server.rest()):
            return _TERM_GRACE_S
        return STOP_GRACE_S if self._watch.ready_s is None else DRAIN_GRACE_S

    def _ask_rest(self, grace_s: float) -> None:
        """Ask what the command has left behind to end, and give it time.

        A script that is asked to end does so at once, and tells its server nothing.
        """
        server, end_s = self._server, self._clock() + grace_s
        server.signal_rest(signal.SIGTERM)
        while server.rest() and self._clock() < end_s:
            if len(self._stop_signals) >= KILL_AFTER_SIGNALS:
                return
            server.reap()
            self._tell()
            self._sleep(0.05)

    def _end_early(self) -> None:
        """Ask the server to end, and see to it that it does."""
        self._server.signal(signal.SIGTERM)
        end_s = self._clock() + _TERM_GRACE_S
        while self._server.status is None and self._clock() < end_s:
            self._sleep(0.05)
        if self._server.status is not None:
            self._ask_rest(max(0.0, end_s - self._clock()))
        self._finish()

    def _is_ready(self) -> bool:
        watch, probe = self._watch, self._probe
        if self._pump is not None:
            watch.forgive(self._pump.blocked_s())
        if probe.endpoint is None:
            self._look_for_server()
        said_s = watch.said_ready_s
        verdict = judge(
            probe.health,
            probe.endpoint,
            pids=self._server.pids,
            since_own_word_s=None if said_s is None else watch.now_s - said_s,
        )
        if verdict.doubt:
            self._warn(verdict.doubt)
        if verdict.is_listening:
            watch.enter(Stage.WARM_UP)
        if verdict.is_ready:
            watch.enter(Stage.READY)
        return verdict.is_ready

    def _look_for_server(self) -> None:
        """Look into the command's processes now and then, and say so where none is a server."""
        now_s = self._watch.now_s
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        endpoint = find_endpoint(self._server.pids())
        if endpoint is not None:
            self._watch.is_sglang = True
            self._probe.look_at(endpoint)
        elif now_s > UNKNOWN_AFTER_S and not self._watch.is_sglang and not self._is_unknown:
            self._is_unknown = True
            self._warn(
                "there is no SGLang server to be seen in this command: whether it is ready cannot "
                "be told, and the limits of a start do not apply"
            )

    def _take_line(self, line: LogLine) -> None:
        """Take in a line of output; runs in the thread that reads it."""
        if not self._watch.take(line):
            return
        self._wake.set()
        if self._probe.endpoint is None and self._watch.url:
            try:
                self._probe.look_at(endpoint_at(self._watch.url))
            except UsageProblem:
                return
        self._probe.hurry()

    def _tell(self) -> None:
        moment = self.moment()
        for observer in self._observers:
            observer.update(moment)

    def _sleep(self, duration_s: float) -> None:
        self._wake.wait(duration_s)
        self._wake.clear()
