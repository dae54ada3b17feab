"""What people type for batches and payloads on the command line, and what is refused in them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nccltune.errors import UsageProblem
from nccltune.payloads.shapes import require_positive
from nccltune.units import format_bytes, parse_size_bytes

MAX_PAYLOAD_BYTES = 1 << 36
MAX_COUNT = 1_000_000
MAX_USE = 1e12
"""Far above anything real: beyond these, sums and products would lose their meaning."""


def parse_batch_option(text: str) -> tuple[int, float]:
    """Read ``SIZE:USE`` of ``--batch``; ``SIZE`` alone is used once.

    >>> parse_batch_option("1:4")
    (1, 4.0)
    """
    size_text, _, use_text = text.partition(":")
    try:
        size, use = int(size_text), float(use_text) if ":" in text else 1.0
    except ValueError:
        raise _bad(f"--batch {text}: expected SIZE:USE, two plain numbers such as 8:1") from None
    check_use(size, use)
    return size, use


def parse_payload_option(text: str) -> tuple[int, int]:
    """Read ``BYTES:COUNT`` of ``--payload``; the bytes may carry KiB, MiB or GiB.

    >>> parse_payload_option("43008:126")
    (43008, 126)
    """
    size_text, colon, count_text = text.rpartition(":")
    if not colon:
        raise _bad(f"--payload {text}: expected BYTES:COUNT, such as 43008:126")
    try:
        size_bytes = parse_size_bytes(size_text)
    except ValueError as error:
        raise _bad(f"--payload {text}: {error}") from error
    try:
        count = int(count_text)
    except ValueError:
        raise _bad(f"--payload {text}: {count_text!r} is not a count of all-reduces") from None
    check_payload(size_bytes, count)
    return size_bytes, count


def uses_from_options(options: Iterable[str]) -> dict[int, float]:
    """Collect every ``--batch``; uses of the same size add up."""
    collected: dict[int, float] = {}
    for size, use in map(parse_batch_option, options):
        collected[size] = collected.get(size, 0.0) + use
    return collected


def check_payload(size_bytes: int, count: int) -> None:
    """Refuse a payload that no model can have."""
    require_positive("payload bytes", size_bytes)
    if size_bytes % 2:
        raise _bad(f"payload bytes {size_bytes}: must be even, bfloat16 takes two bytes each")
    if size_bytes > MAX_PAYLOAD_BYTES:
        limit = format_bytes(MAX_PAYLOAD_BYTES)
        raise _bad(f"payload bytes {size_bytes}: larger than a GPU can sum at once, {limit}")
    require_positive(f"payload {size_bytes}: count", count)
    if count > MAX_COUNT:
        raise _bad(
            f"payload {size_bytes}: count {count}: no decode step makes more than {MAX_COUNT}"
        )


def check_use(size: int, use: float) -> None:
    """Refuse a batch size below 1, and a use that weighs nothing or is no number."""
    require_positive("batch size", size)
    if not (math.isfinite(use) and use > 0):
        raise _bad(f"batch size {size}: use {use:g} must be a number above 0")
    if not 1 / MAX_USE <= use <= MAX_USE:
        raise _bad(f"batch size {size}: use {use:g} must lie from {1 / MAX_USE:g} to {MAX_USE:g}")


def _bad(message: str) -> UsageProblem:
    return UsageProblem(message, code="bad_value")
