"""Which all-reduces one decode step makes, how often, and which others must not get slower.

Pure: numbers in, numbers out. SGLang was read in its releases 0.5.10.post1 to 0.5.23.

One decode step of EAGLE with tensor parallelism; ``b_pad`` is the number of running requests
rounded up to a captured batch size, ``d`` the number of draft tokens:

============  ============  ====================================================================
forward pass  rows          all-reduces
============  ============  ====================================================================
verify        b_pad x d     2 a layer (attention, MLP or experts) + 1 (embedding)
draft extend  b_pad x d     the same for the draft model; with its one layer, 3
draft step    b_pad x topk  3 again, in each of num_steps - 1 steps
============  ============  ====================================================================

Each sums ``rows x hidden size`` activations of two bytes. Without speculation there is one pass of
b_pad rows.

Every pass ends with one all-gather of its logits, to which a rank contributes ``rows x vocabulary /
tp`` values of two bytes, the draft's own vocabulary in draft passes; a draft extend with Kimi's
attention gathers its input layer too. A draft extend gathers all of its ``b_pad x d`` rows, for
SGLang's second speculative worker, the default from 0.5.12.post1 and the only one from
0.5.15.post1, prunes none. The first worker kept one row a request; that is not derived. Left out as
not known: gathers of attention data parallel, a hot token map, broadcasts above temperature 0.
Where NVLink multicast works, a kernel of SGLang's own may carry gathers in NCCL's place.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from nccltune.errors import UsageProblem
from nccltune.payloads.options import check_payload, check_use
from nccltune.payloads.options import parse_batch_option as parse_batch_option
from nccltune.payloads.options import parse_payload_option as parse_payload_option
from nccltune.payloads.options import uses_from_options as uses_from_options
from nccltune.payloads.shapes import KIMI_K25, padded_batch_size
from nccltune.payloads.shapes import ModelShape as ModelShape
from nccltune.payloads.shapes import SpeculationShape as SpeculationShape
from nccltune.payloads.shapes import captured_batch_sizes as captured_batch_sizes
from nccltune.payloads.workload import Batch as Batch
from nccltune.payloads.workload import Gather as Gather
from nccltune.payloads.workload import Guard as Guard
from nccltune.payloads.workload import Payload as Payload
from nccltune.payloads.workload import Workload as Workload
from nccltune.payloads.workload import WorkloadRow as WorkloadRow
from nccltune.payloads.workload import payload_rows as payload_rows
from nccltune.payloads.workload import scored_payloads
from nccltune.payloads.workload import uses as uses

LARGE_PAYLOAD_BYTES = 16 << 20
LARGE_GRAPH_COUNT = 4
"""All-reduces in the graph of a large payload: few, for each is long enough to time by itself."""

DEFAULT_USES: Mapping[int, float] = MappingProxyType({1: 4.0, 2: 2.0, 4: 1.0, 8: 1.0})
"""Batch size -> how often it is used: a host that mostly serves one stream."""

DEFAULT_GUARDS = (
    Guard(14336, KIMI_K25.pass_count, "draft_step"),
    Guard(1376256, KIMI_K25.pass_count, "verify"),  # 32 requests of 3 rows
    Guard(67108864, LARGE_GRAPH_COUNT, "prefill"),
)


def default_workload(uses: Mapping[int, float] | None = None, tp: int = 8) -> Workload:
    """Build the workload for when no model is given: Kimi-K2.5, 2 steps, 3 draft tokens.

    Only all-gathers depend on ``tp``.
    """
    batches = _batches(KIMI_K25, None, SpeculationShape(tp=tp), uses)
    return Workload("kimi-k2.5", batches, _unscored(DEFAULT_GUARDS, batches))


def workload_from_model(
    shape: ModelShape,
    launch: SpeculationShape,
    uses: Mapping[int, float] | None = None,
    *,
    draft: ModelShape | None = None,
    name: str | None = None,
) -> Workload:
    """Derive the all-reduces of every batch size in ``uses``, their all-gathers, and the guards.

    Guards are the smallest draft step (a candidate may win at verify sizes and lose below), the
    largest captured verify pass that is not scored (busy hours), and one prefill chunk (time to
    first token): the settings hold for the whole process, so they meet all three. Without the shape
    of a ``draft`` model it is taken as one layer of the target.

    Raises:
        UsageProblem: tensor parallel size 1, a batch size that the launch never runs, or a payload
            that no GPU can sum.
    """
    if launch.tp == 1:
        raise UsageProblem(
            "tensor parallel size 1 makes no all-reduce: nothing to tune; give --tp 2 or more",
            code="no_all_reduce",
        )
    batches = _batches(shape, draft, launch, uses)
    guards = _unscored(_guards(shape, launch, batches), batches)
    for payload in (one for batch in batches for one in batch.payloads):
        check_payload(payload.size_bytes, payload.count)
    for guard in guards:
        check_payload(guard.size_bytes, 1)
    return Workload(name or shape.source or shape.architecture, batches, guards)


def workload_from_payloads(
    payloads: Iterable[tuple[int, int]], guards: Sequence[Guard] = DEFAULT_GUARDS
) -> Workload:
    """Take (bytes, count) pairs as they are, as one batch; the default guards still hold.

    Counts of the same size add up. A pair that is too rare for the score becomes a guard.
    """
    counts: Counter[int] = Counter()
    for size_bytes, count in payloads:
        check_payload(size_bytes, count)
        counts[size_bytes] += count
    if not counts:
        raise UsageProblem("no payload given: write --payload BYTES:COUNT", code="bad_value")
    pass_count = KIMI_K25.pass_count
    given = tuple(
        Payload(size, count, _graph_count(size, pass_count), "given")
        for size, count in sorted(counts.items())
    )
    batches = (Batch(size=1, padded_size=1, use=1.0, payloads=given),)
    rare = [Guard(one.size_bytes, one.graph_count, "given") for one in given]
    return Workload("given", batches, _unscored((*rare, *guards), batches))


def _batches(
    shape: ModelShape,
    draft: ModelShape | None,
    launch: SpeculationShape,
    uses: Mapping[int, float] | None,
) -> tuple[Batch, ...]:
    """Derive one batch for every size used; SGLang's own limit cuts the default uses short."""
    limit = launch.running_limit
    if uses is None:
        uses = {size: use for size, use in DEFAULT_USES.items() if limit is None or size <= limit}
    if not uses:
        raise _bad("no batch size given: write --batch SIZE:USE")
    for size, use in uses.items():
        check_use(size, use)
        if limit is not None and size > limit:
            raise _bad(
                f"batch size {size}: this launch runs at most {limit} requests at once; "
                "give a smaller --batch or a larger --max-running-requests"
            )
    captured = launch.captured
    return tuple(
        _batch(shape, draft, launch, size, padded_batch_size(size, captured), float(uses[size]))
        for size in sorted(uses)
    )


