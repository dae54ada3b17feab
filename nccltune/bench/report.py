"""What a comparison of one candidate with the baseline finds.

Pure data, shared by the bench and the renderers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nccltune.measurement import Outcome, Settings


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of one all-reduce over every sample of every launch of one arm, in us."""

    median_us: float
    p10_us: float | None
    p90_us: float | None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One payload: baseline beside candidate.

    Attributes:
        candidate: None where the candidate never got so far.
        ratio: candidate over baseline; below 1 is faster.
        ratio_low: lower end of the 95 % interval of ``ratio``; None where there are too few
            launches for one.
        baseline_busbw_gb_s: bus bandwidth of the baseline, as nccl-tests defines it.
        busbw_gb_s: the same of the candidate.
        is_data_ok: every sum of every rank was right, in both arms.
        used: what NCCL really did under the candidate, e.g. ``ring LL 4 channels``; empty where
            not looked up.
        baseline_used: the same under the baseline.
    """

    size_bytes: int
    baseline: Spread
    candidate: Spread | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    baseline_busbw_gb_s: float
    busbw_gb_s: float | None
    is_data_ok: bool
    used: str = ""
    baseline_used: str = ""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One candidate beside the baseline, over fresh launches in ABBA order.

    Attributes:
        outcome: OK, or how the first launch that failed ended.
        message: for people, what went wrong, and that it was the baseline if it was; empty when
            ``outcome`` is OK.
        launch_count: launches of both arms that were measured to the end.
        interval_method: how the intervals were found, in words; empty where there are none.
        memory_bytes_per_gpu: GPU memory of one communicator under the candidate; None where not
            measured.
    """

    name: str
    settings: Settings
    outcome: Outcome
    rows: tuple[BenchRow, ...]
    launch_count: int
    world_size: int
    source: str
    duration_s: float
    interval_method: str = ""
    message: str = ""
    memory_bytes_per_gpu: int | None = None
    warnings: tuple[str, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
