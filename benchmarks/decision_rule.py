"""Simulate the rule that decides a duel: how often it claims what is not there, and what it finds.

    python benchmarks/decision_rule.py [--quick] [--json FILE]

Exits 1 if any false-claim rate is above the rule's error level; a quick run, which knows the rates
less well, allows itself two standard errors. The rule is that of docs/statistics.md; the full run's
output is in docs/results/decision-rule.txt. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nccltune.block_rule import Answer, Block, BlockRule, GuardAnswer  # noqa: E402

RULE = BlockRule()
NOISES = (0.01, 0.02, 0.03, 0.04)
GAINS = (0.03, 0.05, 0.08, 0.20)
DRIFT_PER_DUEL = 0.10
OUTLIER_SHARE = 0.05
OUTLIER_FACTOR = 3.0
LAUNCHES_PER_BLOCK = 4

Draw = Callable[[random.Random], float]


def draw_normal(source: random.Random) -> float:
    """Draw launch noise of standard deviation 1."""
    return source.gauss(0.0, 1.0)


def draw_heavy(source: random.Random) -> float:
    """Draw from Student's t with 3 df at standard deviation 1, with outliers three times as far."""
    square = math.fsum(source.gauss(0.0, 1.0) ** 2 for _ in range(3))
    value = source.gauss(0.0, 1.0) / math.sqrt(square)
    return OUTLIER_FACTOR * value if source.random() < OUTLIER_SHARE else value


@dataclass(frozen=True)
class Scenario:
    """How launches behave, and what the rule is told of their noise.

    Attributes:
        floor_share: recorded A/A noise over the true one; 0 when nothing was recorded.
        baseline_factor: noise of a baseline launch over the stated one.
        candidate_factor: the same of a candidate launch.
        drift_per_launch: log; linear over the whole duel.
        step_factor: a lasting jump, in units of the noise, at a random launch.
    """

    name: str
    floor_share: float = 0.0
    draw: Draw = draw_normal
    baseline_factor: float = 1.0
    candidate_factor: float = 1.0
    drift_per_launch: float = 0.0
    step_factor: float = 0.0


DRIFT = math.log1p(DRIFT_PER_DUEL) / (LAUNCHES_PER_BLOCK * RULE.max_block_count)
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("noise recorded exactly", floor_share=1.0),
        Scenario("noise not recorded"),
        Scenario("noise recorded at half", floor_share=0.5),
        Scenario("heavy tails, recorded", floor_share=1.0, draw=draw_heavy),
        Scenario("heavy tails, not recorded", draw=draw_heavy),
        Scenario("drift of 10 %", drift_per_launch=DRIFT),
        Scenario("drift, tails, not recorded", draw=draw_heavy, drift_per_launch=DRIFT),
        Scenario("lasting step of 3 sd", step_factor=3.0),
        Scenario("candidate 3x noisier", candidate_factor=3.0),
        Scenario("baseline 3x noisier", baseline_factor=3.0),
    )
}
POWER_SCENARIOS = tuple(SCENARIOS)[:6]


def blocks(
    scenario: Scenario, noise: float, effect: float, source: random.Random
) -> Iterator[Block]:
    """Yield the blocks of one duel, as many as the rule may ever use; ``effect`` is in log."""
    block_count = RULE.max_block_count
    step_at = source.randrange(LAUNCHES_PER_BLOCK * block_count) if scenario.step_factor else -1
    level = 0.0
    launch_idx = 0
    for _ in range(block_count):
        logs = []
        for is_candidate in (False, True, True, False):
            level += scenario.drift_per_launch
            if launch_idx == step_at:
                level += scenario.step_factor * noise
            factor = scenario.candidate_factor if is_candidate else scenario.baseline_factor
            value = level + factor * noise * scenario.draw(source)
            logs.append(value + effect if is_candidate else value)
            launch_idx += 1
        yield Block(*logs)