def _batch(
    shape: ModelShape,
    draft: ModelShape | None,
    launch: SpeculationShape,
    size: int,
    padded: int,
    use: float,
) -> Batch:
    """Sum up the passes of one decode step, merging those of equal size."""
    draft = draft or dataclasses.replace(shape, layer_count=1)
    merged: dict[int, tuple[int, str]] = {}
    for rows, model, repeat, origin in _passes(shape, draft, launch, padded):
        size_bytes, count = model.payload_bytes(rows), model.pass_count * repeat
        if size_bytes in merged:
            count += merged[size_bytes][0]
            origin = f"{merged[size_bytes][1]}+{origin}"
        merged[size_bytes] = (count, origin)
    payloads = tuple(
        Payload(size_bytes, count, _graph_count(size_bytes, shape.pass_count), origin)
        for size_bytes, (count, origin) in merged.items()
    )
    return Batch(size, padded, use, payloads, _gathers(shape, draft, launch, padded))


def _gathers(
    shape: ModelShape, draft: ModelShape, launch: SpeculationShape, padded: int
) -> tuple[Gather, ...]:
    """List the all-gathers of one decode step, merging those of equal size."""
    merged: dict[int, Gather] = {}
    for rows, model, repeat, origin in _passes(shape, draft, launch, padded):
        found = {origin: model.logits_bytes(rows, launch.tp)}
        if origin == "draft_extend":
            found["draft_fc"] = model.fc_bytes(rows, launch.tp)
        for name, size_bytes in found.items():
            if size_bytes is None:
                continue
            known = merged.get(size_bytes, Gather(size_bytes, 0, ""))
            origins = f"{known.origin}+{name}" if known.origin else name
            merged[size_bytes] = Gather(size_bytes, known.count + repeat, origins)
    return tuple(merged.values())


def _passes(
    shape: ModelShape, draft: ModelShape, launch: SpeculationShape, padded: int
) -> list[tuple[int, ModelShape, int, str]]:
    """List the forward passes of one decode step as (rows, model, how many, origin)."""
    if not launch.is_speculative:
        return [(padded, shape, 1, "decode")]
    rows = padded * launch.num_draft_tokens
    passes = [(rows, shape, 1, "verify"), (rows, draft, 1, "draft_extend")]
    if launch.num_steps > 1:
        passes.append((padded * launch.topk, draft, launch.num_steps - 1, "draft_step"))
    return passes


def _guards(shape: ModelShape, launch: SpeculationShape, batches: Sequence[Batch]) -> list[Guard]:
    """List the guards of a launch; see ``workload_from_model`` for what each stands for."""
    scored = {one.size_bytes for batch in batches for one in scored_payloads(batch.payloads)}
    rare = [one for batch in batches for one in batch.payloads if one.size_bytes not in scored]
    smallest = min(rare, key=lambda one: one.size_bytes, default=None)
    guards = []
    if smallest is not None:
        guards.append(Guard(smallest.size_bytes, smallest.graph_count, smallest.origin))
    sizes = launch.captured or ((launch.running_limit,) if launch.running_limit else ())
    verify = [shape.payload_bytes(size * launch.rows_per_request) for size in sizes]
    largest = max((size for size in verify if size not in scored), default=None)
    if largest is not None:
        origin = "verify" if launch.is_speculative else "decode"
        guards.append(Guard(largest, _graph_count(largest, shape.pass_count), origin))
    prefill = shape.payload_bytes(launch.chunked_prefill_size)
    guards.append(Guard(prefill, _graph_count(prefill, shape.pass_count), "prefill"))
    return guards


def _unscored(guards: Iterable[Guard], batches: Sequence[Batch]) -> tuple[Guard, ...]:
    """Drop guards that the score covers already, and second ones of the same size; sort by size."""
    kept: dict[int, Guard] = {}
    scored = {one.size_bytes for batch in batches for one in scored_payloads(batch.payloads)}
    for guard in guards:
        if guard.size_bytes not in scored:
            kept.setdefault(guard.size_bytes, guard)
    return tuple(kept[size] for size in sorted(kept))


def _graph_count(size_bytes: int, pass_count: int) -> int:
    return pass_count if size_bytes < LARGE_PAYLOAD_BYTES else LARGE_GRAPH_COUNT


def _bad(message: str) -> UsageProblem:
    return UsageProblem(message, code="bad_value")
