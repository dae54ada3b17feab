"""``nccltune search``: the main job."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from nccltune.bench.session import BenchOptions
from nccltune.cli import render
from nccltune.cli.interrupts import polite_signals
from nccltune.cli.launch_path import bypass_answer, find_path, has_no_gpu
from nccltune.cli.live import follow
from nccltune.cli.options import (
    FiniteRange,
    gpu_options,
    json_option,
    launch_argument,
    seed_option,
    workload_options,
)
from nccltune.cli.search_answer import answer_from_result
from nccltune.cli.search_noise import known_noise
from nccltune.cli.settings_options import parse_candidate
from nccltune.cli.sources import (
    Source,
    check_idle,
    check_recorded,
    choose_recording,
    demand_here,
    narrow_to_recording,
    open_gpus,
    open_recording,
    study_path,
)
from nccltune.cli.workload import Demand, WorkloadOptions, workload_from_options
from nccltune.errors import HostError, NccltuneError, RankError, UsageProblem
from nccltune.paths import shipped_profiles_dir
from nccltune.profile import check_name
from nccltune.search.engine import SearchPlan, run_search
from nccltune.search.report import FOLK_NAME
from nccltune.store import find_profile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nccltune.cli.envelope import Answer
    from nccltune.cli.invocation import Invocation
    from nccltune.measurement import Settings
    from nccltune.search.result import SearchResult

MAX_NAME_CHARS = 64
DEFAULT_TRIAL_COUNT = 40
CLOSING_S = 2.0
"""For ending the ranks of a search: a part of its time limit too."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What was typed about the search itself."""

    trials: int | None
    timeout_s: float
    seed: int
    sampler: str
    recording: str | None
    fallback_recording: str | None
    resume: bool
    share_gpu: bool
    force: bool
    launch_timeout_s: float
    candidates: tuple[str, ...]
    unsafe: bool
    name: str | None
    no_duel: bool
    anyway: bool


@click.command(name="search")
@workload_options
@click.option(
    "--trials",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Candidates to measure, the baseline included. Default: {DEFAULT_TRIAL_COUNT}; with "
    "--resume as many as before.",
)
@click.option(
    "--timeout-s",
    type=FiniteRange(min=1.0),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Time limit of the whole search, in seconds.",
)
@seed_option
@click.option(
    "--sampler",
    type=click.Choice(["model", "random"]),
    default="model",
    show_default=True,
    help="How candidates are proposed.",
)
@click.option("--recording", metavar="NAME|FILE", help="Search a recording instead of GPUs.")
@click.option(
    "--fallback-recording",
    metavar="NAME|FILE",
    help="Search this recording if the host has no NVIDIA GPU.",
)
@click.option("--resume", is_flag=True, help="Go on with the last search of this name.")
@click.option(
    "--try",
    "candidates",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="A candidate of your own, measured first. Repeatable.",
)
@click.option("--unsafe", is_flag=True, help="Let --try set values that NCCL may misread.")
@click.option("--name", metavar="NAME", help="Name of the profile. Default: model and GPUs.")
@click.option("--no-duel", is_flag=True, help="Leave out the proof on fresh launches.")
@click.option("--anyway", is_flag=True, help="Search even if the launch bypasses NCCL.")
@gpu_options
@launch_argument
@json_option
@click.pass_obj
def command(invocation: Invocation, /, **options: object) -> Answer:
    """Find the NCCL settings that make the verify pass fastest here, prove them, and save them.

    A server's launch command after -- says what is reduced, over how many GPUs, and whether NCCL
    carries it. Ctrl-C stops at any moment; everything measured is kept, and --resume goes on.
    """
    chosen = SearchOptions(**{name: options.pop(name) for name in SearchOptions.__slots__})  # type: ignore[arg-type]
    asked = WorkloadOptions(**options)  # type: ignore[arg-type]
    if chosen.name is not None:
        _check_free_name(chosen.name)
    own = tuple(parse_candidate(text, is_unsafe=chosen.unsafe) for text in chosen.candidates)
    demand = workload_from_options(asked)
    recording, notice = choose_recording(chosen.recording, chosen.fallback_recording)
    if recording is not None:
        demand = narrow_to_recording(recording, demand)
    else:
        demand = demand_here(asked, is_shared=chosen.share_gpu)
    if chosen.share_gpu and chosen.recording is not None:
        raise UsageProblem(
            "--recording measures nothing, so --share-gpu has nothing to say: leave one of the two "
            "out",
            code="conflicting_options",
        )
    path = find_path(demand, use_gpus=recording is None and not chosen.share_gpu)
    if path is not None and path.is_nccl is False and not chosen.anyway:
        return bypass_answer(path)
    if notice:
        render.print_warnings([notice])
    check_idle()
    began_s = time.monotonic()
    with polite_signals(), ExitStack() as stack:
        source = stack.enter_context(_open(chosen, demand, recording))
        check_recorded(source, own)
        name = chosen.name or profile_name(demand.workload.name, source.place)
        # Starting the ranks, and ending them, is a part of the whole that the limit is for.
        spent_s = time.monotonic() - began_s + (0.0 if recording is not None else CLOSING_S)
        plan = replace(
            _plan(chosen, demand, source, own), timeout_s=max(1.0, chosen.timeout_s - spent_s)
        )
        result = _search(plan, source, study_path(name), invocation, is_resume=chosen.resume)
    return answer_from_result(
        result,
        demand=demand,
        source=source,
        name=name,
        asked=asked,
        invocation=invocation,
        path=path,
        notice=notice,
        timeout_s=chosen.timeout_s,
    )


