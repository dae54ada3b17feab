"""From the result of a search to its answer: save the winner, choose exit code and next command."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nccltune.cli.envelope import Answer, Complaint, one_line, plain
from nccltune.cli.launch_path import bypass_warning, path_data
from nccltune.cli.search_data import SavedProfile, search_data
from nccltune.cli.search_noise import keep_search_noise
from nccltune.cli.search_report import search_parts
from nccltune.errors import ExitCode, NccltuneError
from nccltune.profile import Profile
from nccltune.recording import RecordingBench
from nccltune.search.result import SearchResult, TrialsEnd, Verdict
from nccltune.store import save_candidate
from nccltune.store.searches import keep_search

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nccltune.cli.invocation import Invocation
    from nccltune.cli.sources import Source
    from nccltune.cli.workload import Demand, WorkloadOptions
    from nccltune.sglang.allreduce_path import PathVerdict

EXIT_CODES = {
    Verdict.IMPROVED: ExitCode.DONE,
    Verdict.KEEP_DEFAULT: ExitCode.DONE,
    Verdict.INCONCLUSIVE: ExitCode.UNKNOWN,
}


def answer_from_result(
    result: SearchResult,
    *,
    demand: Demand,
    source: Source,
    name: str,
    asked: WorkloadOptions,
    invocation: Invocation,
    path: PathVerdict | None,
    notice: str,
    timeout_s: float,
) -> Answer:
    """Save the winner, if there is one, and say everything, also where it cannot be saved."""
    errors: list[Complaint] = []
    exit_code = EXIT_CODES[result.verdict]
    try:
        saved = _save(result, demand, source, name)
    except NccltuneError as error:
        saved, exit_code = SavedProfile(), error.exit_code
        message = f"{error}; the settings are in the report, and every trial is kept"
        errors.append(Complaint(error.code, one_line(message)))
    next_command = _next_command(result, source, saved, asked, invocation)
    data = search_data(result, saved, workload=demand.workload.name, next_command=next_command) | {
        "all_reduce_path": path_data(path),
        "workload_digest": demand.workload.digest(),
    }
    if result.is_interrupted:
        exit_code = ExitCode.INTERRUPTED
        message = f"interrupted; everything measured is kept, go on with: {next_command}"
        errors.append(Complaint("interrupted", message))
    not_kept = (
        *_keep(data, result, source, name),
        *keep_search_noise(result, source, demand),
    )
    return Answer(
        data=data,
        show=lambda: search_parts(
            result,
            saved,
            next_command=next_command,
            memory_left_bytes=memory_left_bytes(demand, source),
            ended_by=_ended_by(result, source, timeout_s),
        ),
        exit_code=exit_code,
        warnings=(*_warnings(result, demand, source, path, notice), *not_kept),
        errors=tuple(errors),
    )


def _ended_by(result: SearchResult, source: Source, timeout_s: float) -> str:
    """Say why there are fewer trials than asked for; empty where there are as many."""
    if result.is_interrupted:
        return ""
    if result.trials_end is TrialsEnd.OUT_OF_TIME:
        return f"--timeout-s {timeout_s:g}: no time was left for more trials"
    if result.trials_end is not TrialsEnd.EXHAUSTED:
        return ""
    what = "the variables that are set already" if source.pinned else "the search space"
    if isinstance(source.bench, RecordingBench):
        what = "the recording"
    return f"{what}: nothing is left to try"


def memory_left_bytes(demand: Demand, source: Source) -> int | None:
    """Return what the launch leaves on a GPU beside weights and KV cache; None if not said."""
    share = demand.command.value("mem_fraction_static") if demand.command else None
    if share is None or source.gpu_memory_bytes is None:
        return None
    try:
        return int((1.0 - float(share)) * source.gpu_memory_bytes)
    except ValueError:
        return None


def _save(result: SearchResult, demand: Demand, source: Source, name: str) -> SavedProfile:
    if result.verdict is not Verdict.IMPROVED:
        return SavedProfile()
    profile = Profile(
        name=name,
        settings=dict(result.settings),
        note=result.sentence,
        source=result.source,
        created_at=datetime.now(UTC),
        fingerprint=source.fingerprint,
        measured=_measured(result, demand),
    )
    return SavedProfile(name, save_candidate(profile))


def _keep(
    data: Mapping[str, object], result: SearchResult, source: Source, name: str
) -> tuple[str, ...]:
    """Keep the answer for ``nccltune history``; what was measured elsewhere is not of this host."""
    if result.is_interrupted or isinstance(source.bench, RecordingBench):
        return ()
    base = source.identity.get("base")
    answer = plain({**data, "fingerprint": source.fingerprint, "base_environment": base})
    assert isinstance(answer, dict)  # noqa: S101 - a mapping stays one
    try:
        keep_search(name, datetime.now(UTC), answer)
    except NccltuneError as error:
        return (f"this search will be missing in nccltune history: {error}",)
    return ()


def _measured(result: SearchResult, demand: Demand) -> dict[str, object]:
    data = search_data(result, SavedProfile(), workload=demand.workload.name, next_command="")
    kept = (
        "workload",
        "score_ratio",
        "score_ci",
        "score_ci_method",
        "payloads",
        "gathers",
        "trial_count",
        "duel",
        "not_run",
        "memory_bytes_per_gpu",
        "memory_baseline_bytes_per_gpu",
    )
    chosen = plain({key: data[key] for key in kept})
    assert isinstance(chosen, dict)  # noqa: S101 - a mapping stays one
    return chosen | {"workload_digest": demand.workload.digest()}


def _next_command(
    result: SearchResult,
    source: Source,
    saved: SavedProfile,
    asked: WorkloadOptions,
    invocation: Invocation,
) -> str:
    if result.is_interrupted:
        return invocation.format_again("--resume")
    is_recording = isinstance(source.bench, RecordingBench)
    if saved.name is not None and is_recording:
        return f"nccltune profile show {saved.name}"
    if saved.name is not None:
        shared = ["--share-gpu"] if result.source == "shared-gpu" else []
        words = ["nccltune", "bench", "--profile", saved.name, *shared, *asked.format_again()]
        return shlex.join(words)
    is_exhausted = result.trials_end is TrialsEnd.EXHAUSTED
    if result.verdict is Verdict.INCONCLUSIVE and not is_recording and not is_exhausted:
        more = max(2 * result.trial_count, result.trial_limit)
        return invocation.format_again("--resume", trials=more)
    return ""


def _warnings(
    result: SearchResult, demand: Demand, source: Source, path: PathVerdict | None, notice: str
) -> tuple[str, ...]:
    loud = [notice] if notice else []
    return (*loud, *bypass_warning(path), *demand.doubts, *source.warnings, *result.warnings)
