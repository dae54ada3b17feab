"""What a launch gathers while it runs."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nccltune.bench.faults import RankFault, host_outcome, wrong_data_fault
from nccltune.measurement import Launch, Outcome, PayloadMeasurement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nccltune.bench.rank import RankSamples
    from nccltune.measurement import PayloadRequest, Settings


class LaunchRecord:
    """What is known of one launch so far."""

    def __init__(self) -> None:
        self.payloads: list[PayloadMeasurement] = []
        self.gathers: list[PayloadMeasurement] = []
        self.phases_s: dict[str, float] = {}
        self.free_bytes: tuple[int, ...] = ()
        self.memory_bytes: tuple[int, ...] = ()
        self.is_pruned = False
        self.fault: RankFault | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] = time.monotonic() - began

    def launch(self, settings: Settings, duration_s: float) -> Launch:
        """Return all of it."""
        details: dict[str, Any] = {"outcome": Outcome.OK}
        if self.fault is not None:
            details = {
                "outcome": host_outcome(self.fault),
                "message": str(self.fault),
                "failed_rank": self.fault.rank,
            }
        return Launch(
            settings=dict(settings),
            payloads=tuple(self.payloads),
            gathers=tuple(self.gathers),
            is_pruned=self.is_pruned,
            phases_s=self.phases_s,
            memory_bytes=self.memory_bytes,
            duration_s=duration_s,
            **details,
        )


def slowest_of(request: PayloadRequest, answers: Sequence[RankSamples]) -> PayloadMeasurement:
    """Return what all ranks measured of a payload: each replay takes as long as in the slowest."""
    samples_us = [max(times) for times in zip(*(a.samples_us for a in answers), strict=True)]
    is_data_ok = all(answer.is_data_ok for answer in answers)
    return PayloadMeasurement.from_samples(request.size_bytes, samples_us, is_data_ok=is_data_ok)


def raise_if_wrong(what: str, answers: Sequence[RankSamples]) -> None:
    """See that every rank had right data.

    Raises:
        RankFault: some had not.
    """
    wrong = [rank for rank, answer in enumerate(answers) if not answer.is_data_ok]
    fault = wrong_data_fault({what: wrong}, len(answers))
    if fault is not None:
        raise fault
