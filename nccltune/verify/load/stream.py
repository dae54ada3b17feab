"""Reads a streamed answer of SGLang: bytes to events, events to a stream, or why it is none.

Pure. Bytes are only split while a stream runs, and JSON is read after its end, so that reading
never delays the moment that the next bytes are given.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccltune.errors import ServerError
from nccltune.verify.model import Chunk, Stream

_DONE = b"[DONE]"
_META = b'"meta_info"'
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")
_MAX_LINE_BYTES = 64 * 2**20
_MAX_QUOTED_CHARS = 100
_MAX_COUNT = 2**53
_TOKEN_COUNT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,15})\b')
_ROUNDING = 0.05
"""SGLang states accept lengths in full; what is written with one decimal is this far off."""
_MOST_PIECES = 1.05
"""A verify step comes in one piece; a request that was put back, and began again, in one more."""
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # newer and older name


@dataclass(frozen=True, slots=True)
class Event:
    """One ``data:`` line, and when the read that completed it returned."""

    at_s: float
    content: bytes


class EventSplitter:
    """Cuts what a socket gives into events, however reads and lines overlap.

    Attributes:
        events: those so far, without the text: it is cumulative, hence quadratic in memory.
        done_at_s: when the server said that this was all; None before.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.done_at_s: float | None = None
        self._pending = bytearray()

    def feed(self, data: bytes, at_s: float) -> None:
        """Take what one read returned at one moment.

        Raises:
            ServerError: it is no event stream.
        """
        first, *others = data.split(b"\n")
        self._pending += first
        if len(self._pending) > _MAX_LINE_BYTES:
            raise ServerError("/generate: a line without an end", code="bad_stream")
        if not others:
            return
        complete = [bytes(self._pending), *others[:-1]]
        self._pending = bytearray(others[-1])
        for line in complete:
            self._take(line.rstrip(b"\r"), at_s)

    def last_count(self) -> int:
        """Return the tokens so far, at a glance: it is asked after every read."""
        found = _TOKEN_COUNT.search(self.events[-1].content) if self.events else None
        return 0 if found is None else int(found[1])

    def _take(self, line: bytes, at_s: float) -> None:
        if not line or line.startswith(_OTHER_FIELDS) or self.done_at_s is not None:
            return
        if not line.startswith(b"data:"):
            raise ServerError(f"/generate: no event stream: {quote(line)}", code="bad_stream")
        content = line[len(b"data:") :].strip()
        if content == _DONE:
            self.done_at_s = at_s
        else:
            self.events.append(Event(at_s, _without_text(content)))


def _without_text(content: bytes) -> bytes:
    """Cut off what stands before ``meta_info``; within a JSON text its quotes would be escaped."""
    start = content.rfind(_META)
    return b"{" + content[start:] if start > 0 else content


@dataclass(frozen=True, slots=True)
class Answer:
    """What the events of one request say.

    Attributes:
        chunks: those that brought tokens.
        tokens: completion tokens at the end, by the server.
        meta: ``meta_info`` of the last event; empty where none came.
    """

    chunks: tuple[Chunk, ...]
    tokens: int
    meta: Mapping[str, object]


def read_events(events: Sequence[Event]) -> Answer:
    """Return what has come, whether or not that was all.

    Raises:
        ServerError: one of them is an error, or does not count its tokens.
    """
    chunks: list[Chunk] = []
    tokens = 0
    meta: Mapping[str, object] = {}
    for event in events:
        meta = _meta_of(event)
        count = _count(meta, "completion_tokens")
        if count is None:
            raise ServerError(
                "/generate: the answer does not say how many tokens came", code="no_usage"
            )
        if count < tokens:
            raise ServerError(
                f"/generate: {count} tokens after {tokens} in one answer", code="bad_stream"
            )
        if count > tokens:
            chunks.append(Chunk(event.at_s, count))
        tokens = count
    return Answer(tuple(chunks), tokens, meta)