def _check_free_name(name: str) -> None:
    """Refuse, before minutes are spent, a name under which nothing could be saved."""
    check_name(name)
    if (shipped_profiles_dir() / f"{name}.json").exists():
        raise UsageProblem(
            f"--name {name}: a shipped profile has this name; choose another", code="name_taken"
        )


@contextmanager
def _open(chosen: SearchOptions, demand: Demand, recording: str | None) -> Iterator[Source]:
    if recording is not None:
        yield open_recording(recording, demand)
        return
    options = BenchOptions(
        rank_count=demand.tp,
        is_shared=chosen.share_gpu,
        deadline_s=chosen.launch_timeout_s,
        is_forced=chosen.force,
    )
    try:
        with open_gpus(options, demand) as (source, _session):
            yield source
    except HostError as error:
        if not has_no_gpu(error):
            raise
        message = f"{error}; or search saved measurements, see nccltune recording list"
        raise HostError(message, code=error.code) from error


def _plan(
    chosen: SearchOptions, demand: Demand, source: Source, own: tuple[Settings, ...]
) -> SearchPlan:
    return SearchPlan(
        workload=demand.workload,
        facts=source.facts,
        identity=source.identity,
        pinned=source.pinned,
        folk=_folk(source),
        extra_candidates=own,
        trial_count=chosen.trials or DEFAULT_TRIAL_COUNT,
        keeps_trial_count=chosen.trials is None,
        known_noise=known_noise(source, demand),
        seed=chosen.seed,
        sampler=chosen.sampler,
        use_duel=not chosen.no_duel,
        is_shared_gpu=chosen.share_gpu,
    )


def _folk(source: Source) -> Settings | None:
    """Return the folk profile, unless it is not installed or a recording does not hold it."""
    try:
        settings = find_profile(FOLK_NAME).profile.settings
        check_recorded(source, (settings,))
    except NccltuneError:
        return None
    return settings


def _search(
    plan: SearchPlan, source: Source, path: Path, invocation: Invocation, *, is_resume: bool
) -> SearchResult:
    with follow("search", wants_json=invocation.wants_json) as observer:
        try:
            return run_search(plan, source.bench, path, is_resume=is_resume, observer=observer)
        except (HostError, RankError) as error:
            again = invocation.format_again("--resume")
            message = f"{error}; finished trials are kept, to go on with them: {again}"
            raise type(error)(message, code=error.code) from error


def profile_name(workload: str, place: str) -> str:
    """Name a profile after what it was found for and where.

    >>> profile_name("Kimi-K2.5", "8x-RTX PRO 6000")
    'kimi-k2.5-8x-rtx-pro-6000'
    """
    slug = re.sub(r"[^a-z0-9._]+", "-", f"{workload}-{place}".lower()).strip("-._")
    return slug[:MAX_NAME_CHARS].rstrip("-._") or "tuned"