@dataclass
class NullCell:
    """Equal arms: how many of ``duel_count`` duels ended in a claim, by what the budget allowed.

    Attributes:
        gains_by_budget: launches that the budget allows -> false gains.
        losses_by_budget: the same for false losses.
        claims_by_launches: with the whole budget, launches used -> claims made there.
        ends_by_launches: the same for every way to end.
    """

    scenario: str
    noise: float
    duel_count: int
    gains_by_budget: dict[int, int]
    losses_by_budget: dict[int, int]
    claims_by_launches: dict[int, int]
    ends_by_launches: dict[int, int]

    def rate(self, budget: int) -> float:
        """Return the false-claim rate, gains and losses together."""
        return (self.gains_by_budget[budget] + self.losses_by_budget[budget]) / self.duel_count

    @property
    def worst_rate(self) -> float:
        """Return the highest rate over all budgets."""
        return max(self.rate(budget) for budget in self.gains_by_budget)

    @property
    def worst_error(self) -> float:
        """Return the standard error that the simulation leaves on the worst rate."""
        rate = max(self.worst_rate, 1.0 / self.duel_count)
        return math.sqrt(rate * (1.0 - rate) / self.duel_count)


def budgets() -> range:
    """Return every number of blocks that a budget may end at."""
    return range(RULE.looks[0], RULE.max_block_count + 1)


def simulate_null(task: tuple[str, float, int, int]) -> NullCell:
    """Run duels of equal arms, ended by the budget at every possible block."""
    name, noise, duel_count, seed = task
    scenario = SCENARIOS[name]
    source = random.Random(f"null {name} {noise} {seed}")
    gains, losses, claims, ends = (Counter[int]() for _ in range(4))
    claimed = {Answer.GAIN: gains, Answer.LOSS: losses}
    floor = scenario.floor_share * noise
    for _ in range(duel_count):
        so_far: list[Block] = []
        ended: Answer | None = None
        for block in blocks(scenario, noise, 0.0, source):
            so_far.append(block)
            count = len(so_far)
            if count < RULE.looks[0]:
                continue
            if ended is None and count in RULE.looks:
                answer, _ = RULE.decide(so_far, floor=floor)
                if answer is not Answer.CONTINUE:
                    ended = answer
                    ends[LAUNCHES_PER_BLOCK * count] += 1
                    claims[LAUNCHES_PER_BLOCK * count] += answer in claimed
            # Decided before the budget ended; or at its very end, by all that is left to spend.
            answer = ended or RULE.decide(so_far, floor=floor, is_last=True)[0]
            if answer in claimed:
                claimed[answer][LAUNCHES_PER_BLOCK * count] += 1
            if ended is not None:
                for later in range(count + 1, RULE.max_block_count + 1):
                    if ended in claimed:
                        claimed[ended][LAUNCHES_PER_BLOCK * later] += 1
                break
    sizes = [LAUNCHES_PER_BLOCK * count for count in budgets()]
    looks = [LAUNCHES_PER_BLOCK * look for look in RULE.looks]
    by_budget = ({size: tally[size] for size in sizes} for tally in (gains, losses))
    by_launches = ({size: tally[size] for size in looks} for tally in (claims, ends))
    return NullCell(name, noise, duel_count, *by_budget, *by_launches)


@dataclass
class PowerCell:
    """A real gain: how often it was found, and with how many launches."""

    scenario: str
    noise: float
    gain: float
    duel_count: int
    found_count: int
    launch_total: int
    answers: dict[str, int]


def simulate_power(task: tuple[str, float, float, int, int]) -> PowerCell:
    """Run duels of a candidate that really is ``gain`` faster, with the whole budget."""
    name, noise, gain, duel_count, seed = task
    scenario = SCENARIOS[name]
    source = random.Random(f"power {name} {noise} {gain} {seed}")
    answers = Counter[str]()
    launch_total = 0
    for _ in range(duel_count):
        so_far: list[Block] = []
        for block in blocks(scenario, noise, math.log1p(-gain), source):
            so_far.append(block)
            if len(so_far) in RULE.looks:
                answer, _ = RULE.decide(so_far, floor=scenario.floor_share * noise)
                if answer is not Answer.CONTINUE:
                    break
        answers[answer.value] += 1
        launch_total += LAUNCHES_PER_BLOCK * len(so_far)
    found = answers[Answer.GAIN.value]
    return PowerCell(name, noise, gain, duel_count, found, launch_total, dict(answers))


