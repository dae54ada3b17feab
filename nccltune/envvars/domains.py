"""Value checks: each refuses what NCCL would silently change or misread, and says what to write.

NCCL reads numbers with strtoll in base 0: it stops at the first character that is no digit, takes
text for 0, a leading 0 for octal, and reports nothing. Lists are in ``lists.py``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.envvars.model import Check

MAX_VALUE_CHARS = 1023
"""NCCL cuts longer values of its configuration files (misc/param.cc)."""

_PLAIN_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_C_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_SIZE_WITH_SUFFIX = re.compile(r"([0-9]{1,9})\s*([KMG])(?:i?B)?", re.IGNORECASE)
_SHIFT_BY_PREFIX = {"K": 10, "M": 20, "G": 30}
_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1

MIN_BUFFSIZE_BYTES = 64 * 1024
"""Far below it a chunk rounds down to nothing and the ranks die: 1000 did, on two H200."""

# Thresholds are multiplied by channels and threads in 32-bit arithmetic.
MAX_THREAD_THRESHOLD = 99_999
_THRESHOLD_EXAMPLE = "'-2 -2 -2 4 -2 -2' (a negative number keeps the default)"


def shape_problem(value: str) -> str | None:
    """Refuse what no value of any variable may look like, whoever insists on it."""
    if not value:
        return "NCCL takes an empty value for not set; leave the variable out instead"
    if not value.isprintable() or not value.isascii():
        return "it holds a line break or a character outside printable ASCII; remove it"
    if '"' in value or "'" in value:
        return f"NCCL would take the quotes for a part of the value; write {unquoted(value)}"
    if "#" in value:
        return "NCCL would take the comment for a part of the value; write the value alone"
    if value != value.strip():
        return f"NCCL would take the blanks around it for a part; write {value.strip()}"
    if len(value) > MAX_VALUE_CHARS:
        return f"{len(value)} characters, and NCCL's files are cut after {MAX_VALUE_CHARS}"
    return None


def unquoted(value: str) -> str:
    """Drop quotes, for advice on what to write."""
    return re.sub("[\"']", "", value).strip() or "the value alone"


def read_as_nccl(value: str) -> int:
    """Read a number as NCCL's strtoll does.

    >>> [read_as_nccl(text) for text in ("4M", "0x10", "010", "eight")]
    [4, 16, 8, 0]
    """
    match = _C_INTEGER.match(value)
    if match is None:
        return 0
    digits = match[1]
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    return int(digits, base) * (-1 if value.startswith("-") else 1)


def _number_problem(value: str, advice: str) -> str | None:
    """Refuse a text that is not a plain decimal number, saying what NCCL would read instead."""
    if _PLAIN_INTEGER.fullmatch(value):
        if len(value) > 20 or abs(int(value)) > _MAX_INT64:
            return f"NCCL cannot hold it and uses its default; {advice}"
        return None
    taken = read_as_nccl(value)
    if _C_INTEGER.fullmatch(value):
        return f"NCCL reads it as {taken}, octal or hexadecimal; write {taken} if that is meant"
    if not value[:1].isdigit():
        return f"it is no number, and NCCL reads {taken} without a word; {advice}"
    return f"NCCL stops at the first character that is no digit and reads {taken}; {advice}"


def integers(low: int, high: int, *, below: str, above: str) -> Check:
    """Accept whole numbers in a range; ``below`` and ``above`` say what NCCL does outside it."""
    advice = f"write a whole number from {low} to {high}"

    def check(value: str) -> str | None:
        if problem := _number_problem(value, advice):
            return problem
        if int(value) < low:
            return f"{below}; {advice}"
        return f"{above}; {advice}" if int(value) > high else None

    return check


def one_of(choices: tuple[str, ...], otherwise: str) -> Check:
    """Accept exactly these spellings; ``otherwise`` says what NCCL does with others."""
    advice = f"write {' or '.join(choices)}"

    def check(value: str) -> str | None:
        return None if value in choices else f"{otherwise}; {advice}"

    return check


def switch(*values: str) -> Check:
    """Accept a number that stands for a mode, 0 and 1 if not given."""
    choices = values or ("0", "1")
    advice = f"write {' or '.join(choices)}"

    def check(value: str) -> str | None:
        if problem := _number_problem(value, advice):
            return problem
        return None if value in choices else f"NCCL gives this number no meaning; {advice}"

    return check


def thread_count(value: str) -> str | None:
    """Check NCCL_NTHREADS: a power of two from 64 to 512."""
    advice = "write 64, 128, 256 or 512"
    if problem := _thread_problem(value, 64, 512, advice):
        return problem
    if not _is_power_of_two(int(value)):
        return f"wrong sums were reported with 480 (nccl#698); {advice}"
    return None


def ll128_thread_count(value: str) -> str | None:
    """Check NCCL_LL128_NTHREADS: a multiple of 32 from 160 to 640."""
    return _thread_problem(value, 160, 640, "write a multiple of 32 from 160 to 640")


def _thread_problem(value: str, low: int, high: int, advice: str) -> str | None:
    if problem := _number_problem(value, advice):
        return problem
    count = int(value)
    if count <= 0:
        return f"NCCL uses its default; {advice}, or leave it out"
    if count % 32:
        return f"NCCL takes a count that is no multiple of 32 for the maximum, {high}; {advice}"
    if not low <= count <= high:
        return f"NCCL uses {high if count > high else low} instead; {advice}"
    return None


def buffer_size(value: str) -> str | None:
    """Check NCCL_BUFFSIZE: bytes, a power of two, not so small that ranks die of it."""
    advice = f"write a power of two in bytes from {MIN_BUFFSIZE_BYTES} on, such as 4194304"
    if suffixed := _SIZE_WITH_SUFFIX.fullmatch(value):
        size_bytes = int(suffixed[1]) << _SHIFT_BY_PREFIX[suffixed[2].upper()]
        taken = read_as_nccl(value)
        return f"NCCL drops the suffix and takes {taken} bytes; write {size_bytes}"
    if problem := _number_problem(value, advice):
        return problem
    size_bytes = int(value)
    if size_bytes < MIN_BUFFSIZE_BYTES:
        return f"NCCL does not check it, and ranks die of so small a buffer; {advice}"
    if size_bytes > _MAX_INT32:
        return f"NCCL keeps it in 32 bits, where it overflows; {advice}"
    if not _is_power_of_two(size_bytes):
        return f"NCCL does not check it, and 1000000 gave wrong sums (nccl#698); {advice}"
    return None


def fifo_size(value: str) -> str | None:
    """Check NCCL_WORK_FIFO_BYTES: a power of two up to 1 GiB."""
    advice = "write a power of two in bytes, such as 1048576"
    if problem := _number_problem(value, advice):
        return problem
    if not 0 < int(value) <= 2**30 or not _is_power_of_two(int(value)):
        return f"NCCL uses another size instead; {advice}"
    return None


def thread_thresholds(value: str) -> str | None:
    """Check NCCL_THREAD_THRESHOLDS: six whole numbers between blanks."""
    advice = f"write six numbers such as {_THRESHOLD_EXAMPLE}"
    parts = value.split()
    for part in parts:
        if not _PLAIN_INTEGER.fullmatch(part):
            return f"NCCL stops reading in {part!r} and keeps its defaults from there on; {advice}"
        if int(part) > MAX_THREAD_THRESHOLD:
            return f"{part} overflows NCCL's product with channels and threads; {advice}"
    if len(parts) < 6:
        return f"only {len(parts)} numbers, and NCCL keeps its defaults for the rest; {advice}"
    if len(parts) > 6:
        return f"{len(parts)} numbers, and NCCL ignores those after the sixth; {advice}"
    return None


_P2P_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
# graph/paths.cc: an older numbering, which NCCL still accepts; above 4 all mean SYS.
_P2P_LEGACY_NUMBERS = ("LOC", "PIX", "PXB", "PHB", "SYS")


def p2p_level(value: str) -> str | None:
    """Check NCCL_P2P_LEVEL: a path name in capitals."""
    advice = "write NVL, PIX, PXB, PHB or SYS"
    if value in _P2P_LEVELS:
        return None
    if value.upper() in _P2P_LEVELS:
        return f"NCCL wants capitals and ignores this without a word; write {value.upper()}"
    if value[:1].isdigit():
        meant = _P2P_LEGACY_NUMBERS[min(read_as_nccl(value), len(_P2P_LEGACY_NUMBERS) - 1)]
        return f"NCCL takes the old numbering for {meant}; write {meant}"
    return f"NCCL does not know this level and ignores it without a word; {advice}"


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
