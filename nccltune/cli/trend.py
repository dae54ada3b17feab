"""One figure over time, as a picture of one line. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-=+*%#"
MIN_SPAN_SHARE = 0.1
"""The picture spans at least this share of its middle value: noise must not look like mountains."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value and when it was measured (ISO 8601), with the name of its measurement."""

    at: str
    value: float
    origin: str


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one figure that may be compared: the same host, model and flags.

    Attributes:
        points: oldest first.
    """

    name: str
    unit: str
    points: tuple[Point, ...]

    @property
    def change_pct(self) -> float | None:
        """The newest value against the oldest; None with one value only."""
        if len(self.points) < 2:
            return None
        return 100.0 * (self.points[-1].value / self.points[0].value - 1.0)


def draw_sparkline(values: Sequence[float], blocks: str = BLOCKS, *, width: int = 24) -> str:
    """Return a bar for each of the newest values, on a scale that 10 % of change fills at least.

    >>> draw_sparkline([10.0, 10.05, 11.0, 13.0])
    '▁▁▃█'
    >>> draw_sparkline([10.0, 10.01])
    '▄▅'
    """
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    middle = 0.5 * (low + high)
    span = max(high - low, MIN_SPAN_SHARE * abs(middle), math.ulp(middle))
    top = len(blocks) - 1
    floor = middle - 0.5 * span
    return "".join(blocks[round(top * (value - floor) / span)] for value in shown)
