"""Sizes and bandwidths: what people type and read, and the plain numbers that the code keeps."""

from __future__ import annotations

import re

_FACTORS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNIT_NAMES = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}
_AMBIGUOUS_UNIT = re.compile(r"(?P<count>[0-9]{1,18})\s*(?P<prefix>[KMGT])B?", re.IGNORECASE)
_SIZE = re.compile(r"(?P<count>[0-9]{1,18})\s*(?P<unit>[A-Za-z]*)")

# Below this, people know payloads by their byte count (14336, say); above it by KiB and MiB.
_SMALLEST_IN_KIB_BYTES = 16 * 2**10


def parse_size_bytes(text: str) -> int:
    """Read a size that a person typed: a plain number of bytes, or one with KiB, MiB, GiB.

    ``4M`` and ``4MB`` are refused: some programs mean 1000 by it, some 1024, and NCCL itself reads
    ``4M`` as 4 bytes.

    >>> parse_size_bytes("64KiB"), parse_size_bytes("4096")
    (65536, 4096)

    Raises:
        ValueError: with one line that says what to write instead.
    """
    stripped = text.strip()
    if not stripped:
        raise ValueError("an empty size; write bytes (4096) or a size such as 64KiB")
    if stripped.startswith("-"):
        raise ValueError(f"{stripped!r} is negative; a size is 0 bytes or more")
    if ambiguous := _AMBIGUOUS_UNIT.fullmatch(stripped):
        count, unit = int(ambiguous["count"]), f"{ambiguous['prefix'].upper()}iB"
        size_bytes = count * _FACTORS[unit.upper()]
        raise ValueError(f"{stripped!r} is ambiguous; write {count}{unit} or {size_bytes}")
    match = _SIZE.fullmatch(stripped)
    factor = _FACTORS.get((match["unit"] or "B").upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{stripped!r} is not a size; write bytes (4096) or a size such as 64KiB")
    return int(match["count"]) * factor


def format_bytes(size_bytes: int) -> str:
    """Show a size exactly: in the largest binary unit that divides it, else in bytes.

    >>> format_bytes(43008), format_bytes(14336), format_bytes(67108864)
    ('42 KiB', '14336 B', '64 MiB')
    """
    if size_bytes >= _SMALLEST_IN_KIB_BYTES:
        for factor, unit in _UNIT_NAMES.items():
            if size_bytes % factor == 0:
                return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def busbw_gb_s(size_bytes: int, time_us: float, world_size: int) -> float:
    """Convert one all-reduce time to bus bandwidth.

    Bus bandwidth scales algorithm bandwidth by 2(n-1)/n, so that figures from different world
    sizes compare with the same link speed (definition of nccl-tests).

    >>> busbw_gb_s(1_000_000_000, 10_000.0, 8)
    175.0
    """
    if time_us <= 0:
        raise ValueError(f"time_us={time_us}: a measured time is above zero")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: at least one rank takes part")
    algbw_gb_s = size_bytes / (time_us * 1000.0)
    return algbw_gb_s * 2 * (world_size - 1) / world_size
