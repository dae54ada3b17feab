"""What one launch of all ranks measures, and the interface of everything that can measure it.

A *launch* starts every rank afresh under some settings and times payloads one after another. A GPU
bench does it for real; a recording answers from saved launches. Pure data: nothing here touches a
GPU, a process or a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

Settings = Mapping[str, str]
"""NCCL variable -> value. Always strings, as the environment has them; an absent name is NCCL's (or
SGLang's) default."""


class Outcome(StrEnum):
    """How a launch ended. The last two are the host's fault and say nothing about the settings."""

    OK = "ok"
    WRONG_DATA = "wrong_data"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    REJECTED = "rejected"
    UNSUPPORTED = "unsupported"
    HOST_BUSY = "host_busy"
    HOST_FAILED = "host_failed"

    @property
    def is_candidates_fault(self) -> bool:
        """Whether the settings themselves are to blame, so that a sampler should avoid them."""
        return self not in (Outcome.OK, Outcome.HOST_BUSY, Outcome.HOST_FAILED)


@dataclass(frozen=True, slots=True)
class PayloadRequest:
    """One payload to time: an all-reduce, or an all-gather where one is asked for.

    Attributes:
        size_bytes: bytes that one all-reduce sums, or that each rank contributes to an all-gather.
        graph_count: collectives in the CUDA graph; all-reduces as many as the forward pass has.
        replay_count: timed replays of that graph, one sample each.
        warmup_count: untimed replays before them.
    """

    size_bytes: int
    graph_count: int
    replay_count: int = 12
    warmup_count: int = 3


@dataclass(frozen=True, slots=True)
class PayloadMeasurement:
    """Times of one payload in one launch.

    In us per collective, the slowest rank's for every replay.

    ``samples_us`` is empty where only a summary was ever kept (recordings made by other tools).
    """

    size_bytes: int
    median_us: float
    p10_us: float | None
    p90_us: float | None
    samples_us: tuple[float, ...] = ()
    is_data_ok: bool = True

    @classmethod
    def from_samples(
        cls, size_bytes: int, samples_us: Sequence[float], *, is_data_ok: bool
    ) -> PayloadMeasurement:
        """Derive the summary from raw samples."""
        ordered = sorted(samples_us)
        return cls(
            size_bytes=size_bytes,
            median_us=quantile(ordered, 0.5),
            p10_us=quantile(ordered, 0.1),
            p90_us=quantile(ordered, 0.9),
            samples_us=tuple(samples_us),
            is_data_ok=is_data_ok,
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest order statistics of an ascending sequence.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of all ranks under ``settings``.

    Attributes:
        payloads: what was measured before it ended, in request order; shorter than asked when
            pruned or failed.
        message: for people, what went wrong and in which rank; empty when ``outcome`` is OK.
        is_pruned: ended early by the caller, because what had been measured already decided.
        phases_s: seconds by phase (``start``, ``context``, ``communicator``, ``measure``,
            ``teardown``).
        gathers: times of all-gathers, by the bytes that each rank contributes; empty where not
            measured.
        memory_bytes: GPU memory that one communicator took, per rank; empty where not measured.
        failed_rank: the rank that failed first, where known.
    """

    settings: Settings
    outcome: Outcome
    payloads: tuple[PayloadMeasurement, ...] = ()
    message: str = ""
    is_pruned: bool = False
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: tuple[int, ...] = ()
    failed_rank: int | None = None
    duration_s: float = 0.0
    gathers: tuple[PayloadMeasurement, ...] = ()

    @property
    def median_us(self) -> dict[int, float]:
        """Median of every measured payload, by its size in bytes."""
        return {payload.size_bytes: payload.median_us for payload in self.payloads}

    @property
    def gather_median_us(self) -> dict[int, float]:
        """Median of every measured all-gather, by the bytes that each rank contributes."""
        return {gather.size_bytes: gather.median_us for gather in self.gathers}

    @property
    def is_complete(self) -> bool:
        """Whether every payload was measured with right data."""
        return self.outcome is Outcome.OK and not self.is_pruned


KeepGoing = Callable[[PayloadMeasurement], bool]
"""Called after every payload; False ends the launch early as pruned."""


class Bench(Protocol):
    """Anything that can measure settings.

    Real GPUs, GPUs shared by several ranks, or a recording.
    """

    @property
    def source(self) -> str:
        """``gpus``, ``shared-gpu`` or ``recording:NAME``; kept with every result."""
        ...

    def launch(
        self,
        settings: Settings,
        requests: Sequence[PayloadRequest],
        *,
        keep_going: KeepGoing | None = None,
    ) -> Launch:
        """Measure ``requests`` in order under ``settings``.

        Never raises for a fault of the settings.
        """
        ...

    def nearest(self, proposal: Settings, tried: Sequence[Settings]) -> Settings | None:
        """Return the settings to measure for a sampler's proposal.

        Real GPUs return the proposal as it is. A recording returns the nearest recorded candidate
        that is not in ``tried``, or None when nothing is left: what was not measured is never
        invented.
        """
        ...

    def baseline_launches(self) -> Sequence[Launch]:
        """Return saved launches of the baseline; empty where fresh ones can be had."""
        ...
