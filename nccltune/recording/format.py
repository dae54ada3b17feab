"""Writes the file format ``nccltune.recording/1``, a launch a line so that complaints can name it.

History: 1 is the first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.recording.model import Manifest, RecordedLaunch, RecordedTimes, Recording

SCHEMA = "nccltune.recording/1"


def format_recording(recording: Recording) -> str:
    """Write a recording so that `parse_recording` gives the same one back."""
    document = head_document(recording.name, recording.manifest)
    head = json.dumps(document, indent=1, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join("  " + format_launch(launch) for launch in recording.launches)
    return f'{head},\n "launches": [\n{lines}\n ]\n}}\n'


def head_document(name: str, manifest: Manifest) -> dict[str, object]:
    """Everything but the launches, as it is written."""
    written: dict[str, object] = {
        "origin": manifest.origin,
        "command": manifest.command,
        "tool_version": manifest.tool_version,
        "gpus": manifest.gpus,
        "driver": manifest.driver,
        "nccl": manifest.nccl,
        "torch": manifest.torch,
        "recorded_at": manifest.recorded_at,
        "method": manifest.method,
        "base_environment": dict(manifest.base_environment),
        "world_size": manifest.world_size,
        "payloads": [
            {"size_bytes": shape.size_bytes, "graph_count": shape.graph_count}
            for shape in manifest.payloads
        ],
    }
    if manifest.fingerprint is not None:
        written["fingerprint"] = dict(manifest.fingerprint)
    return {"schema": SCHEMA, "name": name, "manifest": written}


def format_launch(launch: RecordedLaunch) -> str:
    """Write one launch on one line; what is not known is left out."""
    written: dict[str, object] = {
        "settings": dict(launch.settings),
        "outcome": launch.outcome.value,
        "payloads": {str(times.size_bytes): _times_document(times) for times in launch.payloads},
    }
    optional = {
        "message": launch.message or None,
        "started_at": launch.started_at,
        "duration_s": launch.duration_s,
        "failed_rank": launch.failed_rank,
        "phases_s": dict(launch.phases_s) or None,
        "memory_bytes": list(launch.memory_bytes) or None,
    }
    written.update({key: value for key, value in optional.items() if value is not None})
    return json.dumps(written, separators=(",", ":"), allow_nan=False)


def _times_document(times: RecordedTimes) -> dict[str, object]:
    written: dict[str, object] = {}
    if times.samples_us:
        written["samples_us"] = list(times.samples_us)
    else:
        summary = {
            "median_us": times.median_us,
            "min_us": times.min_us,
            "p10_us": times.p10_us,
            "p90_us": times.p90_us,
        }
        written.update({key: value for key, value in summary.items() if value is not None})
    if not times.is_data_ok:
        written["is_data_ok"] = False
    return written
