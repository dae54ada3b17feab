"""Sends requests to SGLang and reads their streams: one thread and one connection each.

A moment is taken right after the read that brought the bytes. But for the count of
tokens, nothing is parsed before the last stream has ended.
"""

from __future__ import annotations

import http.client
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nccltune.errors import ServerError
from nccltune.sglang.endpoints import KEY_VARIABLE, Endpoint, connection_to, send
from nccltune.verify.load.stream import EventSplitter, quote, read_events, stream_of
from nccltune.verify.model import Run

_READ_BYTES = 256 * 1024
_MAX_ERROR_BYTES = 4096
_SWITCH_INTERVAL_S = 1e-4
"""Another thread, such as a live view, may keep the interpreter for 5 ms by default, as long as a
verify step takes; a moment must not wait for that."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait for one request.

    Attributes:
        deadline_s: all of it.
        stall_s: nothing comes, not one byte.
    """

    deadline_s: float
    stall_s: float


def fetch(endpoint: Endpoint, prompts: Sequence[str], *, tokens: int, limits: Limits) -> Run:
    """Send all prompts at once and read every answer to its end.

    Raises:
        ServerError: one answer is not exactly what was asked for; the others are given up.
    """
    calls = [_Call(endpoint, prompt, tokens, limits) for prompt in prompts]
    try:
        for call in calls:
            call.open()
        with _prompt_switching():
            _run_all(calls)
    finally:
        for call in calls:
            call.close()
    streams = tuple(stream_of(call.splitter, tokens=tokens) for call in calls)
    ends_s = [call.began_s + each.duration_s for call, each in zip(calls, streams, strict=True)]
    return Run(streams, max(ends_s) - min(call.began_s for call in calls))


def _run_all(calls: Sequence[_Call]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        try:
            futures = [pool.submit(call.run) for call in calls]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            # Before the others are stopped, which fails them too.
            problems = [problem for each in done if (problem := each.exception()) is not None]
        finally:
            for call in calls:
                call.stop()
    if problems:
        raise problems[0]


@contextmanager
def _prompt_switching() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


class _Call:
    """One request."""

    def __init__(self, endpoint: Endpoint, prompt: str, tokens: int, limits: Limits) -> None:
        self.splitter = EventSplitter()
        self.began_s = 0.0
        self._endpoint, self._limits, self._tokens = endpoint, limits, tokens
        self._body = {
            "text": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        self._connection = connection_to(endpoint, limits.stall_s)
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Connect beforehand: the time of that is not the answer's."""
        try:
            self._connection.connect()
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise ServerError(f"{self._endpoint.url}: {reason.lower()}", code="no_answer") from None
        self._socket = self._connection.sock

    def run(self) -> None:
        """Send the request and read the answer to its end."""
        limits = self._limits
        try:
            self._read()
        except TimeoutError:
            raise self._broken(f"nothing came for {limits.stall_s:g} s", "stalled") from None
        except (OSError, http.client.HTTPException):
            raise self._broken("the server dropped the connection", "dropped") from None

    def _read(self) -> None:
        splitter, clock = self.splitter, time.perf_counter
        self.began_s = began_s = clock()
        send(self._connection, self._endpoint, "/generate", self._body)
        with self._connection.getresponse() as answer:
            if answer.status != 200:
                raise _refusal(answer)
            while splitter.done_at_s is None:
                data = answer.read1(_READ_BYTES)
                at_s = clock() - began_s
                if not data:
                    raise self._broken("the stream ended without its end mark", "dropped")
                splitter.feed(data, at_s)
                if splitter.done_at_s is None and splitter.last_count() > self._tokens:
                    raise self._broken("more tokens than were asked for", "more_tokens")
                if at_s > self._limits.deadline_s:
                    raise self._broken(f"not done after {at_s:.0f} s", "too_slow")

    def _broken(self, problem: str, code: str) -> ServerError:
        # What the server itself said before is the better reason, and is raised here.
        came = read_events(self.splitter.events).tokens
        return ServerError(f"/generate: {problem}, with {came} of {self._tokens} tokens", code=code)

    def stop(self) -> None:
        """End the wait of the thread that reads."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def _refusal(answer: http.client.HTTPResponse) -> ServerError:
    text = answer.read(_MAX_ERROR_BYTES).decode(errors="replace").strip()
    wants_key = f"; it wants a key: the launch's --api-key, or {KEY_VARIABLE} with --url"
    hint = wants_key if answer.status in (401, 403) else ""
    return ServerError(
        f"/generate: status {answer.status}: {quote(text) if text else 'no text'}{hint}",
        code="bad_status",
    )
