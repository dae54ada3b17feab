"""What this host's launches vary by, kept from one search for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.recording import RecordingBench
from nccltune.store.noise import Sample, keep_noise, kept_noise, noise_key

if TYPE_CHECKING:
    from nccltune.cli.sources import Source
    from nccltune.cli.workload import Demand
    from nccltune.search.result import SearchResult


def known_noise(source: Source, demand: Demand) -> float | None:
    """Return the spread of a launch's log score that earlier searches of the same saw here."""
    return None if isinstance(source.bench, RecordingBench) else kept_noise(_key(source, demand))


def keep_search_noise(result: SearchResult, source: Source, demand: Demand) -> tuple[str, ...]:
    """Keep what the baselines of a search said of it; returns a warning where that fails."""
    sd, df = result.baseline_noise, result.baseline_count - 1
    if sd is None or df < 1 or isinstance(source.bench, RecordingBench):
        return ()
    try:
        keep_noise(_key(source, demand), sd, df)
    except NccltuneError as error:
        return (f"the noise of this host is not kept for later searches: {error}",)
    return ()


def _key(source: Source, demand: Demand) -> str:
    """Name what was repeated: the defaults on these GPUs, under this base, with these payloads."""
    facts = {"identity": source.identity, "workload": demand.workload.digest()}
    return noise_key(Sample.LAUNCH, facts | {"source": source.bench.source})
