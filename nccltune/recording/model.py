"""What a recording holds. Pure data: nothing here touches a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nccltune.envvars import canonical
from nccltune.measurement import Launch, Outcome, PayloadMeasurement, Settings

SettingsKey = tuple[tuple[str, str], ...]
"""Settings as something that can be a dictionary key."""


def settings_key(settings: Settings) -> SettingsKey:
    """Make settings comparable whatever the order they were written in.

    >>> settings_key({"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"})
    (('NCCL_ALGO', 'Ring'), ('NCCL_PROTO', 'LL'))
    """
    return tuple(sorted(settings.items()))


def candidate_key(settings: Settings) -> SettingsKey:
    """Make settings comparable whatever their spelling: equal where all-reduce is the same.

    >>> candidate_key({"NCCL_PROTO": "ll"}) == candidate_key({"NCCL_PROTO": "allreduce:LL"})
    True
    """
    return tuple(canonical(settings).items())


@dataclass(frozen=True, slots=True)
class PayloadShape:
    """One size that every complete launch of a recording measured.

    Attributes:
        size_bytes: bytes that one all-reduce summed, per rank.
        graph_count: all-reduces in the CUDA graph that was timed.
    """

    size_bytes: int
    graph_count: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where the measurements come from, and all that must be known to compare them with others.

    Attributes:
        origin: who or what made them, in words.
        gpus: count, model and links.
        recorded_at: ISO 8601 moment of the start; a date alone where the moment was not kept.
        method: how they were timed, in words.
        base_environment: NCCL variables under which the baseline and every candidate ran.
        command: the command that made the recording; None when it was not made by this tool.
        tool_version: version of this tool that made it; None likewise.
        fingerprint: host facts, as a profile keeps them; None where they were not taken.
    """

    origin: str
    gpus: str
    driver: str | None
    nccl: str | None
    torch: str | None
    recorded_at: str
    method: str
    base_environment: Mapping[str, str]
    world_size: int
    payloads: tuple[PayloadShape, ...]
    command: str | None = None
    tool_version: str | None = None
    fingerprint: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """Times of one payload in one launch, in us per all-reduce.

    ``samples_us`` is empty where only a summary was kept; otherwise the summary is derived from it.
    """

    size_bytes: int
    median_us: float
    min_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    samples_us: tuple[float, ...] = ()
    is_data_ok: bool = True

    @classmethod
    def from_samples(
        cls, size_bytes: int, samples_us: Sequence[float], *, is_data_ok: bool = True
    ) -> RecordedTimes:
        """Derive the summary from raw samples."""
        return cls.from_measurement(
            PayloadMeasurement.from_samples(size_bytes, samples_us, is_data_ok=is_data_ok)
        )

    @classmethod
    def from_measurement(cls, measured: PayloadMeasurement) -> RecordedTimes:
        """Keep what a bench measured.

        Raises:
            ValueError: a time is not a positive number, and a file with it would be refused.
        """
        times_us = (measured.median_us, *measured.samples_us)
        if not all(math.isfinite(time_us) and time_us > 0.0 for time_us in times_us):
            raise ValueError(f"a time of payload {measured.size_bytes} is not a positive number")
        return cls(
            size_bytes=measured.size_bytes,
            median_us=measured.median_us,
            min_us=min(measured.samples_us) if measured.samples_us else None,
            p10_us=measured.p10_us,
            p90_us=measured.p90_us,
            samples_us=measured.samples_us,
            is_data_ok=measured.is_data_ok,
        )

    def to_measurement(self) -> PayloadMeasurement:
        """Answer as a bench would have."""
        return PayloadMeasurement(
            size_bytes=self.size_bytes,
            median_us=self.median_us,
            p10_us=self.p10_us,
            p90_us=self.p90_us,
            samples_us=self.samples_us,
            is_data_ok=self.is_data_ok,
        )


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch as it went, payloads in the order they were measured; shorter when it failed."""

    settings: Settings
    outcome: Outcome
    payloads: tuple[RecordedTimes, ...] = ()
    message: str = ""
    started_at: str | None = None
    duration_s: float | None = None
    failed_rank: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: tuple[int, ...] = ()

    @classmethod
    def from_launch(cls, launch: Launch, *, started_at: str | None = None) -> RecordedLaunch:
        """Keep what a bench measured.

        Raises:
            ValueError: the launch was pruned; half a launch says less than its settings deserve.
        """
        if launch.is_pruned:
            raise ValueError("a pruned launch cannot be recorded")
        return cls(
            settings=dict(launch.settings),
            outcome=launch.outcome,
            payloads=tuple(RecordedTimes.from_measurement(times) for times in launch.payloads),
            message=launch.message,
            started_at=started_at,
            duration_s=launch.duration_s or None,
            failed_rank=launch.failed_rank,
            phases_s=dict(launch.phases_s),
            memory_bytes=launch.memory_bytes,
        )

    def to_launch(self) -> Launch:
        """Answer as the bench did that made the recording."""
        return Launch(
            settings=self.settings,
            outcome=self.outcome,
            payloads=tuple(times.to_measurement() for times in self.payloads),
            message=self.message,
            phases_s=self.phases_s,
            memory_bytes=self.memory_bytes,
            failed_rank=self.failed_rank,
            duration_s=self.duration_s or 0.0,
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """Every launch of one designed set of candidates on one host, in the order they were made."""

    name: str
    manifest: Manifest
    launches: tuple[RecordedLaunch, ...]

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Sizes that every complete launch measured."""
        return tuple(payload.size_bytes for payload in self.manifest.payloads)

    @property
    def candidate_count(self) -> int:
        """How many candidates were launched, each counted once whatever its spelling."""
        return len({candidate_key(each.settings) for each in self.launches if each.settings})

    def by_settings(self) -> dict[SettingsKey, list[RecordedLaunch]]:
        """Group launches by exact settings, in recorded order; the baseline's key is ``()``."""
        groups: dict[SettingsKey, list[RecordedLaunch]] = {}
        for launch in self.launches:
            groups.setdefault(settings_key(launch.settings), []).append(launch)
        return groups


def find_gap(launch: RecordedLaunch, manifest: Manifest) -> str:
    """Say which payload of its recording a launch lacks, or has too much; empty when none.

    Only a launch that failed may be short.
    """
    expected = [shape.size_bytes for shape in manifest.payloads]
    measured = [times.size_bytes for times in launch.payloads]
    foreign = [size_bytes for size_bytes in measured if size_bytes not in expected]
    missing = [size_bytes for size_bytes in expected if size_bytes not in measured]
    if foreign:
        return f"has payload {foreign[0]}, which the manifest does not name"
    if len(set(measured)) < len(measured):
        return "has a payload twice"
    if launch.outcome is not Outcome.OK:
        return ""
    if missing:
        return f"is ok but lacks payload {missing[0]}"
    if not all(times.is_data_ok for times in launch.payloads):
        return "is ok although a payload has wrong data"
    return ""
