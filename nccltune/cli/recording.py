"""``nccltune recording``: list, show and make recordings."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from nccltune.cli.envelope import Answer
from nccltune.cli.lazy import LazyGroup, Verb
from nccltune.cli.options import json_option
from nccltune.cli.tables import fact_grid, heading, indent, number_table
from nccltune.cli.words import format_counts, format_settings, format_us
from nccltune.errors import NccltuneError
from nccltune.measurement import Outcome, quantile
from nccltune.recording import FoundRecording, Recording, find_recording, list_recordings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType


@click.group(
    name="recording",
    cls=LazyGroup,
    verbs={
        "list": Verb(
            __name__, "List recordings, shipped ones and those made here.", "list_command"
        ),
        "show": Verb(__name__, "Show what one recording holds.", "show_command"),
        "make": Verb(
            "nccltune.cli.recording_make", "Make one on this host's GPUs.", "make_command"
        ),
    },
)
def command() -> None:
    """List, show and make recordings of real GPUs."""


@click.command(name="list")
@json_option
def list_command() -> Answer:
    """List the recordings that are shipped or were made here."""
    rows = [_list_row(found) for found in list_recordings()]
    return Answer(
        data={"recordings": rows},
        show=lambda: _list_parts(rows),
        warnings=tuple(str(row["problem"]) for row in rows if row["problem"]),
    )


def _list_row(found: FoundRecording) -> Mapping[str, object]:
    row: dict[str, object] = {
        "name": found.name,
        "where": found.where,
        "path": str(found.path),
        "gpus": None,
        "base_environment": None,
        "launch_count": None,
        "candidate_count": None,
        "problem": "",
    }
    try:
        recording, _ = find_recording(str(found.path))
    except NccltuneError as error:
        return {**row, "problem": str(error)}
    return {
        **row,
        "gpus": recording.manifest.gpus,
        "base_environment": dict(recording.manifest.base_environment),
        "launch_count": len(recording.launches),
        "candidate_count": recording.candidate_count,
    }


def _list_parts(rows: list[Mapping[str, object]]) -> Iterator[RenderableType]:
    if not rows:
        yield "No recordings. Make one with: nccltune recording make --name NAME"
        return
    # GPUs that are linked alike may have been kept from using it: the variables tell.
    names = ("name", "candidates", "launches", "where", "GPUs", "always set")
    yield number_table(
        names,
        (
            [
                str(row["name"]),
                _or_dash(row["candidate_count"]),
                _or_dash(row["launch_count"]),
                str(row["where"]),
                str(row["gpus"] or "unreadable"),
                _environment_cell(row["base_environment"]),
            ]
            for row in rows
        ),
        words=("name", "where", "GPUs", "always set"),
    )


def _environment_cell(environment: object) -> str:
    return format_settings(environment) if isinstance(environment, dict) and environment else "-"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


@click.command(name="show")
@click.argument("name", metavar="NAME|FILE")
@json_option
def show_command(name: str) -> Answer:
    """Show what one recording holds and how much its defaults vary."""
    recording, path = find_recording(name)
    data = _show_data(recording) | {"path": str(path)}
    return Answer(data=data, show=lambda: _show_parts(recording, str(path)))


def _show_data(recording: Recording) -> dict[str, object]:
    manifest = recording.manifest
    return {
        "name": recording.name,
        "origin": manifest.origin,
        "gpus": manifest.gpus,
        "driver": manifest.driver,
        "nccl": manifest.nccl,
        "torch": manifest.torch,
        "recorded_at": manifest.recorded_at,
        "method": manifest.method,
        "world_size": manifest.world_size,
        "base_environment": dict(manifest.base_environment),
        "launch_count": len(recording.launches),
        "candidate_count": recording.candidate_count,
        "outcome_counts": {str(name): count for name, count in _outcomes(recording).items()},
        "payloads": [
            {
                "bytes": payload.size_bytes,
                "graph_count": payload.graph_count,
                "baseline_medians_us": _baseline_medians_us(recording, payload.size_bytes),
            }
            for payload in manifest.payloads
        ],
    }


def _outcomes(recording: Recording) -> Counter[Outcome]:
    return Counter(launch.outcome for launch in recording.launches)


def _baseline_medians_us(recording: Recording, size_bytes: int) -> list[float]:
    return sorted(
        times.median_us
        for launch in recording.by_settings().get((), [])
        for times in launch.payloads
        if times.size_bytes == size_bytes
    )


def _show_parts(recording: Recording, path: str) -> Iterator[RenderableType]:
    manifest = recording.manifest
    yield heading(recording.name)
    yield fact_grid(
        (
            ("GPUs", manifest.gpus),
            ("origin", manifest.origin),
            ("recorded", manifest.recorded_at),
            ("versions", _versions(recording)),
            ("method", manifest.method),
            ("always set", format_settings(manifest.base_environment)),
            ("candidates", f"{recording.candidate_count}"),
            ("launches", f"{len(recording.launches)} ({format_counts(_outcomes(recording))})"),
        )
    )
    yield heading("Defaults", "medians of fresh launches, in us of one all-reduce")
    yield indent(
        number_table(
            ("bytes", "launches", "lowest\nus", "median\nus", "highest\nus"),
            (
                [str(payload.size_bytes), *_spread_cells(recording, payload.size_bytes)]
                for payload in manifest.payloads
            ),
        )
    )
    yield heading("File")
    yield f"  {path}"


def _versions(recording: Recording) -> str:
    manifest = recording.manifest
    named = {"NCCL": manifest.nccl, "torch": manifest.torch, "driver": manifest.driver}
    return ", ".join(f"{name} {version or 'unknown'}" for name, version in named.items())


def _spread_cells(recording: Recording, size_bytes: int) -> list[str]:
    medians_us = _baseline_medians_us(recording, size_bytes)
    if not medians_us:
        return ["0", "-", "-", "-"]
    ends = (medians_us[0], quantile(medians_us, 0.5), medians_us[-1])
    return [str(len(medians_us)), *(format_us(time_us) for time_us in ends)]
