"""The experiments on real GPUs, each one command: what runs there becomes docs/results/.

    python benchmarks/on_gpus.py --out DIR [--transport NAME]... [--stage NAME]... [--ranks N]
    python benchmarks/on_gpus.py --out DIR --stage gather --found PROFILE.json

Transports: nvlink (as the host is), shm (NCCL_P2P_DISABLE=1 in the base environment: host memory,
which stands in for PCIe hosts without peer access), and shared (all ranks on one GPU: shows that
everything works, its times mean nothing).

Stages, in order of worth; each writes its raw data under --out and prints a short table:

search   nccltune search as a user types it, the folk profile beside it
rival    what it found against the best candidate of a recording of as many ranks, under --out or
         shipped, in a duel
faults   crash, refusal at init, refusal at the first collective, hang, wrong data; SIGKILL in the
         middle, and resume
bench    nccltune bench as a user types it, for people to read
fork     the fixed cost of a trial by phase: forked from the prepared server, and with fresh
         interpreters
aa       duels of the baseline against itself: how often is a difference claimed that is not there
torch    medians beside torch.distributed in a CUDA graph
record   nccltune recording make; a recording that is already under --out is gone on with

Only when it is asked for, as it needs a profile:

gather   the all-gathers of a decode step of benchmarks/kimi_shaped_model.py under the defaults and
         under --found, in ABBA order, and what they save a step
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_shaped_model import HIDDEN_SIZE, VOCABULARY
from sglang_servers import alive_of, tree_of

from nccltune.bench.session import BenchOptions, Session, open_session
from nccltune.block_rule import BlockRule
from nccltune.measurement import PayloadRequest
from nccltune.payloads.derive import (
    ModelShape,
    SpeculationShape,
    default_workload,
    workload_from_model,
)
from nccltune.profile import parse_profile
from nccltune.recording import RecordingBench, find_recording
from nccltune.search.duel import run_duel
from nccltune.search.objective import Objective, log_noise, pooled_medians
from nccltune.search.records import record_from_launch
from nccltune.search.result import Verdict
from nccltune.sglang.defaults import base_environment

if TYPE_CHECKING:
    from nccltune.measurement import Launch, Settings

TRANSPORTS: dict[str, dict[str, str]] = {
    "nvlink": {},
    "shm": {"NCCL_P2P_DISABLE": "1"},
    "shared": {},
}
TARGET_RATIO = {("nvlink", 2): 0.93, ("shm", 2): 0.82}
"""By transport and ranks, where one was set."""
SEARCH_S = {2: 165.0}
FAULT_TIMEOUT_S = {2: 8.0}
"""Limits by ranks, where they were tried; others get what nccltune gives by itself."""
KILLED_TRIALS = 9
LEFTOVER_LIMIT_S = 15.0
"""How long processes of a killed search may take to end before they count as left."""
FAULT_CANDIDATES = (
    "NCCL_BUFFSIZE=1000",
    "NCCL_PROTO=bogus",
    "NCCL_ALGO=allreduce:CollnetDirect",
    "NCCL_MAX_CTAS=3",
    "NCCL_MAX_CTAS=5",
)
FAULT_HOOK = "hang@1:NCCL_MAX_CTAS=3;wrong_data@0:NCCL_MAX_CTAS=5"


@dataclass(frozen=True, slots=True)
class Run:
    """One transport's part of the experiment."""

    transport: str
    out: Path
    program: list[str]
    ranks: int
    options: argparse.Namespace

    @property
    def environ(self) -> dict[str, str]:
        """The operator's environment of every command."""
        home = self.out / f"home-{self.transport}-{self.ranks}"
        return {**os.environ, **TRANSPORTS[self.transport], "NCCLTUNE_HOME": str(home)}

    def path(self, name: str) -> Path:
        """Return a file of this transport."""
        return self.out / f"{self.transport}-{self.ranks}-{name}"

    @property
    def recording_name(self) -> str:
        """The recording of this transport and so many ranks."""
        return f"h200-{self.ranks}x-{self.transport}"

    @property
    def is_shared(self) -> bool:
        """Whether all ranks are on one GPU."""
        return self.transport == "shared"

    def command(self, verb: str, *words: str) -> list[str]:
        """Return an nccltune command on all ranks."""
        shared = ["--share-gpu"] if self.is_shared else []
        return [*self.program, *shlex.split(verb), "--tp", str(self.ranks), *shared, *words]

    def say(self, text: str) -> None:
        """Print one line of the table."""
        print(f"{self.transport:7} {text}", flush=True)

    @contextmanager
    def session(self, *, is_fresh: bool = False) -> Iterator[tuple[Session, Objective]]:
        """Open a bench as the commands do."""
        objective = Objective(default_workload(), is_shared_gpu=self.is_shared)
        options = BenchOptions(
            rank_count=self.ranks, is_shared=self.is_shared, is_fresh=is_fresh, deadline_s=60.0
        )
        base = base_environment(None, self.ranks)
        with open_session(options, base, objective.requests, self.environ) as session:
            yield session, objective


