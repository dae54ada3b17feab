"""Whether the moments and counts of a stream can be believed: what the time of a step rests on.

A proxy that holds an answer back, or a server that does not say how often it verified, would give
a time all the same, and a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from nccltune.errors import ServerError

if TYPE_CHECKING:
    from nccltune.verify.model import Run, Stream

_MIN_ARRIVAL_SHARE = 1 / 8
"""Arrivals over decode steps: below it several steps came at once. Reads of a busy host take a few
pieces together, and a time over many moments stays right."""
_MIN_ARRIVALS = 2
"""After the first: with fewer, all that there is to time is one wait."""
_COVERED = 0.75
"""Of the decode time: how many waits make up so much of it tells bursts from an even stream."""
_MIN_WAITS = 3
_HELD_SHARE = 0.6
"""Of the duration: what is held back leaves less to the decode time; a host that stood still for a
moment does not."""
_MIN_DECODE_SHARE = 0.02
"""Of the duration: an answer that is held back to its end is read in no time."""
_MIN_STEPS = 8
"""Fewer tell nothing about how evenly they came."""
_REMEDY = "measure the server itself and not through a proxy, and let it stream"


def check_timed(run: Run, info: Mapping[str, object]) -> None:
    """Refuse a run whose streams tell no time of a decode step.

    Args:
        info: how the server resolved its flags.

    Raises:
        ServerError: with what is wrong with which of them.
    """
    interval = info.get("stream_interval")
    for stream in run.streams:
        if stream.verify_count is None and says_speculation(info):
            raise ServerError(
                "/generate: the server speculates, and its answer counts no verify steps "
                "(spec_verify_ct): no time of a step can be told; measure the server itself and "
                "not through a proxy, and a release of SGLang that counts them",
                code="no_verify_count",
            )
        if len({chunk.at_s for chunk in stream.chunks}) < 2:
            raise ServerError(
                f"/generate: all {stream.tokens} tokens came in one piece, and no time of a step "
                f"can be told: {_REMEDY}",
                code="cannot_be_timed",
            )
        _check_even(stream, interval if isinstance(interval, int) and interval > 1 else 1)
        if stream.ms_per_verify is None:
            raise ServerError(
                f"/generate: {stream.tokens} tokens in {stream.verify_count} verify steps, none of "
                "them after the first piece of the stream: no time of a step can be told; ask for "
                "more --tokens",
                code="cannot_be_timed",
            )


def says_speculation(info: Mapping[str, object]) -> bool:
    """Whether a server says of itself that it speculates."""
    algorithm = info.get("speculative_algorithm")
    return isinstance(algorithm, str) and algorithm.upper() not in ("", "NONE")


def _check_even(stream: Stream, interval: int) -> None:
    """Refuse what came in bursts.

    Args:
        interval: tokens that the server sends at once (``--stream-interval``).
    """
    steps = stream.tokens - 1 if stream.verify_count is None else stream.verify_count
    expected = min(steps, stream.tokens // interval)
    moments = sorted({chunk.at_s for chunk in stream.chunks})
    waits = sorted((b - a for a, b in pairwise(moments)), reverse=True)
    needed = next(n for n in range(len(waits) + 1) if sum(waits[:n]) >= _COVERED * stream.decode_s)
    share = stream.decode_s / stream.duration_s
    fewest = _MIN_ARRIVAL_SHARE * expected
    is_few = len(waits) < max(_MIN_ARRIVALS, fewest)
    is_held = needed / _COVERED < max(_MIN_WAITS, fewest) and share < _HELD_SHARE
    if expected >= _MIN_STEPS and (is_few or is_held or share < _MIN_DECODE_SHARE):
        raise ServerError(
            f"/generate: chunks came in bursts: {steps} decode steps at "
            f"{len(moments)} moments within {1e3 * stream.decode_s:.1f} of "
            f"{1e3 * stream.duration_s:.1f} ms; no time of a step can be told: {_REMEDY}",
            code="bursts",
        )
