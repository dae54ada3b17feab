"""Finds, in what a dead server wrote, the one line that tells why, and what kind of death it was.

Pure. A death leaves many lines: the cause, its traceback, and what others say of it afterwards.
Wording as read in SGLang 0.5.10.post1 to 0.5.23 and torch 2.11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nccltune.sglang.log_stages import Stage

_MAX_LINE_CHARS = 400


class FailureKind(StrEnum):
    """Why a server died; where a line shows several, the first of these."""

    USAGE = "usage"
    PORT = "port"
    MEMORY = "memory"
    NCCL = "nccl"
    CAPTURE = "capture"
    SLOW_RANK = "slow_rank"
    WARM_UP = "warm_up"
    WATCHDOG = "watchdog"
    KILLED = "killed"
    """One of its processes, by somebody else: by the kernel when memory ends, as SGLang remarks."""
    CHILD = "child"
    EXCEPTION = "exception"
    UNKNOWN = "unknown"


FAILURE_WORDS: Mapping[FailureKind, str] = {
    FailureKind.USAGE: "its arguments were refused",
    FailureKind.PORT: "its port is taken",
    FailureKind.MEMORY: "out of memory",
    FailureKind.NCCL: "NCCL failed",
    FailureKind.CAPTURE: "graph capture failed",
    FailureKind.SLOW_RANK: "a rank did not finish loading",
    FailureKind.WARM_UP: "the warm-up request failed",
    FailureKind.WATCHDOG: "its own watchdog ended it",
    FailureKind.KILLED: "one of its processes was killed, as the kernel does when memory ends",
    FailureKind.EXCEPTION: "an exception ended it",
    FailureKind.CHILD: "one of its processes died",
    FailureKind.UNKNOWN: "it does not say why",
}

_NCCL_STAGES = frozenset(
    {Stage.INIT_PARALLEL, Stage.CAPTURE_TARGET, Stage.CAPTURE_DRAFT, Stage.WARM_UP}
)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a server died.

    Attributes:
        line: what it said itself, the line that tells most; empty where it said nothing.
    """

    kind: FailureKind
    line: str

    @property
    def is_nccl(self) -> bool:
        """Whether settings of NCCL may have done it."""
        return self.kind is FailureKind.NCCL

    def format(self) -> str:
        """Say it in words.

        >>> Failure(FailureKind.NCCL, "RuntimeError: NCCL error: internal error").format()
        'NCCL failed: RuntimeError: NCCL error: internal error'
        """
        words = FAILURE_WORDS[self.kind]
        return f"{words}: {self.line}" if self.line else words


def is_nccl_stall(stage: Stage) -> bool:
    """Tell whether a start that hangs in this stage may hang in a collective."""
    return stage in _NCCL_STAGES


_PATTERNS: Mapping[FailureKind, str] = {
    FailureKind.USAGE: (
        r": error: (?:unrecognized arguments|argument |ambiguous option|the following arguments)"
    ),
    FailureKind.PORT: r"[Aa]ddress already in use|at \d+ is not available in \d+ seconds",
    FailureKind.MEMORY: (
        r"CUDA (?:error: )?out of memory|OutOfMemoryError|failure (?:\d+ )?'out of memory'|"
        r"Not enough memory\. Please|Cannot allocate memory|No space left on device"
    ),
    FailureKind.NCCL: (
        r"NCCL error|DistBackendError|\bnccl(?:System|Internal|UnhandledCuda|Remote)Error|"
        r"\bncclInvalid(?:Usage|Argument)|NCCL communicator (?:was|is) aborted|"
        r"Watchdog caught collective operation timeout|"
        # An integer divided by zero, which is what a buffer of a few bytes makes of NCCL's chunks.
        r"exit code:? -8\b|(?<!Fatal Python error: )Floating point exception"
    ),
    FailureKind.CAPTURE: r"Capture cuda graph failed",
    FailureKind.SLOW_RANK: r"there are other ranks that didn't finish loading",
    FailureKind.WARM_UP: r"Initialization failed\. warmup error",
    FailureKind.WATCHDOG: r"\bwatchdog timeout\b|Health check failed",
    FailureKind.KILLED: r"exit code:? -9\b",
    FailureKind.CHILD: (
        r"scheduler died during initialization|crashed with exit code|"
        r"Segmentation fault|\(core dumped\)"  # what a shell says
    ),
    FailureKind.EXCEPTION: (
        r"^(?!SystemExit|EOFError)(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Timeout)(?::|$)"
    ),
}
_BY_KIND = {kind: re.compile(pattern) for kind, pattern in _PATTERNS.items()}
_ANY = re.compile("|".join(_PATTERNS.values()))
_FINAL = re.compile(
    r"Scheduler hit an exception|Received sigquit from a child|Initialization failed\.|"
    r"scheduler died during initialization|\bwatchdog timeout\b"
)
_ENDED_BY_ITSELF = re.compile(r"SIGTERM received\.|Shutting down")
_TRACEBACK = "Traceback (most recent call last):"
_CRASH = "Fatal Python error:"
_NCCL_FRAME = re.compile(r"pynccl|distributed_c10d|libnccl")
_SURE = (FailureKind.USAGE, FailureKind.PORT, FailureKind.MEMORY)


class FailureWatch:
    """Remembers, line by line, what would tell why a server died.

    Arguments, ports and memory are causes wherever they show, then a crash with NCCL on the stack.
    Of everything else the first to show is taken: when one rank dies, its peers' collectives fail
    too.

    Attributes:
        is_final: the server has said that it cannot go on, though it may not have ended yet.
    """

    def __init__(self) -> None:
        self.is_final = False
        self._sure: dict[FailureKind, str] = {}
        self._first: Failure | None = None
        self._final = ""
        self._crash = ""
        self._is_crash_in_nccl = False
        self._last = ""
        self._is_leaving = False

    def take(self, text: str) -> None:
        """Take in one line, without its time and rank."""
        if self._is_leaving:
            return  # what children say of the end that was asked for
        self._last = text
        if _ENDED_BY_ITSELF.search(text):
            self._is_leaving = True
        elif _CRASH in text:
            self._crash = self._crash or _cut(text)
        elif _ANY.search(text):
            self._keep(text)
        if self._crash and _NCCL_FRAME.search(text):
            self._is_crash_in_nccl = True
        if _FINAL.search(text):
            self.is_final = True
            self._final = self._final or text

    def explain(self) -> Failure:
        """Return the surest cause that was seen."""
        for kind in _SURE:
            if kind in self._sure:
                return Failure(kind, self._sure[kind])
        if self._is_crash_in_nccl:
            return Failure(FailureKind.NCCL, self._crash)
        if self._first is not None:
            return self._first
        if self._crash or self._final:
            return Failure(FailureKind.CHILD, self._crash or _cut(self._final))
        return Failure(FailureKind.UNKNOWN, _cut(self._last))

    def _keep(self, text: str) -> None:
        found = ((kind, pattern.search(text)) for kind, pattern in _BY_KIND.items())
        kind, place = next((kind, place) for kind, place in found if place is not None)
        # Of a very long line the part that tells is kept.
        line = _cut(text[max(0, place.start() - _MAX_LINE_CHARS // 2) :])
        if kind in _SURE:
            self._sure.setdefault(kind, line)
        elif self._first is None or self._first.line.endswith(_TRACEBACK):
            self._first = Failure(kind if self._first is None else self._first.kind, line)


def _cut(text: str) -> str:
    return text[:_MAX_LINE_CHARS].strip()
