"""Launches as the journal keeps them: plain JSON values, raw samples included."""

from __future__ import annotations

from typing import Any

from nccltune.measurement import Launch, Outcome, PayloadMeasurement


def record_from_launch(launch: Launch) -> dict[str, Any]:
    """Return a launch as JSON values; ``launch_from_record`` is its inverse."""
    return {
        "settings": dict(launch.settings),
        "outcome": launch.outcome.value,
        "message": launch.message,
        "is_pruned": launch.is_pruned,
        "failed_rank": launch.failed_rank,
        "duration_s": launch.duration_s,
        "phases_s": dict(launch.phases_s),
        "memory_bytes": list(launch.memory_bytes),
        "payloads": _times(launch.payloads),
        # Launches of trials time none, and journals stay as they are.
        **({"gathers": _times(launch.gathers)} if launch.gathers else {}),
    }


def launch_from_record(record: dict[str, Any]) -> Launch:
    """Return the launch that a record was made from."""
    return Launch(
        settings=record["settings"],
        outcome=Outcome(record["outcome"]),
        message=record["message"],
        is_pruned=record["is_pruned"],
        failed_rank=record["failed_rank"],
        duration_s=record["duration_s"],
        phases_s=record["phases_s"],
        memory_bytes=tuple(record["memory_bytes"]),
        payloads=_measurements(record["payloads"]),
        gathers=_measurements(record.get("gathers", {})),
    )


def _times(payloads: tuple[PayloadMeasurement, ...]) -> dict[str, Any]:
    return {
        str(payload.size_bytes): {
            "median_us": payload.median_us,
            "p10_us": payload.p10_us,
            "p90_us": payload.p90_us,
            "samples_us": list(payload.samples_us),
            "is_data_ok": payload.is_data_ok,
        }
        for payload in payloads
    }


def _measurements(times: dict[str, Any]) -> tuple[PayloadMeasurement, ...]:
    return tuple(
        PayloadMeasurement(
            size_bytes=int(size),
            median_us=one["median_us"],
            p10_us=one["p10_us"],
            p90_us=one["p90_us"],
            samples_us=tuple(one["samples_us"]),
            is_data_ok=one["is_data_ok"],
        )
        for size, one in times.items()
    )