def call(run: Run, name: str, command: Sequence[str], **environ: str) -> dict[str, object]:
    """Run a command with --json; keep its envelope and what it said; return the envelope."""
    began = time.monotonic()
    with run.path(f"{name}.log").open("w") as log:
        done = subprocess.run(
            [*command, "--json"],
            env={**run.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
        )
    envelope: dict[str, object] = json.loads(done.stdout)
    envelope["command_line"] = shlex.join(command)
    envelope["wall_s"] = time.monotonic() - began
    run.path(f"{name}.json").write_text(json.dumps(envelope, indent=1) + "\n")
    return envelope


def search(run: Run) -> None:
    """Search as a user does."""
    limit_s = run.options.search_s or SEARCH_S.get(run.ranks, 600.0)
    limit = ["--trials", str(run.options.trials), "--timeout-s", str(limit_s)]
    envelope = call(
        run, "search", run.command("search", "--name", f"found-{run.transport}", *limit)
    )
    data = envelope["data"]
    assert isinstance(data, dict)
    run.say(
        f"search: {data['verdict']} score {data['score_ratio']:.3f} {data['score_ci']}"
        f" (target {TARGET_RATIO.get((run.transport, run.ranks), 'none')})"
        f" {data['trial_count']} trials, {envelope['wall_s']:.0f} s, exit {envelope['exit_code']}"
    )
    run.say(f"settings: {data['profile']['settings']}")
    for row in data["payloads"]:
        run.say(
            f"  {row['bytes']:>9} B {row['baseline_us']:9.2f} -> {row['tuned_us']:9.2f} us"
            f" ratio {row['ratio']:.3f}{' guard' if row['is_guard'] else ''}"
        )
    for other in data.get("comparisons", []):
        run.say(f"{other['name']}: score {other['score_ratio']} {other['ratios']}")
    run.say(f"collectives, memory: {data.get('collectives')} {data.get('memory_bytes_per_gpu')}")
    run.say(trial_rate(run))


def trial_rate(run: Run) -> str:
    """Say how many whole trials a minute the search's own journal shows."""
    name = f"found-{run.transport}"
    whole_s: list[float] = []
    for line in study_path(run, name).read_text().splitlines():
        launch = json.loads(line).get("user_attr", {}).get("launch")
        if launch and launch["outcome"] == "ok" and not launch["is_pruned"]:
            whole_s.append(launch["duration_s"])
    mean_s = statistics.mean(whole_s)
    return f"whole trials: {len(whole_s)}, {mean_s:.2f} s each, {60 / mean_s:.1f} a minute"


def study_path(run: Run, name: str) -> Path:
    """Return the journal of a search."""
    return Path(run.environ["NCCLTUNE_HOME"], "studies", f"{name}.journal")


def found_settings(run: Run) -> dict[str, str]:
    """Return what the search stage found."""
    envelope = json.loads(run.path("search.json").read_text())
    settings: dict[str, str] = envelope["data"]["profile"]["settings"]
    return settings


def rival(run: Run) -> None:
    """Duel what was found against the best of a recording, both on fresh launches."""
    own = run.out / f"{run.recording_name}.json"
    recording, _ = find_recording(str(own) if own.exists() else run.recording_name)
    bench = RecordingBench(recording)
    best = best_recorded(bench, Objective(default_workload()))
    found = found_settings(run)
    launches: list[Launch] = []
    with run.session() as (session, objective):
        report = run_duel(
            session.bench,
            found,
            objective.requests,
            objective,
            baseline=best,
            rule=BlockRule().limited_to(run.options.rival_blocks),
            on_launch=launches.append,
        )
    keep(run, "rival", launches)
    run.say(
        f"rival: found over the recording's best ({best}): {report.score_ratio:.3f}"
        f" [{report.interval.low:.3f}, {report.interval.high:.3f}], {report.launch_count} launches"
    )


def best_recorded(bench: RecordingBench, objective: Objective) -> Settings:
    """Return the best recorded candidate that keeps its guards."""
    reference = pooled_medians(bench.baseline_launches())
    ranked = []
    for settings in bench.candidates:
        launch = bench.launch(settings, objective.requests)
        if launch.is_complete:
            assessment = objective.assess(launch.median_us, reference, {})
            if assessment.guard == "held":
                ranked.append((assessment.score_ratio, sorted(settings.items())))
    return dict(min(ranked)[1])


def aa(run: Run) -> None:
    """Let the rule decide between the baseline and itself, again and again."""
    claims = guard_claims = 0
    launches: list[Launch] = []
    with run.session() as (session, objective):
        for _ in range(run.options.aa_duels):
            report = run_duel(
                session.bench,
                {},
                objective.requests,
                objective,
                rule=BlockRule().limited_to(run.options.aa_blocks),
                on_launch=launches.append,
            )
            is_loss = "slower than the defaults" in report.message
            claims += report.verdict is Verdict.IMPROVED or is_loss
            guard_claims += bool(report.rejected_guards)
        keep(run, "aa", launches)
        noise = log_noise([launch for launch in launches if launch.is_complete])
    run.say(
        f"aa: {claims} claims, {guard_claims} guards rejected in {run.options.aa_duels} decisions,"
        f" {len(launches)} launches; launch noise in %:"
        f" { {size: round(100 * sd, 2) for size, sd in sorted(noise.items())} }"
    )


def complete_launch(session: Session, objective: Objective) -> Launch:
    """Launch the baseline, again where the GPUs are not free yet of what ran before."""
    for _ in range(5):
        launch = session.bench.launch({}, objective.requests)
        if launch.is_complete:
            return launch
        time.sleep(1.0)
    raise RuntimeError(f"{launch.outcome}: {launch.message}")


def torch(run: Run) -> None:
    """Compare with torch.distributed, launch by launch in turns."""
    ours: list[Launch] = []
    theirs: list[dict[str, float]] = []
    with run.session() as (session, objective):
        payloads = [f"--payload={r.size_bytes}:{r.graph_count}" for r in objective.requests]
        program = Path(__file__).with_name("torch_graph.py")
        environ = {**os.environ, **session.base}
        command = [sys.executable, str(program), f"--ranks={run.ranks}", *payloads]
        for _ in range(run.options.torch_launches):
            ours.append(complete_launch(session, objective))
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, check=False, timeout=150
            )
            if done.returncode:
                run.say(f"torch: failed: {done.stderr[-400:]}")
                return
            theirs.append(json.loads(done.stdout.splitlines()[-1]))
    keep(run, "torch", ours, {"torch_us": theirs})
    medians = pooled_medians(ours)
    for size, us in sorted(medians.items()):
        other = statistics.median(one[str(size)] for one in theirs)
        run.say(f"torch: {size:>9} B ours {us:9.2f} torch {other:9.2f} us ratio {us / other:.3f}")


