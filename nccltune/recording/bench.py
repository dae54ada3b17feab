"""A bench that answers from a recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from nccltune.errors import FileError, UsageProblem
from nccltune.measurement import KeepGoing, Launch, Outcome, PayloadRequest, Settings
from nccltune.recording.distance import canonical, distance, tie_break
from nccltune.recording.model import (
    RecordedLaunch,
    RecordedTimes,
    Recording,
    SettingsKey,
    settings_key,
)

_BASELINE: SettingsKey = ()
_HOSTS_FAULT = (Outcome.HOST_BUSY, Outcome.HOST_FAILED)


class RecordingBench:
    """Implements `nccltune.measurement.Bench` on saved launches; nothing is made up in between.

    Settings that were recorded several times answer with the median over their launches. The
    baseline alone answers with one launch after the other, as fresh launches would, and begins
    again after the last.

    Args:
        path: where the recording was read, for messages.
        is_pooled: whether candidates answer with that median; if not, they behave as the baseline
            does.

    Raises:
        FileError: the recording has no launch of the baseline that went well, so nothing can be
            compared.
    """

    def __init__(
        self, recording: Recording, *, path: Path | None = None, is_pooled: bool = True
    ) -> None:
        self.recording = recording
        self._is_pooled = is_pooled
        self._groups = _usable_groups(recording)
        self._canonical = {key: canonical(dict(key)) for key in self._groups if key != _BASELINE}
        self._handed_out: dict[SettingsKey, int] = {}
        if not any(launch.outcome is Outcome.OK for launch in self._groups.get(_BASELINE, [])):
            raise FileError(
                path or Path(recording.name),
                "the recording has no launch of the defaults that went well: record it again",
                code="no_baseline",
            )

    @property
    def source(self) -> str:
        """``recording:NAME``."""
        return f"recording:{self.recording.name}"

    @property
    def candidates(self) -> tuple[Settings, ...]:
        """Distinct settings that can be launched, the baseline aside, in recorded order."""
        return tuple(dict(key) for key in self._canonical)

    def baseline_launches(self) -> list[Launch]:
        """Return every baseline launch that went well: their spread is the noise."""
        recorded = self._groups[_BASELINE]
        return [launch.to_launch() for launch in recorded if launch.outcome is Outcome.OK]

    def launch(
        self,
        settings: Settings,
        requests: Sequence[PayloadRequest],
        *,
        keep_going: KeepGoing | None = None,
    ) -> Launch:
        """Answer with what was recorded under exactly these settings.

        Raises:
            UsageProblem: a requested size was not recorded.
            ValueError: the settings were not recorded; ask `nearest` first.
        """
        self.check_sizes([request.size_bytes for request in requests])
        key = settings_key(settings)
        if key not in self._groups:
            raise ValueError(f"not recorded in {self.recording.name}: {dict(settings)}")
        recorded = self._answer(key)
        return _replay(recorded, requests, keep_going)

    def nearest(self, proposal: Settings, tried: Sequence[Settings]) -> Settings | None:
        """Return the recorded candidate that is nearest to a proposal and was not tried yet.

        Exactly the proposal comes first, if it was recorded; the baseline never comes. None when
        every candidate was tried.
        """
        done = {settings_key(settings) for settings in tried}
        left = [key for key in self._canonical if key not in done]
        if not left:
            return None
        wanted_key = settings_key(proposal)
        wanted = canonical(proposal)

        # Rounded, because sums of the same shares in another order must still be equal.
        ranked = (
            (
                round(distance(wanted, self._canonical[key]), 9),
                key != wanted_key,
                tie_break(proposal, dict(key)),
                key,
            )
            for key in left
        )
        return dict(min(ranked)[-1])

    def check_sizes(self, sizes_bytes: Sequence[int]) -> None:
        """Refuse sizes that were not recorded, before a search begins.

        Raises:
            UsageProblem: names the sizes that were.
        """
        known = self.recording.sizes_bytes
        missing = [size_bytes for size_bytes in sizes_bytes if size_bytes not in known]
        missing.sort()
        if missing:
            raise UsageProblem(
                f"recording {self.recording.name!r} has no payload of {_listed(missing)} bytes, "
                f"only {_listed(known)}: choose among these, or measure on GPUs",
                code="size_not_recorded",
            )

    def _answer(self, key: SettingsKey) -> RecordedLaunch:
        launches = self._groups[key]
        if self._is_pooled and key != _BASELINE:
            return _pool(launches)
        idx = self._handed_out.get(key, 0)
        self._handed_out[key] = idx + 1
        return launches[idx % len(launches)]


def _usable_groups(recording: Recording) -> dict[SettingsKey, list[RecordedLaunch]]:
    """Leave out launches that failed by the host's fault: they say nothing about the settings."""
    groups = {}
    for key, launches in recording.by_settings().items():
        usable = [launch for launch in launches if launch.outcome not in _HOSTS_FAULT]
        if usable:
            groups[key] = usable
    return groups


def _pool(launches: Sequence[RecordedLaunch]) -> RecordedLaunch:
    """Take the median over launches, unless one failed: such settings are not to be trusted."""
    for launch in launches:
        if launch.outcome is not Outcome.OK:
            return launch
    first = launches[0]
    if len(launches) == 1:
        return first
    by_size = [{times.size_bytes: times for times in launch.payloads} for launch in launches]
    pooled = tuple(
        _pool_times([times[payload.size_bytes] for times in by_size]) for payload in first.payloads
    )
    return RecordedLaunch(settings=first.settings, outcome=Outcome.OK, payloads=pooled)


def _pool_times(several: Sequence[RecordedTimes]) -> RecordedTimes:
    return RecordedTimes(
        size_bytes=several[0].size_bytes,
        median_us=median(times.median_us for times in several),
        min_us=_median_if_all([times.min_us for times in several]),
        p10_us=_median_if_all([times.p10_us for times in several]),
        p90_us=_median_if_all([times.p90_us for times in several]),
        samples_us=tuple(sample for times in several for sample in times.samples_us),
    )


def _median_if_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _replay(
    recorded: RecordedLaunch, requests: Sequence[PayloadRequest], keep_going: KeepGoing | None
) -> Launch:
    """Hand out payloads in the order asked for, up to where the caller or a failure ends it."""
    measured = {times.size_bytes: times.to_measurement() for times in recorded.payloads}
    payloads = []
    is_pruned = False
    for request in requests:
        if request.size_bytes not in measured:
            break
        payloads.append(measured[request.size_bytes])
        is_last = len(payloads) == len(requests)
        if keep_going is not None and not keep_going(payloads[-1]) and not is_last:
            is_pruned = True
            break
    whole = recorded.to_launch()
    return Launch(
        settings=whole.settings,
        outcome=whole.outcome,
        payloads=tuple(payloads),
        message=whole.message,
        is_pruned=is_pruned,
        phases_s=whole.phases_s,
        memory_bytes=whole.memory_bytes,
        failed_rank=whole.failed_rank,
        duration_s=whole.duration_s,
    )


def _listed(sizes_bytes: Sequence[int]) -> str:
    return ", ".join(str(size_bytes) for size_bytes in sizes_bytes)
