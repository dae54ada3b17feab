"""``nccltune payloads``: what a model and a launch reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nccltune.cli.envelope import Answer
from nccltune.cli.options import json_option, launch_argument, workload_options
from nccltune.cli.tables import fact_grid, heading, indent, number_table
from nccltune.cli.workload import Demand, WorkloadOptions, workload_from_options
from nccltune.payloads.derive import payload_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    from nccltune.payloads.derive import Batch, Workload, WorkloadRow


@click.command(name="payloads")
@workload_options
@launch_argument
@json_option
def command(**options: object) -> Answer:
    """Show every all-reduce of one decode step, with its count, and the guards.

    The model's config.json and the launch decide; without either it is Kimi-K2.5's shape with 2
    steps and 3 draft tokens. A server's launch command can stand after --.
    """
    demand = workload_from_options(WorkloadOptions(**options))  # type: ignore[arg-type]
    return Answer(data=payloads_data(demand), show=lambda: _parts(demand), warnings=demand.doubts)


def payloads_data(demand: Demand) -> dict[str, object]:
    """Lay out a workload for the envelope."""
    workload = demand.workload
    return {
        "workload": workload.name,
        "digest": workload.digest(),
        "tp": demand.tp,
        "decoding": demand.decoding,
        "batches": [_batch(workload, batch) for batch in workload.batches],
        "guards": [
            {
                "bytes": guard.size_bytes,
                "graph_count": guard.graph_count,
                "origin": guard.origin,
            }
            for guard in workload.guards
        ],
    }


def _batch(workload: Workload, batch: Batch) -> Mapping[str, object]:
    scored = workload.scored(batch)
    return {
        "size": batch.size,
        "padded_size": batch.padded_size,
        "use": batch.use,
        "payloads": [
            {
                "bytes": payload.size_bytes,
                "count": payload.count,
                "graph_count": payload.graph_count,
                "origin": payload.origin,
                "is_scored": payload in scored,
            }
            for payload in batch.payloads
        ],
    }


def _parts(demand: Demand) -> Iterator[RenderableType]:
    workload = demand.workload
    facts = [("workload", workload.name)]
    facts += [("decoding", demand.decoding)] if demand.decoding else []
    facts += [("ranks", str(demand.tp))] if demand.tp is not None else []
    yield fact_grid(facts)
    rows = payload_rows(workload)
    yield heading("All-reduces of one decode step", "rare ones are not in the score")
    yield indent(
        number_table(
            ("batch", "padded to", "used", "bytes", "count", "pass", "role"),
            (_cells(row) for row in rows if row.batch is not None),
            words=("pass", "role"),
        )
    )
    guards = [row for row in rows if row.batch is None]
    if guards:
        yield heading("Guards", "must not get slower")
        cells = ([str(row.size_bytes), str(row.graph_count), _origin(row)] for row in guards)
        yield indent(number_table(("bytes", "timed\nin a graph", "pass"), cells, words=("pass",)))


def _cells(row: WorkloadRow) -> list[str]:
    role = "scored" if row.is_scored else "rare"
    return [
        str(row.batch),
        str(row.padded),
        f"{row.use:g}",
        str(row.size_bytes),
        str(row.count),
        _origin(row),
        f"{role}, guard" if row.is_guard else role,
    ]


def _origin(row: WorkloadRow) -> str:
    return row.origin.replace("_", " ").replace("+", ", ")
