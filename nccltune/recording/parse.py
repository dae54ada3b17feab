"""Reads the file format ``nccltune.recording/1``; whatever is doubtful is refused."""

from __future__ import annotations

import re
from pathlib import Path

from nccltune.jsontext import JsonText, parse_json
from nccltune.measurement import Outcome
from nccltune.recording.format import SCHEMA
from nccltune.recording.model import (
    Manifest,
    PayloadShape,
    RecordedLaunch,
    RecordedTimes,
    Recording,
    find_gap,
)
from nccltune.recording.reading import ObjectReader

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_SIZE = re.compile(r"[1-9][0-9]{0,17}")


def parse_recording(text: str, path: Path) -> Recording:
    """Read a recording, refusing whatever could be mistaken for a measurement.

    Raises:
        FileError: the file is truncated, of another schema, or holds a value that cannot be; names
            the line.
    """
    document = parse_json(text, path)
    reader = ObjectReader(document, document.data, "the recording")
    check_schema(reader, SCHEMA)
    name, manifest = parse_head(reader, document)
    raw_launches = reader.items("launches")
    reader.finish()
    launches = [
        parse_launch(document, raw, manifest, "launches", idx)
        for idx, raw in enumerate(raw_launches)
    ]
    return Recording(name=name, manifest=manifest, launches=tuple(launches))


def check_schema(reader: ObjectReader, expected: str) -> None:
    """Refuse another kind or version of file before anything else in it is looked at.

    Raises:
        FileError: usually a file made by a newer version of this tool.
    """
    schema = reader.text("schema")
    if schema != expected:
        raise reader.problem(f"has the schema {schema!r}, only {expected!r} can be read", "schema")


def parse_head(reader: ObjectReader, document: JsonText, *place: str | int) -> tuple[str, Manifest]:
    """Read name and manifest, in a recording as in its journal.

    Raises:
        FileError: a key is missing or its value is of the wrong kind.
    """
    name = reader.text("name")
    if not is_name(name):
        reason = f"is named {name!r}: small letters, digits, '.', '_' and '-' only"
        raise reader.problem(reason, "name")
    where = (*place, "manifest")
    raw = ObjectReader(document, reader.take("manifest"), "the manifest", *where)
    manifest = Manifest(
        origin=raw.text("origin"),
        command=raw.optional_text("command"),
        tool_version=raw.optional_text("tool_version"),
        gpus=raw.text("gpus"),
        driver=raw.optional_text("driver"),
        nccl=raw.optional_text("nccl"),
        torch=raw.optional_text("torch"),
        recorded_at=raw.moment("recorded_at"),
        method=raw.text("method"),
        base_environment=raw.texts("base_environment"),
        world_size=raw.count("world_size", minimum=2),
        payloads=_parse_shapes(document, raw, *where),
        fingerprint=raw.mapping("fingerprint") if raw.has("fingerprint") else None,
    )
    raw.finish()
    return name, manifest


def is_name(name: str) -> bool:
    """Say whether a recording may be called so; such a name is also a file name and no path."""
    return _NAME.fullmatch(name) is not None


def parse_launch(
    document: JsonText, value: object, manifest: Manifest, *place: str | int
) -> RecordedLaunch:
    """Read the launch that stands at a place of a document.

    Raises:
        FileError: also when a launch that went well lacks a payload of the manifest.
    """
    raw = ObjectReader(document, value, "the launch", *place)
    launch = RecordedLaunch(
        settings=raw.texts("settings"),
        outcome=_parse_outcome(raw),
        payloads=_parse_payloads(document, raw, *place),
        message=raw.optional_text("message") or "",
        started_at=raw.moment("started_at") if raw.has("started_at") else None,
        duration_s=raw.number("duration_s") if raw.has("duration_s") else None,
        failed_rank=raw.count("failed_rank", minimum=0) if raw.has("failed_rank") else None,
        phases_s=_parse_phases(document, raw, *place),
        memory_bytes=_parse_memory(raw),
    )
    raw.finish()
    if gap := find_gap(launch, manifest):
        raise raw.problem(gap, "payloads")
    return launch


def _parse_shapes(
    document: JsonText, manifest: ObjectReader, *place: str | int
) -> tuple[PayloadShape, ...]:
    shapes = []
    for idx, value in enumerate(manifest.items("payloads")):
        where = (*place, "payloads", idx)
        raw = ObjectReader(document, value, "a payload of the manifest", *where)
        shapes.append(PayloadShape(raw.count("size_bytes"), raw.count("graph_count")))
        raw.finish()
    sizes = [shape.size_bytes for shape in shapes]
    if not sizes or len(set(sizes)) < len(sizes):
        reason = f"must name at least one payload, and none twice: {sizes}"
        raise manifest.problem(reason, "payloads")
    return tuple(shapes)


def _parse_outcome(launch: ObjectReader) -> Outcome:
    text = launch.text("outcome")
    try:
        return Outcome(text)
    except ValueError:
        reason = f"has the unknown outcome {text!r}; known are {', '.join(Outcome)}"
        raise launch.problem(reason, "outcome") from None


def _parse_payloads(
    document: JsonText, launch: ObjectReader, *place: str | int
) -> tuple[RecordedTimes, ...]:
    payloads = []
    for key, value in launch.mapping("payloads").items():
        if not _SIZE.fullmatch(key):
            reason = f"has a payload {key!r}: a payload's key is its size in bytes"
            raise launch.problem(reason, "payloads", key)
        raw = ObjectReader(document, value, f"payload {key}", *place, "payloads", key)
        payloads.append(_parse_times(int(key), raw))
    return tuple(payloads)


def _parse_times(size_bytes: int, raw: ObjectReader) -> RecordedTimes:
    is_data_ok = raw.flag("is_data_ok") if raw.has("is_data_ok") else True
    if raw.has("samples_us"):
        samples_us = raw.numbers("samples_us")
        raw.finish()
        return RecordedTimes.from_samples(size_bytes, samples_us, is_data_ok=is_data_ok)
    times = RecordedTimes(
        size_bytes=size_bytes,
        median_us=raw.number("median_us"),
        min_us=raw.number("min_us") if raw.has("min_us") else None,
        p10_us=raw.number("p10_us") if raw.has("p10_us") else None,
        p90_us=raw.number("p90_us") if raw.has("p90_us") else None,
        is_data_ok=is_data_ok,
    )
    raw.finish()
    every = (times.min_us, times.p10_us, times.median_us, times.p90_us)
    known = [time_us for time_us in every if time_us is not None]
    if known != sorted(known):
        raise raw.problem(f"has minimum, p10, median and p90 that do not ascend: {known}")
    return times


def _parse_phases(document: JsonText, launch: ObjectReader, *place: str | int) -> dict[str, float]:
    if not launch.has("phases_s"):
        return {}
    phases = launch.mapping("phases_s")
    raw = ObjectReader(document, phases, "'phases_s'", *place, "phases_s")
    return {name: raw.number(name) for name in phases}


def _parse_memory(launch: ObjectReader) -> tuple[int, ...]:
    if not launch.has("memory_bytes"):
        return ()
    return tuple(int(value) for value in launch.numbers("memory_bytes"))
