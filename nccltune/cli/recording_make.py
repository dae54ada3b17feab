"""``nccltune recording make``: measure a designed set of candidates and keep every launch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

import nccltune
from nccltune.bench.session import BenchOptions
from nccltune.cli.envelope import Answer, Complaint
from nccltune.cli.interrupts import polite_signals
from nccltune.cli.launches import RECORDING_WORDING, SeriesFollower
from nccltune.cli.live import follow
from nccltune.cli.options import (
    FiniteRange,
    gpu_options,
    json_option,
    launch_argument,
    seed_option,
    workload_options,
)
from nccltune.cli.settings_options import parse_candidate
from nccltune.cli.sources import demand_here, open_gpus
from nccltune.cli.tables import fact_grid, heading
from nccltune.cli.words import format_counts
from nccltune.cli.workload import WorkloadOptions
from nccltune.errors import ExitCode, UsageProblem
from nccltune.measurement import Outcome
from nccltune.profile import check_name
from nccltune.recording import Manifest, PayloadShape, RecordingWriter
from nccltune.recording.finding import recordings_dir
from nccltune.search.objective import Objective
from nccltune.search.recording_plan import plan_candidates, record
from nccltune.search.report import FOLK_NAME
from nccltune.search.space import Space
from nccltune.store import find_profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from nccltune.bench.session import Session
    from nccltune.cli.invocation import Invocation
    from nccltune.cli.sources import Source
    from nccltune.measurement import PayloadRequest, Settings

HOST_EXIT_CODES = {Outcome.HOST_BUSY: ExitCode.BUSY, Outcome.HOST_FAILED: ExitCode.HOST}


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """What was typed about the recording itself."""

    name: str
    candidates: int
    tries: tuple[str, ...]
    timeout_s: float
    seed: int
    append: Path | None
    share_gpu: bool
    force: bool
    launch_timeout_s: float

    @property
    def path(self) -> Path:
        """The file to write."""
        return self.append or recordings_dir() / f"{self.name}.json"


@click.command(name="make")
@click.option("--name", required=True, metavar="NAME", help="Name of the recording.")
@click.option(
    "--candidates",
    type=click.IntRange(min=1),
    default=120,
    show_default=True,
    metavar="N",
    help="Candidates that it is to hold, beside the defaults many times over.",
)
@click.option(
    "--try",
    "tries",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="A candidate of your own, measured first. Repeatable.",
)
@click.option(
    "--timeout-s",
    type=FiniteRange(min=1.0),
    default=1500.0,
    show_default=True,
    metavar="S",
    help="Time limit, in seconds.",
)
@seed_option
@click.option(
    "--append",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Go on with this recording, or begin it there.",
)
@workload_options
@gpu_options
@launch_argument
@json_option
@click.pass_obj
def make_command(invocation: Invocation, /, **options: object) -> Answer:
    """Measure a designed set of candidates on this host's GPUs and keep every launch.

    It covers the space instead of looking for the best, so that searches can be compared on it, and
    holds the folk profile beside it. Stopped early, it keeps what it has; --append goes on.
    """
    chosen = MakeOptions(**{name: options.pop(name) for name in MakeOptions.__slots__})  # type: ignore[arg-type]
    own = [parse_candidate(text) for text in chosen.tries]
    demand = demand_here(WorkloadOptions(**options), is_shared=chosen.share_gpu)  # type: ignore[arg-type]
    check_name(chosen.name)
    _refuse_overwriting(chosen)
    asked = BenchOptions(
        rank_count=demand.tp,
        is_shared=chosen.share_gpu,
        deadline_s=chosen.launch_timeout_s,
        is_forced=chosen.force,
    )
    requests = Objective(demand.workload, is_shared_gpu=chosen.share_gpu).requests
    with polite_signals(), open_gpus(asked, demand) as (source, session):
        manifest = manifest_from_session(session, requests, command=invocation.format_again())
        writer = RecordingWriter(chosen.path, chosen.name, manifest)
        with (
            writer,
            follow("recording", wants_json=invocation.wants_json, wording=RECORDING_WORDING) as (
                observer
            ),
        ):
            planned = plan_candidates(
                Space(source.facts, source.pinned),
                chosen.candidates,
                chosen.seed,
                own=own,
                folk=find_profile(FOLK_NAME).profile.settings,
                held=[launch.settings for launch in writer.launches],
            )
            series = SeriesFollower(observer, time_limit_s=chosen.timeout_s)
            is_interrupted = _measure(source, planned, requests, writer, series)
    return _answer(
        writer,
        series,
        planned,
        is_interrupted=is_interrupted,
        again=invocation.format_again(append=chosen.path),
        warnings=(*demand.doubts, *source.warnings),
    )


def _refuse_overwriting(chosen: MakeOptions) -> None:
    if chosen.append is None and chosen.path.exists():
        raise UsageProblem(
            f"recording {chosen.name!r} is there already: choose another name, or go on with it: "
            f"--append {chosen.path}",
            code="name_taken",
        )


def _measure(
    source: Source,
    planned: Sequence[Settings],
    requests: Sequence[PayloadRequest],
    writer: RecordingWriter,
    series: SeriesFollower,
) -> bool:
    """Record until all is done or time is over; return whether it was interrupted."""
    is_interrupted = False
    try:
        record(
            source.bench,
            planned,
            requests,
            writer,
            is_over=lambda: series.is_over,
            on_launch=series.note,
        )
    except KeyboardInterrupt:
        is_interrupted = True
    writer.finish()
    return is_interrupted


def manifest_from_session(
    session: Session, requests: Sequence[PayloadRequest], *, command: str
) -> Manifest:
    """Say where the measurements come from, and all that must be known to compare them."""
    fingerprint = session.fingerprint
    versions = session.bench.versions
    models = Counter(fingerprint.gpu_names)
    links = sorted({name for row in fingerprint.link_matrix for name in row if name} - {"X"})
    links = ["NVLink", *links] if session.has_full_nvlink else links
    gpus = ", ".join(f"{count}x {model}" for model, count in models.items())
    ranks = "all ranks on one GPU, for diagnosis" if session.plan.is_shared else "one process a GPU"
    replays, warmups = requests[0].replay_count, requests[0].warmup_count
    return Manifest(
        origin="nccltune recording make",
        gpus=f"{gpus} ({', '.join(links)})" if links else gpus,
        driver=fingerprint.driver_version,
        nccl=versions.get("nccl"),
        torch=versions.get("torch"),
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        method=(
            f"{ranks}, forked afresh for every launch; bf16, in place, in a CUDA graph; {replays} "
            f"timed replays after {warmups}; us of one all-reduce, the slowest rank of each "
            "replay; data of every payload checked; candidates in random order"
        ),
        base_environment=dict(session.base),
        world_size=session.plan.rank_count,
        payloads=tuple(
            PayloadShape(each.size_bytes, each.graph_count)
            for each in sorted(requests, key=lambda each: each.size_bytes)
        ),
        command=command,
        tool_version=nccltune.__version__,
        fingerprint=fingerprint.to_json(),
    )


def _answer(
    writer: RecordingWriter,
    series: SeriesFollower,
    planned: Sequence[Settings],
    *,
    is_interrupted: bool,
    again: str,
    warnings: tuple[str, ...],
) -> Answer:
    recording = writer.recording
    count = len(planned) - len(writer.missing(planned))
    is_complete = count == len(planned)
    counts = Counter(launch.outcome for launch in recording.launches)
    data = {
        "name": recording.name,
        "path": str(writer.path),
        "candidate_count": count,
        "launch_count": len(recording.launches),
        "outcome_counts": {str(outcome): number for outcome, number in counts.items()},
        "is_complete": is_complete,
    }
    exit_code, errors = _ending(series, is_interrupted, is_complete=is_complete)

    def show() -> Iterator[RenderableType]:
        yield fact_grid(
            (
                ("recording", recording.name),
                ("candidates", f"{count} of {len(planned)}"),
                ("launches", f"{len(recording.launches)} ({format_counts(counts)})"),
            )
        )
        yield heading("File")
        yield f"  {writer.path}"
        if not is_complete:
            yield heading("Next", "to go on")
            yield f"  {again}"

    return Answer(data=data, show=show, exit_code=exit_code, warnings=warnings, errors=errors)


def _ending(
    series: SeriesFollower, is_interrupted: bool, *, is_complete: bool
) -> tuple[ExitCode, tuple[Complaint, ...]]:
    if is_interrupted:
        message = "interrupted; everything measured is kept, --append goes on"
        return ExitCode.INTERRUPTED, (Complaint("interrupted", message),)
    latest = series.latest
    if not is_complete and latest is not None and latest.outcome in HOST_EXIT_CODES:
        message = f"ended early, the host failed again and again: {latest.message}"
        return HOST_EXIT_CODES[latest.outcome], (Complaint(str(latest.outcome), message),)
    return ExitCode.DONE, ()