def faults(run: Run) -> None:
    """Show every failing outcome once, then kill a search in the middle and go on with it."""
    words = [word for text in FAULT_CANDIDATES for word in ("--try", text)]
    deadline_s = FAULT_TIMEOUT_S.get(run.ranks, 30.0)
    limits = ["--trials", "10", "--no-duel", "--launch-timeout-s", str(deadline_s), "--unsafe"]
    command = run.command("search", "--name", "faults", *limits, *words)
    envelope = call(run, "faults", command, NCCLTUNE_TEST_FAULT=FAULT_HOOK)
    data = envelope["data"]
    assert isinstance(data, dict)
    run.say(f"faults: {json.dumps(data.get('outcome_counts'))} in {envelope['wall_s']:.0f} s")
    for failure in data.get("failures", []):
        run.say(f"  {failure['outcome']}: {failure['settings']} {failure['message'][:110]}")
    kill_and_resume(run)


def kill_and_resume(run: Run) -> None:
    """SIGKILL a search after some trials, look for leftovers, resume."""
    command = run.command("search", "--name", "killed", "--trials", str(KILLED_TRIALS), "--no-duel")
    victim = subprocess.Popen(
        command, env=run.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert victim.stderr is not None
    seen = 0
    for line in victim.stderr:
        seen += "trial" in line
        if seen >= 4:
            break
    time.sleep(0.4)
    tree = tree_of(victim.pid)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stderr.close()
    deadline = time.monotonic() + LEFTOVER_LIMIT_S
    while (left := alive_of(tree)) and time.monotonic() < deadline:
        time.sleep(0.1)
    before = finished_trials(run, "killed")
    if not tree or len(before) >= KILLED_TRIALS:
        raise RuntimeError("the search was over before it was killed: nothing is shown by that")
    envelope = call(run, "resumed", [*command, "--resume"])
    after = finished_trials(run, "killed")
    run.say(
        f"killed after {len(before)} finished trials, {len(left)} of its"
        f" {len(tree)} processes left;"
        f" resumed: {len(after)} trials, the same first ones: {after[: len(before)] == before},"
        f" exit {envelope['exit_code']}"
    )


def finished_trials(run: Run, name: str) -> list[str]:
    """Return the launches of a study's finished trials, in order."""
    path = study_path(run, name)
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    attributes = (json.loads(line).get("user_attr", {}) for line in lines)
    return [json.dumps(one["launch"], sort_keys=True) for one in attributes if "launch" in one]


def bench(run: Run) -> None:
    """Put the folk profile beside the baseline as a user does, and keep what is printed."""
    words = ["--profile", "folk-ll-ring", "--launches", str(run.options.bench_launches)]
    done = subprocess.run(
        run.command("bench", *words),
        env=run.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    run.path("bench.txt").write_text(done.stdout)
    for line in done.stdout.splitlines():
        run.say(f"| {line}")
    run.say(f"bench: exit {done.returncode}")


def fork(run: Run) -> None:
    """Time the phases of a launch, forked and fresh."""
    medians: dict[bool, dict[str, float]] = {}
    for is_fresh in (False, True):
        with run.session(is_fresh=is_fresh) as (session, objective):
            # A user's pause between launches is none: the launch before is seen out in the next.
            launches = [session.bench.launch({}, objective.requests) for _ in range(4)][1:]
        keep(run, f"fork-{'fresh' if is_fresh else 'forked'}", launches)
        phases = {name: [one.phases_s[name] for one in launches] for name in launches[0].phases_s}
        phases["total"] = [launch.duration_s for launch in launches]
        medians[is_fresh] = {name: statistics.median(times) for name, times in phases.items()}
        label = "fresh " if is_fresh else "forked"
        run.say(f"{label}: " + ", ".join(f"{k} {v:.3f} s" for k, v in medians[is_fresh].items()))
    run.say(f"fresh over forked: {medians[True]['total'] / medians[False]['total']:.1f}")


def record(run: Run) -> None:
    """Make or go on with a dense recording."""
    name = run.recording_name
    path = run.out / f"{name}.json"
    limits = ["--candidates", str(run.options.candidates), "--timeout-s", str(run.options.record_s)]
    own = [f"--try={settings}" for settings in run.options.tries]
    words = ["--name", name, "--append", str(path), *limits, *own]
    envelope = call(run, "record", run.command("recording make", *words))
    recording = json.loads(path.read_text())
    distinct = {json.dumps(one["settings"], sort_keys=True) for one in recording["launches"]}
    run.say(
        f"record: {len(recording['launches'])} launches, {len(distinct) - 1} candidates,"
        f" {envelope['wall_s']:.0f} s, exit {envelope['exit_code']}"
    )


def gather(run: Run) -> None:
    """Time the all-gathers of a step under the defaults and a profile, in turns."""
    if run.options.found is None:
        raise SystemExit("--stage gather needs --found PROFILE.json")
    found = parse_profile(run.options.found.read_text(), run.options.found).settings
    shape = ModelShape("LlamaForCausalLM", "llama", HIDDEN_SIZE, 61, VOCABULARY)
    launch = SpeculationShape(tp=run.ranks)
    (batch,) = workload_from_model(shape, launch, {1: 1.0}).batches
    requests = [PayloadRequest(one.size_bytes, one.graph_count) for one in batch.gathers]
    order: list[Settings] = [{}, found, found, {}] * run.options.gather_blocks
    with run.session() as (session, _):
        launches = [session.bench.check_collectives(one, requests) for one in order]
    keep(run, "gather", launches, {"profile": run.options.found.name})
    for one in launches:
        if not one.is_complete:
            raise RuntimeError(f"{one.outcome} under {dict(one.settings)}: {one.message}")
    arms = {key: [one for one in launches if bool(one.settings) is key] for key in (False, True)}
    saved_us = 0.0
    for row in batch.gathers:
        base_us, found_us = (
            statistics.median(one.gather_median_us[row.size_bytes] for one in arms[key])
            for key in (False, True)
        )
        saved_us += row.count * (base_us - found_us)
        run.say(
            f"gather: {row.count} a step ({row.origin}) of {row.size_bytes} B a rank:"
            f" {base_us:.2f} -> {found_us:.2f} us, ratio {found_us / base_us:.3f}"
        )
    run.say(f"gather: saves {saved_us / 1e3:.4f} ms a step, {len(arms[True])} launches an arm")


def keep(run: Run, name: str, launches: Sequence[Launch], more: object = None) -> None:
    """Write raw launches."""
    document = {"launches": [record_from_launch(launch) for launch in launches], "more": more}
    run.path(f"{name}-raw.json").write_text(json.dumps(document) + "\n")


STAGES: dict[str, Callable[[Run], None]] = {
    "search": search,
    "rival": rival,
    "faults": faults,
    "bench": bench,
    "fork": fork,
    "aa": aa,
    "torch": torch,
    "record": record,
    "gather": gather,
}
ON_REQUEST = ("gather",)


def main() -> int:
    """Run the stages asked for; a stage that breaks does not stop the next."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--transport", action="append", choices=sorted(TRANSPORTS))
    parser.add_argument("--stage", action="append", choices=list(STAGES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--program", default=f"{sys.executable} -m nccltune")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--search-s", type=float, help="limit; without it by the ranks")
    parser.add_argument("--bench-launches", type=int, default=4)
    parser.add_argument("--aa-duels", type=int, default=10)
    parser.add_argument("--aa-blocks", type=int, default=2)
    parser.add_argument("--rival-blocks", type=int, default=4)
    parser.add_argument("--torch-launches", type=int, default=3)
    parser.add_argument("--found", type=Path, help="profile of the stage gather")
    parser.add_argument("--gather-blocks", type=int, default=2, help="of four launches")
    parser.add_argument("--candidates", type=int, default=220)
    parser.add_argument("--try", dest="tries", action="append", default=[], help="record: first")
    parser.add_argument("--record-s", type=float, default=240.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    is_good = True
    for stage in options.stage or [name for name in STAGES if name not in ON_REQUEST]:
        for transport in options.transport or ["nvlink", "shm"]:
            program = shlex.split(options.program)
            run = Run(transport, options.out.resolve(), program, options.ranks, options)
            began = time.monotonic()
            try:
                STAGES[stage](run)
            except Exception as error:  # noqa: BLE001 - the next stage is worth its device time
                run.say(f"{stage}: BROKEN: {type(error).__name__}: {error}")
                is_good = False
            run.say(f"({stage} took {time.monotonic() - began:.0f} s)")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
