"""Boots as JSON values and back, raw moments included; compact, for a verify holds thousands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccltune.verify.model import Boot, Chunk, RankState, Run, Seen, Stream

_MOMENT_DIGITS = 6
"""Microseconds, below which no clock of a socket tells anything."""


def boot_to_json(boot: Boot) -> dict[str, Any]:
    """Return a boot as JSON values."""
    return {
        "arm": boot.arm,
        "position": boot.position,
        "started_at": boot.started_at,
        "start_s": boot.start_s,
        "ttft_short_ms": list(boot.ttft_short_ms),
        "ttft_long_ms": list(boot.ttft_long_ms),
        "seen": _seen_to_json(boot.seen),
        "runs": [
            {"duration_s": run.duration_s, "streams": [_stream_to_json(s) for s in run.streams]}
            for run in boot.runs
        ],
    }


def boot_from_json(data: Mapping[str, Any]) -> Boot:
    """Return the boot that ``boot_to_json`` was given.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not what that wrote.
    """
    return Boot(
        arm=str(data["arm"]),
        position=int(data["position"]),
        started_at=str(data["started_at"]),
        start_s=float(data["start_s"]),
        runs=tuple(
            Run(tuple(_stream_from_json(one) for one in run["streams"]), float(run["duration_s"]))
            for run in data["runs"]
        ),
        ttft_short_ms=_numbers(data["ttft_short_ms"]),
        ttft_long_ms=_numbers(data["ttft_long_ms"]),
        seen=_seen_from_json(data["seen"]),
    )


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
    pairs = zip(_numbers(data["at_s"]), data["tokens_at"], strict=True)
    return Stream(
        prompt_tokens=int(data["prompt_tokens"]),
        tokens=int(data["tokens"]),
        duration_s=float(data["duration_s"]),
        chunks=tuple(Chunk(at_s, int(tokens)) for at_s, tokens in pairs),
        verify_count=None if data["verify_count"] is None else int(data["verify_count"]),
        accept_length=_optional(data["accept_length"]),
        accept_rate=_optional(data["accept_rate"]),
        accept_by_position=tuple(int(count) for count in data["accept_by_position"]),
        cached_tokens=int(data["cached_tokens"]),
    )


def _seen_to_json(seen: Seen) -> dict[str, Any]:
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
        is_nccl_on_path=data["is_nccl_on_path"],
        path_reason=str(data["path_reason"]),
        is_simulated_acceptance=bool(data["is_simulated_acceptance"]),
        version=data["version"],
        server_info=dict(data["server_info"]),
    )


def _numbers(data: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in data)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)
