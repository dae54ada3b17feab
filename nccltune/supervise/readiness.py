"""Asks a starting server again and again, in a thread of its own, whether it takes requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nccltune.errors import NccltuneError
from nccltune.live.listeners import listens
from nccltune.live.procfs import read_process
from nccltune.live.scanner import is_launch
from nccltune.sglang.command import parse_launch
from nccltune.sglang.endpoints import Endpoint, Health, endpoint_of, read_health

PROBE_INTERVAL_S = 0.5
OWN_WORD_GRACE_S = 10.0
"""So long after a server has called itself ready, somebody should answer."""


class Probe:
    """The newest answer of a server.

    Args:
        endpoint: where it will listen; None where that is not known yet.
        on_change: called in the probe's thread when the answer is another one.
        interval_s: between an answer and the next question.
    """

    def __init__(
        self,
        endpoint: Endpoint | None,
        *,
        on_change: Callable[[], None],
        interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self.endpoint = endpoint
        self.health: Health | None = None
        self._on_change = on_change
        self._interval_s = interval_s
        self._hurry = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="readiness", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def look_at(self, endpoint: Endpoint) -> None:
        """Ask somewhere else from now on, and at once."""
        self.endpoint = endpoint
        self._hurry.set()

    def hurry(self) -> None:
        """Ask at once, for there is reason to expect another answer."""
        self._hurry.set()

    def stop(self) -> None:
        """Ask no more; an answer that is still awaited is dropped."""
        self._is_over = True
        self._hurry.set()

    def _run(self) -> None:
        while not self._is_over:
            endpoint = self.endpoint
            if endpoint is not None:
                health = read_health(endpoint)
                if health is not self.health and not self._is_over:
                    self.health = health
                    self._on_change()
            self._hurry.wait(self._interval_s)
            self._hurry.clear()


def find_endpoint(pids: Iterable[int]) -> Endpoint | None:
    """Find the server among the processes of a command that hides it, a script say."""
    for pid in pids:
        process = read_process(pid)
        if process is None or not is_launch(process.argv):
            continue
        try:
            return endpoint_of(parse_launch(process.argv))
        except NccltuneError:
            continue
    return None


def has_server(pids: Iterable[int]) -> bool:
    """Tell whether SGLang itself is among these processes."""
    processes = map(read_process, pids)
    return any(each is not None and is_launch(each.argv) for each in processes)


class Verdict(NamedTuple):
    """What an answer means.

    Attributes:
        is_ready: the server takes requests.
        is_listening: it listens at least.
        doubt: why the answer may be wrong; empty where it is sure.
    """

    is_ready: bool
    is_listening: bool = False
    doubt: str = ""


def judge(
    health: Health | None,
    endpoint: Endpoint | None,
    *,
    pids: Callable[[], Iterable[int]],
    since_own_word_s: float | None,
) -> Verdict:
    """Believe an answer of this very server, and its own word where nobody can ask it.

    Args:
        health: the newest answer; None before there is one.
        endpoint: where it was asked; None where nobody knows where to ask.
        pids: the server's processes, for an older server on the same port answers too.
        since_own_word_s: since it called itself ready; None if it has not.
    """
    if endpoint is not None and health in (Health.UP, Health.STARTING):
        is_own = listens(pids(), endpoint.port) is not False
        return Verdict(is_ready=is_own and health is Health.UP, is_listening=is_own)
    if since_own_word_s is None or health is Health.SILENT:
        return Verdict(is_ready=False)
    if endpoint is None:
        return Verdict(is_ready=True)
    if since_own_word_s < OWN_WORD_GRACE_S:
        return Verdict(is_ready=False)
    doubt = f"it calls itself ready, and nobody answers on {endpoint.url}"
    return Verdict(is_ready=True, doubt=doubt)
