"""``nccltune bench``: one candidate, or several, each beside the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nccltune.bench.compare import compare
from nccltune.bench.session import BenchOptions
from nccltune.cli.bench_report import bench_data, bench_parts
from nccltune.cli.envelope import Answer, Complaint, one_line
from nccltune.cli.interrupts import polite_signals
from nccltune.cli.launch_path import bypass_warning, find_path, path_data
from nccltune.cli.launches import BENCH_WORDING, SeriesFollower
from nccltune.cli.live import follow
from nccltune.cli.options import gpu_options, json_option, launch_argument, workload_options
from nccltune.cli.settings_options import candidates_from_options
from nccltune.cli.sources import demand_here, open_gpus
from nccltune.cli.words import OUTCOME_MEANING
from nccltune.cli.workload import Demand, WorkloadOptions
from nccltune.errors import ExitCode
from nccltune.measurement import Outcome
from nccltune.search.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nccltune.bench.report import BenchReport
    from nccltune.bench.session import Session
    from nccltune.cli.invocation import Invocation

EXIT_CODES = {Outcome.HOST_BUSY: ExitCode.BUSY, Outcome.HOST_FAILED: ExitCode.HOST}
"""Of a candidate that was not measured; every other bad end is its own fault, and the answer no."""

Candidates = list[tuple[str, dict[str, str]]]


@click.command(name="bench")
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME|FILE",
    help="A profile to measure beside the baseline. Repeatable, one comparison each.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting, on top of the profile if there is one; no value takes it out. Repeatable.",
)
@click.option(
    "--launches",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="Fresh launches of each arm; from 3 on there is an interval.",
)
@click.option("--unsafe", is_flag=True, help="Let --set use values that NCCL may misread.")
@workload_options
@gpu_options
@launch_argument
@json_option
@click.pass_obj
def command(
    invocation: Invocation,
    /,
    profiles: Sequence[str],
    assignments: Sequence[str],
    launches: int,
    unsafe: bool,
    share_gpu: bool,
    force: bool,
    launch_timeout_s: float,
    **options: object,
) -> Answer:
    """Measure candidates beside the baseline, on fresh launches in ABBA order.

    Without --profile and --set it measures the baseline against itself, which shows the noise of
    this host.
    """
    candidates = candidates_from_options(profiles, assignments, is_unsafe=unsafe)
    demand = demand_here(WorkloadOptions(**options), is_shared=share_gpu)  # type: ignore[arg-type]
    asked = BenchOptions(
        rank_count=demand.tp,
        is_shared=share_gpu,
        deadline_s=launch_timeout_s,
        is_forced=force,
    )
    path = find_path(demand, use_gpus=not share_gpu)
    with polite_signals(), open_gpus(asked, demand) as (source, session):
        reports = _compare_all(invocation, session, candidates, demand, launches=launches)
    warnings = (*bypass_warning(path), *demand.doubts, *source.warnings)
    return answer_from_reports(reports, demand, warnings, path=path_data(path))


def _compare_all(
    invocation: Invocation,
    session: Session,
    candidates: Candidates,
    demand: Demand,
    *,
    launches: int,
) -> list[BenchReport]:
    objective = Objective(demand.workload, is_shared_gpu=session.plan.is_shared)
    reports = []
    with follow("bench", wants_json=invocation.wants_json, wording=BENCH_WORDING) as observer:
        for name, settings in candidates:
            report = compare(
                session.bench,
                name,
                settings,
                objective.requests,
                launches_per_arm=launches,
                world_size=session.plan.rank_count,
                baseline_report=session.baseline_report,
                on_launch=SeriesFollower(observer).note,
            )
            reports.append(report)
    return reports


def answer_from_reports(
    reports: Sequence[BenchReport],
    demand: Demand,
    warnings: Sequence[str],
    *,
    path: object = None,
) -> Answer:
    """Say what was found; a candidate that could not be measured decides the exit code."""
    failed = [each for each in reports if each.outcome is not Outcome.OK]
    errors = [
        Complaint(str(each.outcome), one_line(each.message) or OUTCOME_MEANING[each.outcome])
        for each in failed
        if each.outcome in EXIT_CODES
    ]
    data = bench_data(reports, workload=demand.workload.name)
    return Answer(
        data={**data, "all_reduce_path": path},
        show=lambda: bench_parts(reports),
        exit_code=EXIT_CODES.get(failed[0].outcome, ExitCode.NO) if failed else ExitCode.DONE,
        errors=tuple(errors),
        warnings=(*warnings, *(warning for each in reports for warning in each.warnings)),
    )
