"""Convert a recording of the exploratory sweep of 2026-11-29 to this project's format.

Kept for the provenance of ``profiles/recordings/h200-2x-*.json``; nothing else needs it. Numbers
and their order are taken over as they are.

    python scripts/convert_recordings.py SWEEP.json OUTPUT.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nccltune.measurement import Outcome
from nccltune.recording import (
    Manifest,
    PayloadShape,
    RecordedLaunch,
    RecordedTimes,
    Recording,
    format_recording,
    parse_recording,
    save_recording,
)

_ORIGIN = (
    "exploratory sweep on 2x NVIDIA H200, 2026-11-29, not made by this tool; "
    "only medians, minima and 90th percentiles were kept"
)
# The sweep's method, in words in its manifest: 122 all-reduces a graph, 4 for 64 MiB.
_GRAPH_COUNT = 122
_GRAPH_COUNT_BY_SIZE = {67108864: 4}


def convert(sweep: Mapping[str, Any]) -> Recording:
    """Take over every launch of the sweep, in its order."""
    return Recording(
        name=sweep["name"],
        manifest=_convert_manifest(sweep),
        launches=tuple(_convert_launch(launch) for launch in sweep["candidates"]),
    )


def _convert_manifest(sweep: Mapping[str, Any]) -> Manifest:
    source = sweep["manifest"]
    gpus, _, driver = source["gpus"].partition(", driver ")
    count = re.match(r"(\d+)x ", gpus)
    if count is None:
        raise SystemExit(f"cannot read the number of GPUs from {gpus!r}")
    sizes = [int(size) for size in sweep["candidates"][0]["us"]]
    return Manifest(
        origin=_ORIGIN,
        gpus=gpus,
        driver=driver,
        nccl=source["nccl"],
        torch=source["torch"],
        recorded_at=source["date"],
        method=source["method"],
        base_environment=source["base_environment"],
        world_size=int(count.group(1)),
        payloads=tuple(
            PayloadShape(size, _GRAPH_COUNT_BY_SIZE.get(size, _GRAPH_COUNT)) for size in sizes
        ),
    )


def _convert_launch(launch: Mapping[str, Any]) -> RecordedLaunch:
    payloads = tuple(
        RecordedTimes(
            size_bytes=int(size),
            median_us=times["median"],
            min_us=times["min"],
            p90_us=times["p90"],
        )
        for size, times in launch["us"].items()
    )
    return RecordedLaunch(launch["settings"], Outcome(launch["outcome"]), payloads)


def main() -> None:
    """Convert one file, and refuse to write what would not be read back the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    recording = convert(json.loads(options.sweep.read_text(encoding="utf-8")))
    if parse_recording(format_recording(recording), options.output) != recording:
        raise SystemExit(f"{options.sweep}: does not survive the conversion")
    save_recording(recording, options.output)


if __name__ == "__main__":
    main()
