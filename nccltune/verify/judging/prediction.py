"""What NCCL settings should save in a step, by arithmetic, beside what was measured.

All-reduces a step by size, from the model and the launch, times the microseconds that one takes,
from a search or a bench. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.payloads.workload import Payload


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """One all-reduce size of a step; times are of one all-reduce, None where not measured."""

    size_bytes: int
    count: int
    origin: str
    baseline_us: float | None
    tuned_us: float | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """All-reduce time of one decode step under both settings.

    Attributes:
        missing_count: all-reduces a step whose size was not measured; in neither sum.
    """

    rows: tuple[PredictionRow, ...]
    all_reduce_count: int
    missing_count: int
    baseline_ms: float
    tuned_ms: float

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the settings should save in each step."""
        return self.baseline_ms - self.tuned_ms


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """Prediction beside measurement, per decode step.

    Attributes:
        measured_ci_ms: interval of the measured saving; None where there is none.
        nccl_share: share of a step of the baseline that the all-reduces take.
        sentence: how far the two are apart, in words.
    """

    predicted_saved_ms: float
    measured_saved_ms: float
    measured_ci_ms: tuple[float, float] | None
    nccl_share: float
    sentence: str


def predict(payloads: Sequence[Payload], measured: Mapping[str, object]) -> Prediction | None:
    """Multiply all-reduces a step with their times; a size that was not measured is not guessed.

    Args:
        payloads: of the batch size that was served (``workload.batches[..].payloads``).
        measured: ``Profile.measured``, or the ``data`` of ``search``: its ``payloads`` hold
            ``bytes``, ``baseline_us`` and ``tuned_us``.

    Returns:
        None where nothing measured fits this launch.
    """
    times = _times_us(measured)
    rows = tuple(
        PredictionRow(
            payload.size_bytes,
            payload.count,
            payload.origin,
            *times.get(payload.size_bytes, (None, None)),
        )
        for payload in payloads
    )
    known = [
        (row.count, row.baseline_us, row.tuned_us)
        for row in rows
        if row.baseline_us is not None and row.tuned_us is not None
    ]
    if not known:
        return None
    total = sum(row.count for row in rows)
    return Prediction(
        rows=rows,
        all_reduce_count=total,
        missing_count=total - sum(count for count, _, _ in known),
        baseline_ms=math.fsum(count * us for count, us, _ in known) / 1e3,
        tuned_ms=math.fsum(count * us for count, _, us in known) / 1e3,
    )


def check_prediction(
    prediction: Prediction,
    *,
    baseline_ms: float,
    effect_pct: float,
    effect_ci_pct: tuple[float, float] | None,
) -> PredictionCheck:
    """Put a prediction beside the measured effect on the time of a step.

    Args:
        prediction: of the arm.
        baseline_ms: time of a step of the baseline.
        effect_pct: measured, above 0 a gain.
        effect_ci_pct: its interval.
    """
    measured_ms = baseline_ms * effect_pct / 100.0
    interval = None
    if effect_ci_pct is not None:
        interval = (baseline_ms * effect_ci_pct[0] / 100.0, baseline_ms * effect_ci_pct[1] / 100.0)
    return PredictionCheck(
        predicted_saved_ms=prediction.saved_ms,
        measured_saved_ms=measured_ms,
        measured_ci_ms=interval,
        nccl_share=prediction.baseline_ms / baseline_ms,
        sentence=_compare(prediction, measured_ms, interval),
    )


def _times_us(measured: Mapping[str, object]) -> dict[int, tuple[float, float]]:
    """Read size -> time under both settings, leaving out whatever is not a time."""
    rows = measured.get("payloads")
    times: dict[int, tuple[float, float]] = {}
    for row in rows if isinstance(rows, Sequence) and not isinstance(rows, str) else ():
        if not isinstance(row, Mapping):
            continue
        size = row.get("bytes")
        baseline_us, tuned_us = _time(row.get("baseline_us")), _time(row.get("tuned_us"))
        if isinstance(size, int) and baseline_us is not None and tuned_us is not None:
            times[size] = (baseline_us, tuned_us)
    return times


def _time(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


def _compare(
    prediction: Prediction, measured_ms: float, interval: tuple[float, float] | None
) -> str:
    predicted_ms = prediction.saved_ms
    text = f"predicted {predicted_ms:z.2f} ms saved a step, measured {measured_ms:z.2f} ms"
    if interval is None:
        text += ": too few boots to say how far they are apart"
    else:
        low, high = interval
        text += f" ({low:z.2f} to {high:z.2f} ms): "
        if low <= predicted_ms <= high:
            text += "they agree within that interval"
        else:
            apart = abs(predicted_ms - measured_ms)
            which = "less" if measured_ms < predicted_ms else "more"
            text += f"the server saves {apart:.2f} ms {which} than its all-reduces alone should"
    if prediction.missing_count:
        missing, total = prediction.missing_count, prediction.all_reduce_count
        text += f"; {missing} of {total} all-reduces a step were not measured and are left out"
    return text
