"""Boots as JSON values and back, raw moments included; compact, for a verify holds thousands."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from nccltune.verify.model import Boot, Chunk, RankState, Run, Seen, Stream

_MOMENT_DIGITS = 6
"""Microseconds, below which no clock of a socket tells anything."""

_MOST = 10**12
"""Above every count and every time that a server can come to."""

DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
"""What reading a record raises whose JSON is whole, and whose values make no sense."""


def boot_to_json(boot: Boot) -> dict[str, Any]:
    """Return a boot as JSON values."""
    return {
        "arm": boot.arm,
        "position": boot.position,
        "started_at": boot.started_at,
        "start_s": boot.start_s,
        "ttft_short_ms": list(boot.ttft_short_ms),
        "ttft_long_ms": list(boot.ttft_long_ms),
        "seen": seen_to_json(boot.seen),
        "runs": [
            {"duration_s": run.duration_s, "streams": [_stream_to_json(s) for s in run.streams]}
            for run in boot.runs
        ],
    }


def boot_from_json(data: Mapping[str, Any]) -> Boot:
    """Return the boot that ``boot_to_json`` was given.

    Raises:
        DAMAGE: it is not what that wrote, or holds figures that nobody can have measured.
    """
    runs = tuple(_run_from_json(run) for run in data["runs"])
    if not runs:
        raise ValueError("a boot without a run")
    return Boot(
        arm=text_from(data["arm"]),
        position=count_from(data["position"]),
        started_at=text_from(data["started_at"]),
        start_s=_time(data["start_s"]),
        runs=runs,
        ttft_short_ms=_times(data["ttft_short_ms"]),
        ttft_long_ms=_times(data["ttft_long_ms"]),
        seen=_seen_from_json(data["seen"]),
    )


def text_from(value: object) -> str:
    """Return a text of a record; TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where a text belongs")
    return value


def texts_from(value: object) -> tuple[str, ...]:
    """Return a list of texts; TypeError for anything else."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} where a list belongs")
    return tuple(text_from(each) for each in value)


def optional_text(value: object) -> str | None:
    """Return a text or nothing; TypeError for anything else."""
    return None if value is None else text_from(value)


def count_from(value: object, *, least: int = 0) -> int:
    """Return a whole number that something can have been counted to; else it is damage."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r:.40} where a whole number belongs")
    if not least <= value <= _MOST:
        raise ValueError(f"a count of {value:.3g}")
    return value


def _run_from_json(data: Mapping[str, Any]) -> Run:
    streams = tuple(_stream_from_json(one) for one in data["streams"])
    if not streams:
        raise ValueError("a run without a stream")
    return Run(streams, _time(data["duration_s"], is_over=True))


def _stream_to_json(stream: Stream) -> dict[str, Any]:
    return {
        "prompt_tokens": stream.prompt_tokens,
        "tokens": stream.tokens,
        "duration_s": stream.duration_s,
        "verify_count": stream.verify_count,
        "accept_length": stream.accept_length,
        "accept_rate": stream.accept_rate,
        "accept_by_position": list(stream.accept_by_position),
        "cached_tokens": stream.cached_tokens,
        "at_s": [round(chunk.at_s, _MOMENT_DIGITS) for chunk in stream.chunks],
        "tokens_at": [chunk.tokens for chunk in stream.chunks],
    }


def _stream_from_json(data: Mapping[str, Any]) -> Stream:
    pairs = zip(_times(data["at_s"]), data["tokens_at"], strict=True)
    chunks = tuple(Chunk(at_s, count_from(tokens)) for at_s, tokens in pairs)
    is_in_order = all(
        one.at_s <= other.at_s and one.tokens <= other.tokens for one, other in pairwise(chunks)
    )
    if not chunks or not is_in_order:
        raise ValueError("a stream without pieces, or with pieces out of order")
    verify_count = data["verify_count"]
    return Stream(
        prompt_tokens=count_from(data["prompt_tokens"]),
        tokens=count_from(data["tokens"], least=1),
        duration_s=_time(data["duration_s"], is_over=True),
        chunks=chunks,
        verify_count=None if verify_count is None else count_from(verify_count),
        accept_length=_optional(data["accept_length"]),
        accept_rate=_optional(data["accept_rate"]),
        accept_by_position=tuple(count_from(count) for count in data["accept_by_position"]),
        cached_tokens=count_from(data["cached_tokens"]),
    )


def seen_to_json(seen: Seen) -> dict[str, Any]:
    """Return what was seen of a server as JSON can hold it."""
    return {
        "ranks": {
            rank: {key: str(state) for key, state in keys.items()}
            for rank, keys in seen.ranks.items()
        },
        "is_nccl_on_path": seen.is_nccl_on_path,
        "path_reason": seen.path_reason,
        "is_simulated_acceptance": seen.is_simulated_acceptance,
        "version": seen.version,
        "server_info": dict(seen.server_info),
    }


def _seen_from_json(data: Mapping[str, Any]) -> Seen:
    return Seen(
        ranks={
            str(rank): {str(key): RankState(state) for key, state in keys.items()}
            for rank, keys in data["ranks"].items()
        },
        is_nccl_on_path=_answer(data["is_nccl_on_path"]),
        path_reason=text_from(data["path_reason"]),
        is_simulated_acceptance=bool(data["is_simulated_acceptance"]),
        version=optional_text(data["version"]),
        server_info=dict(data["server_info"]),
    )


def _answer(value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{value!r:.40} where yes or no belongs")
    return value


def _time(value: object, *, is_over: bool = False) -> float:
    """Return a time or a ratio; anything that a clock cannot have shown is damage.

    Args:
        value: of the record.
        is_over: it must have taken some time at all.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} where a number belongs")
    if not 0 <= value <= _MOST or (is_over and not value):
        raise ValueError(f"a time of {value:.3g}")
    return float(value)


def _times(data: Any) -> tuple[float, ...]:
    return tuple(_time(value) for value in data)


def _optional(value: object) -> float | None:
    return None if value is None else _time(value)
