"""Reads a starting SGLang's output: which stage it is in, and how far.

Pure: bytes in, events out. Wording as read in SGLang 0.5.10.post1 to 0.5.23; a line that is not
known makes no event, but is still handed on, for new words are a sign of life too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest

_MAX_LINE_BYTES = 64 * 1024
"""Of a longer line only the beginning is read; the list of server arguments has 10 KB."""


class Stage(StrEnum):
    """What a server is doing, in the order in which a start goes through it."""

    START = "start"
    SERVER_ARGS = "server_args"
    INIT_PARALLEL = "init_parallel"
    WEIGHTS = "weights"
    DRAFT_WEIGHTS = "draft_weights"
    KV_CACHE = "kv_cache"
    CAPTURE_TARGET = "capture_target"
    CAPTURE_DRAFT = "capture_draft"
    WARM_UP = "warm_up"
    READY = "ready"

    @property
    def is_capture(self) -> bool:
        """Whether CUDA graphs are captured, in which a wrong collective hangs for ever."""
        return self in (Stage.CAPTURE_TARGET, Stage.CAPTURE_DRAFT)

    @property
    def order(self) -> int:
        """Place in a start, from 0."""
        return _ORDER[self]


_ORDER: Mapping[Stage, int] = {stage: idx for idx, stage in enumerate(Stage)}

STAGE_WORDS: Mapping[Stage, str] = {
    Stage.START: "starting",
    Stage.SERVER_ARGS: "starting rank processes",
    Stage.INIT_PARALLEL: "connecting ranks",
    Stage.WEIGHTS: "loading weights",
    Stage.DRAFT_WEIGHTS: "loading draft weights",
    Stage.KV_CACHE: "allocating KV cache",
    Stage.CAPTURE_TARGET: "graph capture",
    Stage.CAPTURE_DRAFT: "draft graph capture",
    Stage.WARM_UP: "warm-up",
    Stage.READY: "ready",
}


class Mark(StrEnum):
    """What a line says of its stage."""

    BEGIN = "begin"
    STEP = "step"
    END = "end"


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One line about a stage.

    Attributes:
        stage: None for a progress bar of something that is no stage of its own.
        subject: what exactly, as the server calls it: ``target verify``, ``shards``.
        done: how many of ``total`` are done; both None where nothing is counted.
        url: where the server says that it listens.
    """

    stage: Stage | None
    mark: Mark
    subject: str = ""
    done: int | None = None
    total: int | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of output, or one update of a progress bar.

    Attributes:
        rank: which process says it (``TP0``); empty for the parent, or where nobody is named.
        text: without time and rank.
    """

    rank: str
    text: str
    event: StageEvent | None


SERVER_ARGS = "server_args=ServerArgs("
"""How a server begins the list of its arguments, which it prints once, before its ranks start."""

BANNER = rf"(?:^|\[[^\[\]\n]{{1,64}}\] ){re.escape(SERVER_ARGS)}"
"""The place of these words in a whole log, for ``re.MULTILINE``: where a line begins, or behind
its time. Source lines of a traceback hold ``server_args=`` too."""

_HEAD = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?((?: [A-Z_]+\d+)*)\] ?")
_BREAK = re.compile(rb"[\r\n]")
_BAR = re.compile(r"(\d{1,3})%(?: Completed)? ?\|(?:[^|]*\|)? ?(\d[\d.]*\w?)/(\d[\d.]*\w?) \[")
_BAR_NAME = re.compile(r"([^:(]*)")
_CAPTURE = re.compile(r"Capture (.*?) ?(?:cuda|CUDA) graph (begin|end)\b")
_INIT = re.compile(r"Init (?:parallel|torch distributed) (begin|ends?)\b")
_WEIGHTS = re.compile(r"Load weight (begin|end)\b")
_LISTENS = re.compile(r"Uvicorn running on (https?://\S+)")
_READY = "The server is fired up and ready to roll!"
_CAPTURING = "Capturing batches"


class LogReader:
    """Cuts output into lines as it comes, and reads them.

    A progress bar rewrites its line, and its newest state has no end yet: it is read as it stands,
    and makes no second event when its end comes. What others write meanwhile lands behind the bar,
    on the same line, and is read as a line of its own.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._bar: StageEvent | None = None
        self._loads: dict[str, int] = {}
        self._capture: StageEvent | None = None

    def feed(self, chunk: bytes) -> Iterator[LogLine]:
        """Yield what a piece of output completes."""
        *whole, self._rest = _BREAK.split(self._rest + chunk)
        for content in whole:
            yield from self._read(content)
        self._rest = self._rest[:_MAX_LINE_BYTES]
        if b"%" in self._rest:
            yield from self._read_unfinished()

    def finish(self) -> Iterator[LogLine]:
        """Yield what is left when there is no more."""
        rest, self._rest = self._rest, b""
        yield from self._read(rest)

    def _read(self, content: bytes) -> Iterator[LogLine]:
        for rank, text in _parts(content):
            event = self._place(rank, read_event(text))
            yield LogLine(rank, text, event if self._is_new(event) else None)

    def _read_unfinished(self) -> Iterator[LogLine]:
        rank, text = next(_parts(self._rest), ("", ""))
        event = self._place(rank, _read_bar(text))
        if event is not None and self._is_new(event):
            yield LogLine(rank, text, event)

    def _is_new(self, event: StageEvent | None) -> bool:
        """Tell whether a bar has moved since it was last read."""
        if event is None or event.mark is not Mark.STEP:
            return True
        is_new = event != self._bar
        self._bar = event
        return is_new

    def _place(self, rank: str, event: StageEvent | None) -> StageEvent | None:
        """Tell from what came before what a line alone does not say."""
        if event is None:
            return None
        if event.stage in (Stage.INIT_PARALLEL, Stage.WEIGHTS) and self._is_draft(rank, event):
            return replace(event, stage=Stage.DRAFT_WEIGHTS)
        if event.mark is Mark.BEGIN and event.stage is not None and event.stage.is_capture:
            self._capture = event
        if event.subject == _CAPTURING and self._capture is not None:
            return replace(event, stage=self._capture.stage, subject=self._capture.subject)
        return event

    def _is_draft(self, rank: str, event: StageEvent) -> bool:
        """Tell the draft model's weights, which come second, from the target's."""
        if event.mark is Mark.STEP:  # a bar names no rank
            return any(self._loads.values())
        loaded = self._loads.get(rank, 0)
        if event.stage is Stage.WEIGHTS and event.mark is Mark.END:
            self._loads[rank] = loaded + 1
        return loaded > 0