def stream_of(splitter: EventSplitter, *, tokens: int) -> Stream:
    """Return a finished answer as a stream.

    Args:
        splitter: has seen the end.
        tokens: how many were asked for.

    Raises:
        ServerError: the answer is not exactly what was asked for.
    """
    answer = read_events(splitter.events)
    _check(answer, tokens)
    prompt_tokens = _count(answer.meta, "prompt_tokens")
    if not prompt_tokens:
        raise ServerError(
            "/generate: the answer does not say how long its prompt was", code="no_usage"
        )
    verify_count = _count(answer.meta, "spec_verify_ct") or None
    accept_length = None
    if verify_count is not None:
        accept_length = answer.tokens / verify_count  # SGLang's own definition
        _check_speculation(answer, verify_count, accept_length)
    assert splitter.done_at_s is not None  # noqa: S101 - what "finished" means
    return Stream(
        prompt_tokens=prompt_tokens,
        tokens=answer.tokens,
        duration_s=splitter.done_at_s,
        chunks=answer.chunks,
        verify_count=verify_count,
        accept_length=accept_length,
        accept_rate=_share(answer.meta, "spec_accept_rate"),
        accept_by_position=_histogram(answer.meta),
        cached_tokens=_count(answer.meta, "cached_tokens") or 0,
    )


def _meta_of(event: Event) -> Mapping[str, object]:
    try:
        content = json.loads(event.content)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and "error" in content:
        error = content["error"]
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ServerError(
            f"/generate: status 200, and then an error: {quote(message)}", code="error_in_stream"
        )
    meta = content.get("meta_info") if isinstance(content, dict) else None
    if not isinstance(meta, dict):
        raise ServerError(
            f"/generate: an event that is not SGLang's: {quote(event.content)}", code="bad_stream"
        )
    return meta


def _check(answer: Answer, tokens: int) -> None:
    reason = answer.meta.get("finish_reason")
    kind, detail = "no reason given", ""
    if isinstance(reason, dict):
        kind = str(reason.get("type"))
        detail = ", ".join(f"{name} {value}" for name, value in reason.items() if name != "type")
    told = f" ({quote(detail)[1:-1]})" if detail else ""
    ending = f"/generate: the answer ended with {quote(kind)}{told}"
    if "NaN" in detail:
        raise ServerError(f"{ending}: the model computes nonsense", code="nan_stop")
    if kind != "abort" and answer.tokens != tokens:
        few = "fewer_tokens" if answer.tokens else "zero_tokens"
        raise ServerError(
            f"{ending} after {answer.tokens} tokens where {tokens} were asked for",
            code=few if answer.tokens < tokens else "more_tokens",
        )
    if kind != "length":
        raise ServerError(f"{ending}, not by its length", code="stopped")


def _check_speculation(answer: Answer, verify_count: int, accept_length: float) -> None:
    """Refuse counts that contradict each other: no time of a step may rest on them.

    Each verify step brings at least one token, and comes in one piece at most.
    """
    said = _number(answer.meta, "spec_accept_length")
    later = len(answer.chunks) - 1
    problem = ""
    if said is not None and abs(said - accept_length) > _ROUNDING:
        problem = f"and an accept length of {said:.4g}, not {accept_length:.2f}"
    elif verify_count > answer.tokens:
        problem = "which is more than one for each token"
    elif later > _MOST_PIECES * verify_count + 1:
        problem = f"and {later} pieces of the stream after the first"
    if problem:
        raise ServerError(
            f"/generate: {answer.tokens} tokens in {verify_count} verify steps, {problem}: the "
            "server's own counts (spec_verify_ct) contradict each other, and no time of a step "
            "can be told",
            code="bad_speculation",
        )


def _count(meta: Mapping[str, object], name: str) -> int | None:
    value = meta.get(name)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT
    return value if is_count else None  # type: ignore[return-value]


def _number(meta: Mapping[str, object], name: str) -> float | None:
    value = meta.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MAX_COUNT:
        return None
    return None if math.isnan(value) else float(value)


def _share(meta: Mapping[str, object], name: str) -> float | None:
    value = _number(meta, name)
    return value if value is not None and 0.0 <= value <= 1.0 else None


def _histogram(meta: Mapping[str, object]) -> tuple[int, ...]:
    for name in _HISTOGRAMS:
        value = meta.get(name)
        if isinstance(value, list) and all(type(each) is int and each >= 0 for each in value):
            return tuple(value)
    return ()


def quote(said: object) -> str:
    r"""Quote what a server said: short, in one line, and nothing that repaints a terminal.

    >>> quote(b"a\n\x1b[31mb"), quote("x" * 200)[-5:]
    ("'a [31mb'", "x...'")
    """
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    folded = "".join(char for char in " ".join(text.split()) if char.isprintable())
    cut = folded[:_MAX_QUOTED_CHARS]
    return f"'{cut}{'...' if len(folded) > len(cut) else ''}'"
