"""What a search measures: payloads by batch size with their counts, guards, and the table of both.

All-gathers stand beside them: they follow the same settings, and are timed once for the winner.

Pure data; ``nccltune.payloads.derive`` derives it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SCORED_SHARE = 0.03
"""Payloads that together make up less than this share of a batch's all-reduces are not scored.

In the default workload that is the draft step: 3 of 129. Their time is lost in the noise of the
rest, so they are guarded instead."""

LARGE_GATHER_BYTES = 1 << 20
GATHER_GRAPH_COUNT = 16
LARGE_GATHER_GRAPH_COUNT = 4
"""All-gathers in the graph that times them: enough to hide its start, few enough for milliseconds
a size."""


@dataclass(frozen=True, slots=True)
class Payload:
    """One all-reduce size of a decode step.

    Attributes:
        count: all-reduces of this size in one decode step.
        graph_count: all-reduces to put in the graph that times it.
        origin: ``verify``, ``draft_extend``, ``draft_step``, ``decode`` (no speculation) or
            ``given``; joined with ``+`` where several passes have the same size.
    """

    size_bytes: int
    count: int
    graph_count: int
    origin: str


@dataclass(frozen=True, slots=True)
class Guard:
    """A payload that is not scored and must not get slower.

    Attributes:
        origin: ``draft_step``, ``verify``, ``decode``, ``prefill`` or ``given``.
    """

    size_bytes: int
    graph_count: int
    origin: str


@dataclass(frozen=True, slots=True)
class Gather:
    """One all-gather size of a decode step; neither scored nor guarded.

    Attributes:
        size_bytes: bytes that each rank contributes.
        count: all-gathers of this size in one decode step.
        origin: as of a payload; ``draft_fc`` is the sharded input layer of a draft.
    """

    size_bytes: int
    count: int
    origin: str

    @property
    def graph_count(self) -> int:
        """All-gathers to put in the graph that times it."""
        is_large = self.size_bytes >= LARGE_GATHER_BYTES
        return LARGE_GATHER_GRAPH_COUNT if is_large else GATHER_GRAPH_COUNT


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch size, the captured size it is padded to, how often it is used, what it exchanges.

    ``gathers`` is empty where they are not known.
    """

    size: int
    padded_size: int
    use: float
    payloads: tuple[Payload, ...]
    gathers: tuple[Gather, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything a search measures: batches with their payloads, and guards."""

    name: str
    batches: tuple[Batch, ...]
    guards: tuple[Guard, ...]

    def digest(self) -> str:
        """Identify what is scored and how it is weighed; names, origins, gathers do not matter."""
        content = {
            "batches": [
                [float(batch.use), [[p.size_bytes, p.count, p.graph_count] for p in batch.payloads]]
                for batch in self.batches
            ],
            "guards": [[guard.size_bytes, guard.graph_count] for guard in self.guards],
        }
        canonical = json.dumps(content, separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def scored(self, batch: Batch) -> tuple[Payload, ...]:
        """Return the payloads that make the score: all but the rarest, see ``MIN_SCORED_SHARE``."""
        return scored_payloads(batch.payloads)


def scored_payloads(payloads: Sequence[Payload]) -> tuple[Payload, ...]:
    """Leave out the rarest payloads, as many as together stay below ``MIN_SCORED_SHARE``."""
    limit = MIN_SCORED_SHARE * sum(payload.count for payload in payloads)
    left_out, left_out_count = set(), 0
    for payload in sorted(payloads, key=lambda one: (one.count, one.size_bytes)):
        left_out_count += payload.count
        if left_out_count >= limit:
            break
        left_out.add(payload.size_bytes)
    return tuple(payload for payload in payloads if payload.size_bytes not in left_out)


def uses(workload: Workload) -> dict[int, float]:
    """Return how often each batch size is used, as ``workload_from_model`` takes it."""
    return {batch.size: batch.use for batch in workload.batches}


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One line of the payload table; a guard outside the batches has no batch, use or count."""

    batch: int | None
    padded: int | None
    use: float | None
    size_bytes: int
    count: int | None
    graph_count: int
    origin: str
    is_scored: bool
    is_guard: bool


def payload_rows(workload: Workload) -> list[WorkloadRow]:
    """List every payload of every batch, then the guards that are in none of them."""
    guarded = {guard.size_bytes for guard in workload.guards}
    rows = [
        WorkloadRow(
            batch=batch.size,
            padded=batch.padded_size,
            use=batch.use,
            size_bytes=payload.size_bytes,
            count=payload.count,
            graph_count=payload.graph_count,
            origin=payload.origin,
            is_scored=payload in workload.scored(batch),
            is_guard=payload.size_bytes in guarded,
        )
        for batch in workload.batches
        for payload in batch.payloads
    ]
    shown = {row.size_bytes for row in rows}
    return rows + [_guard_row(one) for one in workload.guards if one.size_bytes not in shown]


def _guard_row(guard: Guard) -> WorkloadRow:
    return WorkloadRow(
        batch=None,
        padded=None,
        use=None,
        size_bytes=guard.size_bytes,
        count=None,
        graph_count=guard.graph_count,
        origin=guard.origin,
        is_scored=False,
        is_guard=True,
    )
