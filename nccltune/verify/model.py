"""What a verify measures: streams, runs, boots, and the arms they belong to.

Raw moments are kept; every figure is derived from them. Pure data, no clock and no socket here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.profile import Profile


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to start the server; arms of a verify differ in one thing.

    Attributes:
        name: unique within the verify, as the tables show it (``default``, ``active``, ``folk``,
            ``2 steps``, ``no speculation``).
        argv: the launch command, rewritten where the arm asks for it.
        profile: settings put into its environment; None for SGLang's own environment.
        num_steps: draft steps; None without speculation, or where SGLang chooses.
        is_speculative: whether a draft is proposed at all.
        note: what else had to be changed with it; empty where nothing had.
        word: that its settings were asked for with; not kept.
    """

    name: str
    argv: tuple[str, ...]
    profile: Profile | None = None
    num_steps: int | None = None
    is_speculative: bool = True
    note: str = ""
    word: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream.

    Attributes:
        at_s: when it was complete, since the request was sent.
        tokens: completion tokens so far, by the server's own count.
    """

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One request and its answer, exactly as asked.

    Attributes:
        chunks: those that brought tokens, in order.
        duration_s: from sending to the end of the stream.
        verify_count: verify steps, by the server; None without speculation.
        accept_length: tokens a verify step, bonus included: ``tokens`` over ``verify_count``.
        accept_rate: share of proposed draft tokens accepted, by the server.
        accept_by_position: how many verify steps accepted exactly 0, 1, 2, ... draft tokens; empty
            where the server does not say.
        cached_tokens: prompt tokens that the server had in its cache and did not compute.
    """

    prompt_tokens: int
    tokens: int
    duration_s: float
    chunks: tuple[Chunk, ...]
    verify_count: int | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    accept_by_position: tuple[int, ...] = ()
    cached_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return 1e3 * self.chunks[0].at_s

    @property
    def decode_s(self) -> float:
        """From the first chunk with tokens to the last; 0 where one chunk brought everything."""
        return self.chunks[-1].at_s - self.chunks[0].at_s

    @property
    def first_tokens(self) -> int:
        """Tokens that were there at the moment of the first: one read may bring several chunks."""
        first = self.chunks[0]
        return max(chunk.tokens for chunk in self.chunks if chunk.at_s <= first.at_s)

    @property
    def decode_tokens(self) -> int:
        """Tokens that came from the first moment to the last."""
        return self.chunks[-1].tokens - self.first_tokens

    @property
    def decode_steps(self) -> int:
        """Decode steps whose tokens came in that time; 0 where it cannot be told.

        Without speculation a step is a token. With it, the very first token is that of the prefill
        and of no verify step: where it comes alone, all verify steps are in the decode time. Where
        more comes at the first moment, the steps that brought it lie before: at least one, as many
        as bring so many tokens on average, and no more than later chunks leave over.
        """
        if self.verify_count is None:
            return max(0, self.decode_tokens)
        before = 0
        if self.first_tokens > 1:
            share = (self.first_tokens - 1) / max(1, self.tokens - 1)
            later = sum(chunk.at_s > self.chunks[0].at_s for chunk in self.chunks)
            left_over = self.verify_count - later
            before = max(1, min(round(share * self.verify_count), left_over))
        return max(0, self.verify_count - before)

    @property
    def ms_per_verify(self) -> float | None:
        """Time of one decode step: decode time over the steps in it; None where not known."""
        if self.decode_tokens <= 0 or self.decode_s <= 0.0 or not self.decode_steps:
            return None
        return 1e3 * self.decode_s / self.decode_steps

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Inter-token latencies: each gap between chunks, shared evenly by its tokens."""
        gaps: list[float] = []
        for before, after in zip(self.chunks, self.chunks[1:], strict=False):
            count = after.tokens - before.tokens
            if count > 0:
                gaps.extend([1e3 * (after.at_s - before.at_s) / count] * count)
        return tuple(gaps)


@dataclass(frozen=True, slots=True)
class Run:
    """One round of load: as many streams at once as the concurrency says.

    Attributes:
        duration_s: from the first request to the last end.
    """

    streams: tuple[Stream, ...]
    duration_s: float

    @property
    def tokens(self) -> int:
        """Completion tokens of all streams."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def tok_s(self) -> float:
        """Tokens per second over everything, prefill included."""
        return self.tokens / self.duration_s

    @property
    def ttft_ms(self) -> float:
        """Mean over the streams."""
        return _mean([stream.ttft_ms for stream in self.streams])

    @property
    def accept_length(self) -> float | None:
        """Tokens a verify step over all streams."""
        return _mean_or_none([stream.accept_length for stream in self.streams])

    @property
    def accept_rate(self) -> float | None:
        """Accepted share of proposed draft tokens over all streams."""
        return _mean_or_none([stream.accept_rate for stream in self.streams])

    @property
    def ms_per_verify(self) -> float | None:
        """Mean over the streams."""
        return _mean_or_none([stream.ms_per_verify for stream in self.streams])


class RankState(StrEnum):
    """Whether one key of the profile is in effect in one rank, as ``nccltune status`` says it."""

    IN_EFFECT = "in_effect"
    LOST = "lost"
    OVERRIDDEN_BY_SGLANG = "overridden_by_sglang"
    SET_BY_OPERATOR = "set_by_operator"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the running server besides its answers.

    Attributes:
        ranks: rank name (``TP0``) -> key -> state, for the keys of the arm's profile.
        is_nccl_on_path: whether NCCL carries the verify pass's all-reduces under these flags; None
            where that cannot be told.
        path_reason: one sentence why, with the flag that would change it.
        is_simulated_acceptance: the server makes acceptance up (``SGLANG_SIMULATE_ACC_LEN``).
        version: SGLang's.
        server_info: how the server resolved its flags, the parts that matter.
    """

    ranks: Mapping[str, Mapping[str, RankState]] = field(default_factory=dict)
    is_nccl_on_path: bool | None = None
    path_reason: str = ""
    is_simulated_acceptance: bool = False
    version: str | None = None
    server_info: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of one arm and all that was measured on it: the independent sample.

    Attributes:
        position: its place in the order of all boots, from 0.
        start_s: from the launch to readiness.
        ttft_short_ms: of the short guard prompt, one a repetition; the long one alike.
    """

    arm: str
    position: int
    started_at: str
    start_s: float
    runs: tuple[Run, ...]
    ttft_short_ms: tuple[float, ...] = ()
    ttft_long_ms: tuple[float, ...] = ()
    seen: Seen = field(default_factory=Seen)

    @property
    def ms_per_verify(self) -> float | None:
        """Median over the runs: one slow run is the host's doing."""
        return _median_or_none([run.ms_per_verify for run in self.runs])

    @property
    def ms_per_token(self) -> float:
        """Median over the runs of the time a token takes, prefill included."""
        value = _median_or_none([1e3 * run.duration_s / run.tokens for run in self.runs])
        return math.nan if value is None else value

    @property
    def accept_length(self) -> float | None:
        """Median over the runs."""
        return _median_or_none([run.accept_length for run in self.runs])

    @property
    def decode_share(self) -> float | None:
        """Median over the runs of how much of the time is decode and no prefill."""
        shares = [
            _mean([stream.decode_s for stream in run.streams]) / run.duration_s
            for run in self.runs
            if run.duration_s > 0.0 and run.streams
        ]
        return _median_or_none(shares)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known and len(known) == len(values) else None


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    if not known or len(known) != len(values):
        return None
    middle = len(known) // 2
    return known[middle] if len(known) % 2 else 0.5 * (known[middle - 1] + known[middle])