def read_event(text: str) -> StageEvent | None:
    """Read one line without its time and rank; None where it says nothing of a stage.

    >>> str(read_event("Init torch distributed begin.").stage)
    'init_parallel'
    """
    if text.startswith(SERVER_ARGS):
        return StageEvent(Stage.SERVER_ARGS, Mark.BEGIN)
    if found := _INIT.match(text):
        return StageEvent(Stage.INIT_PARALLEL, _mark(found[1]))
    if found := _WEIGHTS.match(text):
        return StageEvent(Stage.WEIGHTS, _mark(found[1]))
    if text.startswith("KV Cache is allocated"):
        return StageEvent(Stage.KV_CACHE, Mark.BEGIN)
    if text.startswith("Memory pool end"):
        return StageEvent(Stage.KV_CACHE, Mark.END)
    if found := _CAPTURE.match(text):
        subject = found[1].lower()
        is_draft = subject.startswith("draft")
        stage = Stage.CAPTURE_DRAFT if is_draft else Stage.CAPTURE_TARGET
        return StageEvent(stage, _mark(found[2]), subject)
    if found := _LISTENS.search(text):
        return StageEvent(Stage.WARM_UP, Mark.BEGIN, url=found[1])
    if text.startswith(_READY):
        return StageEvent(Stage.READY, Mark.BEGIN)
    return _read_bar(text)


def _parts(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield rank and text of everything on a line."""
    line = content[:_MAX_LINE_BYTES].decode("utf-8", "replace")
    heads = list(_HEAD.finditer(line))
    first = line[: heads[0].start()] if heads else line
    if first.strip():
        yield "", first.strip()
    for head, following in zip_longest(heads, heads[1:]):
        text = line[head.end() : following.start() if following else None].strip()
        if text:
            yield head[1].strip(), text


def _read_bar(text: str) -> StageEvent | None:
    bar = _BAR.search(text)
    if bar is None:
        return None
    named = _BAR_NAME.match(text[: bar.start()])
    subject = named[1].strip() if named else ""
    if bar[2].isdecimal() and bar[3].isdecimal():
        done, total = int(bar[2]), int(bar[3])
    else:  # bytes, say
        done, total = int(bar[1]), 100
    is_weights = "oading" in subject and "shards" in subject
    stage = Stage.WEIGHTS if is_weights else None
    return StageEvent(stage, Mark.STEP, "shards" if is_weights else subject, done, total)


def _mark(word: str) -> Mark:
    return Mark.BEGIN if word == "begin" else Mark.END
