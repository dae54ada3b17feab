"""What NCCL settings should save in a step, by arithmetic, beside what was measured.

All-reduces and all-gathers a step by size, from the model and the launch, times the microseconds
that one takes, from a search or a bench. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.payloads.workload import Gather, Payload


MAX_US = 1e7
"""Of one collective; a time above is a damaged figure."""


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """One size of a step's collectives; times are of one of them, None where not measured.

    ``size_bytes`` is what an all-reduce sums, or what each rank contributes to an all-gather.
    """

    size_bytes: int
    count: int
    origin: str
    baseline_us: float | None
    tuned_us: float | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time in NCCL of one decode step under both settings.

    Attributes:
        rows: its all-reduces.
        gathers: its all-gathers.
        missing_count: all-reduces a step whose size was not measured; in neither sum.
        is_from_elsewhere: times are those of other GPUs than these, maybe of the same kind.
        other_rank_counts: how many ranks the times are of, and how many the launch has; None where
            it is the same number, or not known.
        baseline_ms: of all that was measured, all-gathers too.
        tuned_ms: the same under the settings.
    """

    rows: tuple[PredictionRow, ...]
    all_reduce_count: int
    missing_count: int
    baseline_ms: float
    tuned_ms: float
    gathers: tuple[PredictionRow, ...] = ()
    is_from_elsewhere: bool = False
    other_rank_counts: tuple[int, int] | None = None

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the settings should save in each step."""
        return self.baseline_ms - self.tuned_ms


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """Prediction beside measurement, per decode step.

    Attributes:
        measured_ci_ms: interval of the measured saving; None where there is none.
        nccl_share: share of a step of the baseline that the collectives predicted take; above 1
            where the prediction cannot be right.
        sentence: how far the two are apart, in words, and what the prediction does not count.
    """

    predicted_saved_ms: float
    measured_saved_ms: float
    measured_ci_ms: tuple[float, float] | None
    nccl_share: float
    sentence: str


def predict(
    payloads: Sequence[Payload],
    measured: Mapping[str, object],
    gathers: Sequence[Gather] = (),
) -> Prediction | None:
    """Multiply collectives a step with their times; a size that was not measured is not guessed.

    Args:
        payloads: of the batch size that was served (``workload.batches[..].payloads``).
        measured: ``Profile.measured``, or the ``data`` of ``search``: its ``payloads`` hold
            ``bytes``, ``baseline_us`` and ``tuned_us``, as do its ``gathers``, where it has any.
        gathers: of the same batch size.

    Returns:
        None where no all-reduce that was measured fits this launch.
    """
    rows = _rows(payloads, _times_us(measured.get("payloads")))
    gather_rows = _rows(gathers, _times_us(measured.get("gathers")))
    if not _known(rows):
        return None
    known = [*_known(rows), *_known(gather_rows)]
    total = sum(row.count for row in rows)
    return Prediction(
        rows=rows,
        all_reduce_count=total,
        missing_count=total - sum(count for count, _, _ in _known(rows)),
        baseline_ms=math.fsum(count * us for count, us, _ in known) / 1e3,
        tuned_ms=math.fsum(count * us for count, _, us in known) / 1e3,
        gathers=gather_rows,
    )


def _rows(
    collectives: Sequence[Payload | Gather], times_us: Mapping[int, tuple[float, float]]
) -> tuple[PredictionRow, ...]:
    return tuple(
        PredictionRow(
            each.size_bytes,
            each.count,
            each.origin,
            *times_us.get(each.size_bytes, (None, None)),
        )
        for each in collectives
    )


def _known(rows: Sequence[PredictionRow]) -> list[tuple[int, float, float]]:
    """Return count and both times of the rows that were measured."""
    return [
        (row.count, row.baseline_us, row.tuned_us)
        for row in rows
        if row.baseline_us is not None and row.tuned_us is not None
    ]


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
        sentence="; ".join(
            [_compare(prediction, measured_ms, interval), *_doubts(prediction, baseline_ms)]
        ),
    )


def usable_number(value: object, *, most: float = MAX_US) -> float | None:
    """Return a number from a file, of microseconds if nothing else is said.

    >>> usable_number(10), usable_number("10"), usable_number(0.0), usable_number(10**400)
    (10.0, None, None, None)

    Args:
        most: the largest that is usable.

    Returns:
        None where it is no number above 0, or larger than any that was measured.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        return None
    return float(value)


def _times_us(rows: object) -> dict[int, tuple[float, float]]:
    """Read size -> time under both settings, leaving out whatever is not a time."""
    times: dict[int, tuple[float, float]] = {}
    for row in rows if isinstance(rows, Sequence) and not isinstance(rows, str) else ():
        if not isinstance(row, Mapping):
            continue
        size = row.get("bytes")
        baseline_us, tuned_us = map(usable_number, (row.get("baseline_us"), row.get("tuned_us")))
        if isinstance(size, int) and baseline_us is not None and tuned_us is not None:
            times[size] = (baseline_us, tuned_us)
    return times


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
            alone = "all-reduces and all-gathers" if _known(prediction.gathers) else "all-reduces"
            text += f"the server saves {apart:.2f} ms {which} than its {alone} alone should"
    return text


def _doubts(prediction: Prediction, baseline_ms: float) -> Iterator[str]:
    """Name what may make the server save more or less than predicted."""
    if prediction.baseline_ms > baseline_ms:
        alone_ms = prediction.baseline_ms
        step = f"a step of {baseline_ms:.2f} ms"
        yield f"implausible: its collectives alone would take {alone_ms:.2f} ms of {step}"
    if prediction.is_from_elsewhere:
        yield "its times were measured on other GPUs"
    if prediction.other_rank_counts is not None:
        there, here = prediction.other_rank_counts
        yield f"its times are of {there} ranks, this launch has {here}"
    if prediction.missing_count:
        missing, total = prediction.missing_count, prediction.all_reduce_count
        yield f"{missing} of {total} all-reduces a step were not measured and are left out"
    unknown = [row for row in prediction.gathers if row.baseline_us is None]
    if unknown:
        count = sum(row.count for row in unknown)
        sizes = ", ".join(str(row.size_bytes) for row in sorted(unknown, key=_size))
        which, verbs = ("all-gather", "follows the same settings and is")
        if count > 1:
            which, verbs = ("all-gathers", "follow the same settings and are")
        yield f"{count} {which} a step ({sizes} bytes a rank) {verbs} not in the prediction"


def _size(row: PredictionRow) -> int:
    return row.size_bytes
