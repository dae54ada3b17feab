"""How far a search is from the best recorded candidate, by trials spent, beside a random sampler.

On each shipped recording and for each seed a search of 40 trials runs on the default workload.
Candidates that were chosen by hand are left out: they lie around what a search had found before.
Regret is the best candidate found so far that keeps its guards, over the best of the whole
recording, minus one; before any is found it is the default's. The engine's own cost is timed beside
it: ask, tell, journal and a live view, per trial.

    python benchmarks/regret.py [--seeds 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from rich.console import Console
from rich.live import Live

from nccltune.cli.live import REFRESHES_PER_S, LiveView
from nccltune.payloads.derive import default_workload
from nccltune.recording import RecordingBench, find_recording, settings_key
from nccltune.search.engine import SearchPlan, run_search
from nccltune.search.objective import GUARD_POINT_RATIO, Objective, pooled_medians
from nccltune.search.space import facts_of_recording
from nccltune.store import find_profile

if TYPE_CHECKING:
    from nccltune.measurement import Launch, Settings
    from nccltune.recording import Recording
    from nccltune.search.result import Progress, SearchObserver

RECORDINGS = ("h200-2x-nvlink", "h200-2x-shm")
CHECKPOINTS = (20, 40)
LIMIT_PCT = {20: 2.5, 40: 0.5}
"""Mean regret allowed after so many trials, the baseline counted as a trial."""

HAND_CHOSEN = {"h200-2x-shm": 8}
"""How many of a recording's last candidates were chosen by hand, as its origin says."""

ENGINE_LIMIT_MS = 20.0


def designed(recording: Recording) -> Recording:
    """Return a recording without the candidates that were chosen by hand."""
    candidates = [one.settings for one in recording.launches if one.settings]
    keys = list(dict.fromkeys(settings_key(settings) for settings in candidates))
    by_hand = set(keys[len(keys) - HAND_CHOSEN.get(recording.name, 0) :])
    kept = tuple(one for one in recording.launches if settings_key(one.settings) not in by_hand)
    return dataclasses.replace(recording, launches=kept)


class Follower:
    """Keeps the settings of every trial in order."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.view_s = 0.0

    def update(self, progress: Progress) -> None:
        """Note a finished launch."""
        if progress.launch is not None and progress.stage in ("search", "baseline"):
            self.settings.append(progress.launch.settings)


def regret_pct(bench: RecordingBench, objective: Objective, tried: Sequence[Settings]) -> float:
    """Return the regret after these trials, in percent."""
    return 100.0 * (best_ratio(bench, objective, tried) / oracle_ratio(bench, objective) - 1.0)


def oracle_ratio(bench: RecordingBench, objective: Objective) -> float:
    """Return the score ratio of the best recorded candidate that keeps its guards."""
    return best_ratio(bench, objective, bench.candidates)


def best_ratio(
    bench: RecordingBench, objective: Objective, candidates: Sequence[Settings]
) -> float:
    """Return the best score ratio of these, 1 when none beats the default within the guards."""
    reference = pooled_medians(bench.baseline_launches())
    best = 1.0
    for settings in candidates:
        if not settings:
            continue
        launch: Launch = bench.launch(settings, objective.requests)
        assessment = objective.assess(launch.median_us, reference, {})
        guards = (assessment.ratios[size] for size in objective.guard_sizes)
        if all(ratio <= GUARD_POINT_RATIO for ratio in guards):
            best = min(best, assessment.score_ratio)
    return best


def run_one(name: str, sampler: str, seed: int) -> dict[str, float]:
    """Search one recording once; return the regret at each checkpoint and the cost a trial."""
    recording = designed(find_recording(name)[0])
    workload = default_workload()
    plan = SearchPlan(
        workload=workload,
        facts=facts_of_recording(recording.manifest),
        pinned=recording.manifest.base_environment,
        folk=find_profile("folk-ll-ring").profile.settings,
        seed=seed,
        sampler=sampler,
        trial_count=max(CHECKPOINTS),
    )
    follower = Follower()
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    view = LiveView(name=name)
    live = Live(get_renderable=view.draw, console=console, refresh_per_second=REFRESHES_PER_S)
    with tempfile.TemporaryDirectory() as folder, live:
        began = time.perf_counter()
        run_search(
            plan,
            RecordingBench(recording),
            Path(folder, "study.journal"),
            is_resume=False,
            observer=Both(follower, view),
        )
        cost_ms = 1000.0 * (time.perf_counter() - began) / len(follower.settings)
    bench, objective = RecordingBench(recording), Objective(workload)
    found = {str(n): regret_pct(bench, objective, follower.settings[:n]) for n in CHECKPOINTS}
    return {**found, "cost_ms": cost_ms}


class Both:
    """Two observers."""

    def __init__(self, *observers: SearchObserver) -> None:
        self._observers = observers

    def update(self, progress: Progress) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.update(progress)


def main() -> int:
    """Run, print a table, and fail when a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    is_good = True
    rows = []
    print(f"mean regret in %, {options.seeds} seeds; worst seed in brackets; ms a trial")
    for name in RECORDINGS:
        for sampler in ("model", "random"):
            runs = [run_one(name, sampler, seed) for seed in range(options.seeds)]
            rows.append({"recording": name, "sampler": sampler, "runs": runs})
            cost_ms = statistics.median(run["cost_ms"] for run in runs)
            cells = []
            for n in CHECKPOINTS:
                regrets = [run[str(n)] for run in runs]
                mean = statistics.mean(regrets)
                cells.append(f"after {n}: {mean:5.2f} [{max(regrets):5.2f}]")
                is_good &= sampler == "random" or mean <= LIMIT_PCT[n]
            is_good &= sampler == "random" or cost_ms <= ENGINE_LIMIT_MS
            print(f"{name:15} {sampler:7} {'  '.join(cells)}  {cost_ms:5.1f} ms", flush=True)
    limits = ", ".join(f"<= {LIMIT_PCT[n]} after {n}" for n in CHECKPOINTS)
    print(
        f"limits for model: {limits}, <= {ENGINE_LIMIT_MS:.0f} ms: {'ok' if is_good else 'BROKEN'}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