@dataclass
class GuardCell:
    """One guard at a true ratio: how the rule ends."""

    ratio: float
    noise: float
    duel_count: int
    launch_total: int
    answers: dict[str, int]


def simulate_guard(task: tuple[float, float, int, int]) -> GuardCell:
    """Decide a guard whose true ratio is given, noise not recorded."""
    ratio, noise, duel_count, seed = task
    source = random.Random(f"guard {ratio} {noise} {seed}")
    scenario = SCENARIOS["noise not recorded"]
    answers = Counter[str]()
    launch_total = 0
    for _ in range(duel_count):
        so_far: list[Block] = []
        answer = GuardAnswer.MORE
        for block in blocks(scenario, noise, math.log(ratio), source):
            so_far.append(block)
            answer, _ = RULE.decide_guard(so_far)
            if answer is not GuardAnswer.MORE:
                break
        answers[answer.value] += 1
        launch_total += LAUNCHES_PER_BLOCK * len(so_far)
    return GuardCell(ratio, noise, duel_count, launch_total, dict(answers))


@dataclass
class Results:
    """Everything that one run of this benchmark found."""

    rule: BlockRule
    seed: int
    null: list[NullCell]
    power: list[PowerCell]
    guards: list[GuardCell]
    allowed_errors: float

    @property
    def is_within_level(self) -> bool:
        """Whether no false-claim rate is above the rule's error level."""
        return all(
            cell.worst_rate - self.allowed_errors * cell.worst_error <= self.rule.total_level
            for cell in self.null
        )


def simulate(null_count: int, power_count: int, seed: int, allowed_errors: float) -> Results:
    """Run every cell on all cores."""
    null_tasks = [(name, noise, null_count, seed) for name in SCENARIOS for noise in NOISES]
    power_tasks = [
        (name, noise, gain, power_count, seed)
        for name in POWER_SCENARIOS
        for noise in NOISES
        for gain in GAINS
    ]
    guard_tasks = [
        (ratio, noise, power_count, seed) for ratio in (1.00, 1.02, 1.05, 1.10) for noise in NOISES
    ]
    with ProcessPoolExecutor() as pool:
        null = pool.map(simulate_null, null_tasks)
        power = pool.map(simulate_power, power_tasks)
        guards = pool.map(simulate_guard, guard_tasks)
        return Results(RULE, seed, list(null), list(power), list(guards), allowed_errors)


def null_lines(cells: Sequence[NullCell]) -> Iterator[str]:
    """Format the false claims of equal arms."""
    sizes = [LAUNCHES_PER_BLOCK * count for count in budgets()]
    yield f"False claims, equal arms ({cells[0].duel_count} duels a row): share of duels, in %,"
    yield "that claim a gain or a loss when the budget allows so many launches"
    yield (
        f"{'arms and noise':<27}{'noise':>6} "
        + "".join(f"{size:>6}" for size in sizes)
        + "   worst"
    )
    for cell in cells:
        rates = "".join(f"{100 * cell.rate(size):6.2f}" for size in sizes)
        worst = f"{100 * cell.worst_rate:5.2f} +- {100 * cell.worst_error:.2f}"
        yield f"{cell.scenario:<27}{100 * cell.noise:4.0f} % {rates}   {worst}"


