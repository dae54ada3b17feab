"""Where measurements come from: this host's GPUs, one of them shared, or a recording."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nccltune.bench.host_lock import LOCK_NAME
from nccltune.bench.session import BenchOptions, Session, open_session
from nccltune.cli.launch_path import has_no_gpu, launch_environment
from nccltune.cli.workload import Demand, WorkloadOptions, workload_from_options
from nccltune.errors import HostError, NccltuneError, UsageProblem
from nccltune.host.hardware import read_gpus
from nccltune.host.launch_gpus import gpus_of_launch
from nccltune.paths import state_dir
from nccltune.recording import RecordingBench, candidate_key, find_recording
from nccltune.search.journal import search_lock
from nccltune.search.objective import Objective
from nccltune.search.space import HostFacts, facts_of_recording
from nccltune.sglang.argv import environ_at_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from nccltune.measurement import Bench, Settings
    from nccltune.recording import Recording


@dataclass(frozen=True, slots=True)
class Source:
    """A bench that is ready, and what is known of where it measures.

    Attributes:
        place: for names of profiles: ``2x-h200``, or the recording's name.
        facts: what the space of a search depends on.
        identity: what must be equal for results to be compared.
        pinned: variables that hold in every launch and are not searched.
        fingerprint: host facts for a profile; None where they are not known.
        gpu_memory_bytes: of the smallest GPU in use; None where it is not known.
    """

    bench: Bench
    place: str
    facts: HostFacts
    identity: Mapping[str, object] = field(default_factory=dict)
    pinned: Settings = field(default_factory=dict)
    fingerprint: Mapping[str, object] | None = None
    warnings: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None


def study_path(name: str) -> Path:
    """Return where the trials of a search are kept."""
    return state_dir() / "studies" / f"{name}.journal"


def check_idle() -> None:
    """Refuse to start anything, rank processes above all, beside a search that is measuring.

    Raises:
        BusyError: a search runs on this host.
        FileError: the state folder cannot be used.
    """
    with search_lock(study_path("any").parent / LOCK_NAME):
        return


def demand_here(asked: WorkloadOptions, *, is_shared: bool) -> Demand:
    """Build the workload to measure here: where nobody said how many ranks, one a visible GPU.

    GPUs that cannot be used are no matter yet; who opens them hears of it.

    Raises:
        UsageProblem, FileError: as for ``workload_from_options``.
    """
    if asked.tp is None and not asked.launch and not is_shared:
        with suppress(NccltuneError):
            count = len(gpus_of_launch(read_gpus(), os.environ, None, None))
            asked = replace(asked, tp=count)
    return workload_from_options(asked)


def choose_recording(recording: str | None, fallback: str | None) -> tuple[str | None, str]:
    """Return the recording to answer from, and what to say loudly about it.

    A fallback counts only on a host that has fewer GPUs than an all-reduce needs; GPUs with a
    problem stay a problem.

    Raises:
        HostError: there are GPUs, and they cannot be used.
    """
    if recording is not None or fallback is None:
        return recording, ""
    found = "NO NVIDIA GPU"
    try:
        hardware = read_gpus()
        if len(hardware.gpus) > 1 or hardware.problems:
            return None, ""
        if hardware.gpus:
            found = "ONLY ONE NVIDIA GPU"
    except HostError as error:
        if not has_no_gpu(error):
            raise
    return fallback, (
        f"{found} ON THIS HOST: searching {fallback} instead, a recording of another host's "
        "GPUs; what is found holds for those, not for this host"
    )


def narrow_to_recording(name: str, demand: Demand) -> Demand:
    """Leave out guards that a recording does not hold, and say so; a score cannot be narrowed.

    Raises:
        UsageProblem: no such recording.
        FileError: the recording cannot be used.
    """
    recording, _ = find_recording(name)
    guards = demand.workload.guards
    kept = tuple(guard for guard in guards if guard.size_bytes in recording.sizes_bytes)
    if kept == guards:
        return demand
    missing = ", ".join(f"{guard.size_bytes} B" for guard in guards if guard not in kept)
    doubt = f"{recording.name} holds no guard of {missing}: nothing is known of these sizes"
    return replace(
        demand,
        workload=replace(demand.workload, guards=kept),
        doubts=(*demand.doubts, doubt),
    )


def open_recording(name: str, demand: Demand) -> Source:
    """Answer from a recording.

    Raises:
        UsageProblem: no such recording, or a payload that was not recorded.
        FileError: the recording cannot be used.
    """
    recording, path = find_recording(name)
    bench = RecordingBench(recording, path=path)
    bench.check_sizes([each.size_bytes for each in Objective(demand.workload).requests])
    source = source_from_recording(recording, bench, path)
    rank_count = recording.manifest.world_size
    if demand.tp in (None, rank_count):
        return source
    warning = (
        f"tensor parallel size {demand.tp}: {recording.name} was measured with {rank_count} ranks, "
        f"and what is found holds for {rank_count}"
    )
    return replace(source, warnings=(warning,))


def source_from_recording(recording: Recording, bench: RecordingBench, path: Path) -> Source:
    """Describe a recording as a source."""
    manifest = recording.manifest
    return Source(
        bench=bench,
        place=recording.name,
        facts=facts_of_recording(manifest),
        identity={"recording": path.name, "recorded_launches": len(recording.launches)},
        pinned=dict(manifest.base_environment),
        fingerprint=manifest.fingerprint,
    )


@contextmanager
def open_gpus(options: BenchOptions, demand: Demand) -> Iterator[tuple[Source, Session]]:
    """Start a bench on this host's GPUs under what SGLang would set for the launch.

    Raises:
        HostError: these GPUs cannot be used.
        BusyError: somebody else computes on them.
        RankError: rank processes cannot be started.
    """
    check_idle()
    yielding, forced = launch_environment(demand)
    command = demand.command
    given = os.environ if command is None else environ_at_server(command.argv, os.environ)
    environ = {name: value for name, value in given.items() if name not in forced}
    requests = Objective(demand.workload, is_shared_gpu=options.is_shared).requests
    base = {**yielding, **forced}
    with open_session(options, base, requests, environ, command=command) as session:
        yield _source_from_session(session, forced, is_shared=options.is_shared), session


def _source_from_session(session: Session, forced: Mapping[str, str], *, is_shared: bool) -> Source:
    report = session.baseline_report
    # As they really ran: multicast stays off, whatever the launch forces.
    nccl_forced = {name: session.base[name] for name in forced if name.startswith("NCCL_")}
    return Source(
        bench=session.bench,
        place=_place(session, is_shared=is_shared),
        facts=HostFacts(
            is_ll128_offered=bool(report.is_ll128_offered),
            has_clusters=session.has_clusters,
            has_full_nvlink=session.has_full_nvlink,
            uses_shm="SHM" in report.transports,
        ),
        identity=session.identity,
        pinned={**session.pinned, **nccl_forced},
        fingerprint=session.fingerprint.to_json(),
        warnings=session.warnings,
        gpu_memory_bytes=min((gpu.memory_total_bytes or 0 for gpu in session.plan.gpus), default=0)
        or None,
    )


def _place(session: Session, *, is_shared: bool) -> str:
    names = session.fingerprint.gpu_names
    model = names[0].removeprefix("NVIDIA ") if len(set(names)) == 1 else "mixed"
    return f"{len(names)}x-{model}{'-shared' if is_shared else ''}"


def check_recorded(source: Source, candidates: tuple[Settings, ...]) -> None:
    """Refuse candidates that a recording holds in no spelling; GPUs can measure anything.

    Raises:
        UsageProblem: names the first that is missing.
    """
    if not isinstance(source.bench, RecordingBench):
        return
    known = {candidate_key(each) for each in source.bench.candidates}
    for candidate in candidates:
        if candidate_key(candidate) not in known:
            listed = ",".join(f"{name}={value}" for name, value in candidate.items())
            raise UsageProblem(
                f"--try {listed}: not measured in {source.bench.source}, and nothing is invented; "
                "leave it out, or search on GPUs",
                code="not_recorded",
            )
