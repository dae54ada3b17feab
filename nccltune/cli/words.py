"""How numbers, settings and outcomes are worded, the same in every table and line. Pure."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from nccltune.measurement import Outcome, Settings
from nccltune.profile import SHARED_SOURCE
from nccltune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
from datetime import UTC, datetime

MIB = 1024 * 1024
LIKELY_SLOWER_RATIO = 1.05
"""Above this a payload is pointed out as slower: the limit that guards are held to."""

LIKELY_FASTER_RATIO = 0.99
"""Below this a payload is shown as a gain: 1 % is the smallest gain worth having."""

SHARED_NOTE = "ONE GPU SHARED BY ALL RANKS: these times mean nothing"
UNKNOWN = "-"
NO_SETTINGS = "(none: the defaults)"
OUTCOME_MEANING: Mapping[Outcome, str] = {
    Outcome.OK: "measured",
    Outcome.WRONG_DATA: "sums came out wrong",
    Outcome.TIMEOUT: "did not return within its deadline",
    Outcome.CRASHED: "a rank process died",
    Outcome.REJECTED: "NCCL refused it at start",
    Outcome.UNSUPPORTED: "NCCL has no such all-reduce here",
    Outcome.HOST_BUSY: "someone else used the GPUs",
    Outcome.HOST_FAILED: "a GPU or its driver failed",
}


def format_settings(settings: Settings) -> str:
    """Write settings as a shell would take them.

    >>> format_settings({"NCCL_THREAD_THRESHOLDS": "8 8 64", "NCCL_PROTO": "allreduce:LL"})
    "NCCL_PROTO=allreduce:LL NCCL_THREAD_THRESHOLDS='8 8 64'"
    """
    if not settings:
        return NO_SETTINGS
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(settings.items()))


def shorten_settings(settings: Settings) -> str:
    """Write settings for a narrow line of a live view, where they are looked at and not copied.

    >>> shorten_settings({"NCCL_PROTO": "allreduce:LL", "NCCL_MIN_CTAS": "8"})
    'MIN_CTAS=8 PROTO=LL'
    """
    return format_settings(settings).replace("NCCL_", "").replace("allreduce:", "")


def describe_source(source: str) -> str:
    """Say what a source is worth.

    >>> describe_source("recording:h200-2x-shm")
    'recording:h200-2x-shm (saved measurements of real GPUs; nothing was run here)'
    """
    if source == SHARED_SOURCE:
        return f"{source} (one GPU for all ranks: for diagnosis only)"
    if source.startswith("recording:"):
        return f"{source} (saved measurements of real GPUs; nothing was run here)"
    return source


def format_us(time_us: float | None) -> str:
    """Write a time of one all-reduce: two decimals where they can mean something.

    >>> format_us(7.5812), format_us(2370.4)
    ('7.58', '2370.4')
    """
    if time_us is None:
        return UNKNOWN
    return f"{time_us:.2f}" if time_us < 100.0 else f"{time_us:.1f}"


def format_ratio(ratio: float | None) -> str:
    """Write a ratio; 1.000 is equal, below is faster."""
    return UNKNOWN if ratio is None else f"{ratio:.3f}"


def style_ratio(ratio: float | None, *, is_guard: bool = False) -> str:
    """Choose the colour of a ratio; a guard has nothing to win."""
    if ratio is None:
        return ""
    if ratio > LIKELY_SLOWER_RATIO:
        return "red"
    return "green" if ratio < LIKELY_FASTER_RATIO and not is_guard else ""


def format_interval(low: float | None, high: float | None) -> str:
    """Write both ends of an interval of a ratio; one that is open above tells nothing.

    >>> format_interval(0.861, 0.8931)
    '0.861..0.893'
    """
    if low is None or high is None or not math.isfinite(high):
        return UNKNOWN
    return f"{low:.3f}..{high:.3f}"


def format_clock(duration_s: float | None) -> str:
    """Write a duration as a clock.

    >>> format_clock(83.4), format_clock(3723.0), format_clock(None)
    ('1:23', '1:02:03', '-')
    """
    if duration_s is None:
        return UNKNOWN
    minutes, seconds = divmod(int(max(0.0, duration_s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_duration(duration_s: float) -> str:
    """Write how long something took: seconds below a minute, else a clock.

    >>> format_duration(0.42), format_duration(42.4), format_duration(59.9), format_duration(83.4)
    ('0.4 s', '42 s', '60 s', '1:23 min')
    >>> format_duration(0.01), format_duration(3723.0)
    ('less than 0.1 s', '1:02:03 h')
    """
    if duration_s < 0.1:
        return "less than 0.1 s"
    if duration_s < 60.0:
        return f"{duration_s:.{1 if duration_s < 9.95 else 0}f} s"
    return f"{format_clock(duration_s)} {'h' if duration_s >= 3600.0 else 'min'}"


def format_moment(moment: datetime) -> str:
    """Write a moment in UTC, to the minute.

    >>> format_moment(datetime(2026, 11, 29, 12, 30, 59, tzinfo=UTC))
    '2026-11-29 12:30 UTC'
    """
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def format_change(ratio: float) -> str:
    """Say a ratio of times in words.

    >>> format_change(0.877), format_change(1.02), format_change(3.42), format_change(1.0)
    ('12.3 % faster', '2.0 % slower', '3.42 times slower', 'no different')
    """
    if ratio >= 2.0:
        return f"{ratio:.2f} times slower"
    change_pct = abs(ratio - 1.0) * 100.0
    if change_pct < 0.05:
        return "no different"
    # time saved, not speed gained: 0.877 of the time is 12.3 % less of it
    return f"{change_pct:.1f} % {'faster' if ratio < 1.0 else 'slower'}"


def format_gain(effect_pct: float | None) -> str:
    """Write an effect in percent with its sign; above 0 is a gain.

    >>> format_gain(9.94), format_gain(-0.04), format_gain(None)
    ('+9.9 %', '0.0 %', '-')
    """
    return UNKNOWN if effect_pct is None else f"{_signed(effect_pct)} %"


def format_gain_interval(interval_pct: tuple[float, float] | None) -> str:
    """Write both ends of an interval of an effect.

    >>> format_gain_interval((9.14, 10.8)), format_gain_interval((-0.04, 0.2))
    ('+9.1..+10.8 %', '0.0..+0.2 %')
    """
    if interval_pct is None:
        return UNKNOWN
    low, high = interval_pct
    return f"{_signed(low)}..{_signed(high)} %"


def _signed(value: float) -> str:
    """Write one digit with its sign; what rounds to nothing has none."""
    text = f"{value:+.1f}"
    return "0.0" if text[1:] == "0.0" else text


def format_number(value: float | None, digits: int) -> str:
    """Write a figure, or that there is none.

    >>> format_number(9.8149, 2), format_number(None, 2)
    ('9.81', '-')
    """
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def format_counts(counts: Mapping[Outcome, int]) -> str:
    """Write how trials ended, most frequent first.

    >>> format_counts({Outcome.OK: 31, Outcome.CRASHED: 1, Outcome.TIMEOUT: 2})
    'ok 31, timeout 2, crashed 1'
    """
    ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{outcome} {count}" for outcome, count in ranked if count) or "none yet"


def name_size(size_bytes: int) -> str:
    """Write a payload's size as it is asked for, and how people call it.

    >>> name_size(67108864), name_size(14336)
    ('67108864 B (64 MiB)', '14336 B')
    """
    known_as = format_bytes(size_bytes)
    exact = f"{size_bytes} B"
    return exact if known_as == exact else f"{exact} ({known_as})"