def where_lines(cells: Sequence[NullCell]) -> Iterator[str]:
    """Format where the duels of equal arms end when the budget is whole."""
    looks = [LAUNCHES_PER_BLOCK * look for look in RULE.looks]
    yield "The same duels with the whole budget: share that ends after exactly so many launches,"
    yield "in %, and of it after the slash the share that ends there with a false claim"
    yield f"{'arms and noise':<27}{'noise':>6} " + "".join(f"{size:>13}" for size in looks)
    for cell in cells:
        shares = "".join(
            f"{100 * cell.ends_by_launches[size] / cell.duel_count:7.2f}/"
            f"{100 * cell.claims_by_launches[size] / cell.duel_count:<5.2f}"
            for size in looks
        )
        yield f"{cell.scenario:<27}{100 * cell.noise:4.0f} % {shares}"


def power_lines(cells: Sequence[PowerCell]) -> Iterator[str]:
    """Format what is found of real gains."""
    yield f"Real gains ({cells[0].duel_count} duels a cell): share found in %, mean launches used"
    yield f"{'arms and noise':<27}{'noise':>6} " + "".join(
        f"{100 * gain:10.0f} %" for gain in GAINS
    )
    rows = {(cell.scenario, cell.noise): "" for cell in cells}
    for cell in cells:
        found = 100 * cell.found_count / cell.duel_count
        used = cell.launch_total / cell.duel_count
        rows[cell.scenario, cell.noise] += f"{found:7.1f} {used:4.1f}"
    for (scenario, noise), text in rows.items():
        yield f"{scenario:<27}{100 * noise:4.0f} % {text}"


def guard_lines(cells: Sequence[GuardCell]) -> Iterator[str]:
    """Format how guards are decided."""
    yield f"One guard, noise not recorded ({cells[0].duel_count} duels a row): ends in %"
    yield "true ratio   noise   accepted   rejected    open  launches"
    for cell in cells:
        shares = [100 * cell.answers.get(answer, 0) / cell.duel_count for answer in GuardAnswer]
        used = cell.launch_total / cell.duel_count
        yield (
            f"{cell.ratio:<12.2f}{100 * cell.noise:4.0f} %{shares[0]:11.1f}{shares[1]:11.1f}"
            f"{shares[2]:8.1f}{used:10.1f}"
        )


def report_lines(results: Results) -> Iterator[str]:
    """Format the whole report."""
    levels = ", ".join(
        f"{LAUNCHES_PER_BLOCK * look}: {100 * level:.1f}"
        for look, level in zip(RULE.looks, RULE.levels, strict=True)
    )
    yield f"Rule: looks after so many launches, error level spent in %: {levels};"
    yield f"smallest gain worth having {100 * RULE.min_gain:.0f} %; seed {results.seed}"
    for section in (
        null_lines(results.null),
        where_lines(results.null),
        power_lines(results.power),
        guard_lines(results.guards),
    ):
        yield ""
        yield from section
    worst = max(results.null, key=lambda cell: cell.worst_rate)
    verdict = "within" if results.is_within_level else "ABOVE"
    yield ""
    yield (
        f"Highest false-claim rate at any number of launches: {100 * worst.worst_rate:.2f} % "
        f"+- {100 * worst.worst_error:.2f} ({worst.scenario}, noise {100 * worst.noise:.0f} %): "
        f"{verdict} {100 * RULE.total_level:.0f} %"
    )


def main() -> int:
    """Run, print, and say by the exit status whether the rule keeps its promise."""
    parser = argparse.ArgumentParser(description="simulate the decision rule")
    parser.add_argument("--quick", action="store_true", help="a tenth of the duels")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the raw counts to this file")
    options = parser.parse_args()
    started_s = time.perf_counter()
    if options.quick:
        results = simulate(1_000, 300, options.seed, allowed_errors=2.0)
    else:
        results = simulate(10_000, 3_000, options.seed, allowed_errors=0.0)
    print("\n".join(report_lines(results)))
    duration_s = time.perf_counter() - started_s
    print(f"took {duration_s:.0f} s", file=sys.stderr, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")
    return 0 if results.is_within_level else 1


if __name__ == "__main__":
    sys.exit(main())
