"""Drives one server with real requests and returns what came, or says why it cannot be measured.

The same prompts in the same order for every server, greedy, with caches flushed in between.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nccltune.errors import ServerError
from nccltune.sglang.endpoints import Endpoint, Health, ask, read_health, read_server_info
from nccltune.verify.load.believing import check_timed
from nccltune.verify.load.client import Limits, fetch
from nccltune.verify.load.prompts import count_words, long_prompt, short_prompt

if TYPE_CHECKING:
    from nccltune.verify.model import Run, Stream

TTFT_TOKENS = 8
"""More than the first, so that the first chunk is one of several."""
LONG_PROMPT_TOKENS = 4000
SHORT_FOR_EACH_LONG = 5
_ROOM_SHARE = 0.8
"""Of the server's context, where the long prompt has to be cut: its tokens are an estimate."""
_MAX_CACHED_SHARE = 0.1
_FLUSH_PATH = "/flush_cache?timeout=2"  # older releases do not read the time
_FLUSH_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is asked of a server, the same for every arm.

    Attributes:
        run_count: rounds of load that count; each is ``concurrency`` streams of ``tokens`` tokens.
        warm_up_count: such rounds before them that do not count.
        ttft_repetitions: measured requests of the long guard prompt; of the short one, which is
            quickly answered and uneven, ``SHORT_FOR_EACH_LONG`` times as many.
        deadline_s: the longest that one request may take.
        stall_s: the longest that a stream may bring nothing; a first prefill may compile kernels.
    """

    run_count: int = 5
    tokens: int = 500
    concurrency: int = 1
    warm_up_count: int = 1
    ttft_repetitions: int = 3
    deadline_s: float = 600.0
    stall_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What one boot answered.

    Attributes:
        ttft_short_ms: of the short guard prompt, one a repetition; the long one alike.
        remarks: sentences on what differs from the plan and does no harm.
    """

    runs: tuple[Run, ...]
    ttft_short_ms: tuple[float, ...]
    ttft_long_ms: tuple[float, ...]
    remarks: tuple[str, ...] = ()


def measure(
    endpoint: Endpoint, plan: LoadPlan, on_progress: Callable[[str], None] | None = None
) -> Measured:
    """Send the whole plan to a server that is up.

    Args:
        on_progress: told what is sent next, ``run 2 of 5``.

    Raises:
        ServerError: the server is not up, or an answer is not exactly what was asked for, or tells
            no time of a step; its code says which way. No number is made of such an answer.
    """
    _check_up(endpoint)
    return _Load(endpoint, plan, on_progress or (lambda _text: None)).measure()


class _Load:
    """The plan under way at one server."""

    def __init__(self, endpoint: Endpoint, plan: LoadPlan, say: Callable[[str], None]) -> None:
        self._endpoint, self._plan, self._say = endpoint, plan, say
        self._limits = Limits(plan.deadline_s, plan.stall_s)
        self._info = read_server_info(endpoint)
        self._remarks: list[str] = []

    def measure(self) -> Measured:
        plan = self._plan
        for idx in range(plan.warm_up_count):
            self._round("warm-up", "Draft", idx, plan.warm_up_count)
        runs = tuple(self._run(idx) for idx in range(plan.run_count))
        short_ms, long_ms = self._guards() if plan.ttft_repetitions else ((), ())
        self._remark_on_queue()
        return Measured(runs, short_ms, long_ms, tuple(self._remarks))

    def _run(self, idx: int) -> Run:
        run = self._round("run", "Chapter", idx, self._plan.run_count)
        check_timed(run, self._info)
        return run

    def _round(self, what: str, series: str, idx: int, count: int) -> Run:
        self._say(f"{what} {idx + 1} of {count}")
        self._flush()
        streams = self._plan.concurrency
        prompts = [short_prompt(series, idx * streams + each) for each in range(streams)]
        return fetch(self._endpoint, prompts, tokens=self._plan.tokens, limits=self._limits)

    def _guards(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Measure times to first token, the first of each length uncounted: it may compile."""
        count = self._plan.ttft_repetitions
        first, *short = [
            self._first_token("short", short_prompt("Letter", k))
            for k in range(SHORT_FOR_EACH_LONG * count + 1)
        ]
        words = self._long_words(first.prompt_tokens / count_words(short_prompt("Letter", 0)))
        _, *long = [
            self._first_token("long", long_prompt("Book", k, words)) for k in range(count + 1)
        ]
        cached = max(stream.cached_tokens / stream.prompt_tokens for stream in long)
        if cached > _MAX_CACHED_SHARE:
            raise ServerError(
                f"{100.0 * cached:.0f} % of the long prompt came from the server's cache, so that "
                "its time to first token means nothing: /flush_cache does not work while other "
                "requests run; stop them, or start with --disable-radix-cache",
                code="cached_prompt",
            )
        return tuple(each.ttft_ms for each in short), tuple(each.ttft_ms for each in long)

    def _first_token(self, length: str, prompt: str) -> Stream:
        self._say(f"time to first token, {length} prompt")
        self._flush()
        run = fetch(self._endpoint, [prompt], tokens=TTFT_TOKENS, limits=self._limits)
        return run.streams[0]

    def _long_words(self, tokens_a_word: float) -> int:
        """Return how many words make the long prompt, by the server's own tokenizer."""
        tokens = LONG_PROMPT_TOKENS
        room = _room_tokens(self._info)
        if room is not None and tokens > _ROOM_SHARE * room:
            tokens = max(1, int(_ROOM_SHARE * room))
            self._remarks.append(
                f"the long prompt has about {tokens} tokens instead of {LONG_PROMPT_TOKENS}: this "
                f"server takes requests of up to {room}"
            )
        return max(1, round(tokens / tokens_a_word))

    def _remark_on_queue(self) -> None:
        at_once = self._info.get("max_running_requests")
        if isinstance(at_once, int) and at_once < self._plan.concurrency:
            self._remarks.append(
                f"{self._plan.concurrency} streams were sent at once and the server runs "
                f"{at_once}: the others waited (--max-running-requests)"
            )

    def _flush(self) -> None:
        # Not every server lets itself be flushed, and prompts are all different.
        with suppress(OSError, http.client.HTTPException):
            ask(self._endpoint, _FLUSH_PATH, timeout_s=_FLUSH_TIMEOUT_S)


def _check_up(endpoint: Endpoint) -> None:
    health = read_health(endpoint)
    if health is Health.REFUSED:
        raise ServerError(f"{endpoint.url}: nobody listens", code="no_answer")
    if health is not Health.UP:
        said = {
            Health.STARTING: "it answers 503: it still starts, or is about to end",
            Health.SILENT: "it does not answer",
        }
        raise ServerError(
            f"{endpoint.url}/health: {said.get(health, 'its answer is not that of SGLang')}",
            code="unhealthy",
        )


def _room_tokens(info: Mapping[str, object]) -> int | None:
    """Return how long a request may be; None where the server does not say."""
    names = ("max_req_input_len", "context_length", "max_total_num_tokens")
    said = [value for name in names if isinstance(value := info.get(name), int) and value > 0]
    return min(said, default=None)
