"""Baseline against candidate on fresh launches in ABBA order, until the block rule decides.

What a search found is the best of many noisy trials and so looks better than it is. Only launches
made afterwards may support a claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nccltune.block_rule import (
    MIN_BLOCK_COUNT,
    Answer,
    Block,
    BlockRule,
    Estimate,
    GuardAnswer,
)
from nccltune.measurement import Launch, PayloadRequest, Settings
from nccltune.search.result import DuelReport, Interval, Verdict

OnLaunch = Callable[[Launch], None]
"""Called after every launch, failed ones too."""
Deadline = Callable[[], bool]
"""Whether the time is over; asked before every block."""


class Launcher(Protocol):
    """What is needed of a bench here: that it launches afresh."""

    def launch(self, settings: Settings, requests: Sequence[PayloadRequest]) -> Launch:
        """Measure ``requests`` under ``settings``."""
        ...


class DuelObjective(Protocol):
    """What a duel must know of the search's objective."""

    @property
    def guard_sizes(self) -> tuple[int, ...]:
        """Payloads, in bytes, that must not get slower."""
        ...

    def log_score(self, candidate: Mapping[int, float], baseline: Mapping[int, float]) -> float:
        """Return the log of the score ratio of two launches, each given as size -> median in us."""
        ...


class LaunchFailedError(Exception):
    """A launch that was needed did not complete; never leaves a duel or an ablation.

    Attributes:
        is_unfit: the settings under test are to blame, so that nobody should use them.
    """

    def __init__(self, launch: Launch, role: str, *, is_unfit: bool) -> None:
        super().__init__(f"a fresh launch of {role} ended {launch.outcome}: {launch.message}")
        self.is_unfit = is_unfit


@dataclass(slots=True)
class FreshLaunches:
    """Launches one arm after another; a fault that proves nothing gets a second chance."""

    bench: Launcher
    requests: Sequence[PayloadRequest]
    on_launch: OnLaunch | None = None
    count: int = 0

    def medians_us(self, settings: Settings, role: str, *, is_tested: bool) -> dict[int, float]:
        """Launch once and return the medians by size.

        Args:
            settings: what to launch under.
            role: what to call it in a message.
            is_tested: a failure may be blamed on the settings, unlike one of the baseline.

        Raises:
            LaunchFailedError: the settings' own fault at once; anything else the second time.
        """
        launch = self._launch(settings)
        is_unfit = is_tested and launch.outcome.is_candidates_fault
        if not launch.is_complete and not is_unfit:
            launch = self._launch(settings)
            is_unfit = is_tested and launch.outcome.is_candidates_fault
        if not launch.is_complete:
            raise LaunchFailedError(launch, role, is_unfit=is_unfit)
        return launch.median_us

    def _launch(self, settings: Settings) -> Launch:
        launch = self.bench.launch(settings, self.requests)
        self.count += 1
        if self.on_launch is not None:
            self.on_launch(launch)
        return launch


@dataclass(slots=True)
class _Blocks:
    """Blocks so far: of the score, and of each guard."""

    objective: DuelObjective
    score: list[Block] = field(default_factory=list)
    guards: dict[int, list[Block]] = field(default_factory=dict)
    reference: Mapping[int, float] | None = None

    def add(self, medians: Sequence[Mapping[int, float]]) -> None:
        """Take in four launches in ABBA order."""
        if self.reference is None:
            self.reference = medians[0]
        reference = self.reference
        self.score.append(
            Block(*(self.objective.log_score(launch, reference) for launch in medians))
        )
        for size in self.objective.guard_sizes:
            block = Block(*(math.log(launch[size]) for launch in medians))
            self.guards.setdefault(size, []).append(block)


@dataclass(frozen=True, slots=True)
class _Look:
    """What the rule makes of the blocks so far."""

    answer: Answer
    score: Estimate
    guards: Mapping[int, tuple[GuardAnswer, Estimate]]
    is_last: bool

    @classmethod
    def at(cls, blocks: _Blocks, rule: BlockRule, noise: float | None, *, is_last: bool) -> _Look:
        answer, score = rule.decide(blocks.score, floor=noise, is_last=is_last)
        guards = {
            size: rule.decide_guard(blocks.guards.get(size, []), is_last=is_last)
            for size in blocks.objective.guard_sizes
        }
        return cls(answer, score, guards, is_last)

    def guards_that(self, answer: GuardAnswer) -> tuple[int, ...]:
        return tuple(size for size, (given, _) in self.guards.items() if given is answer)

    def verdict(self) -> tuple[Verdict, str] | None:
        """Return the verdict and its reason, or None while more blocks may still decide."""
        rejected = self.guards_that(GuardAnswer.REJECTED)
        if rejected:
            return Verdict.KEEP_DEFAULT, f"slower at a guarded size: {_in_words(rejected)}"
        if self.answer is Answer.LOSS:
            return Verdict.KEEP_DEFAULT, "slower than the defaults"
        if self.answer is Answer.NO_GAIN_WORTH_HAVING:
            return Verdict.KEEP_DEFAULT, "no gain worth having"
        undecided = self.guards_that(GuardAnswer.MORE)
        if self.answer is Answer.GAIN and not undecided:
            return Verdict.IMPROVED, ""
        if not self.is_last:
            return None
        if self.answer is Answer.GAIN:
            reason = f"faster, but guarded sizes stay undecided: {_in_words(undecided)}"
            return Verdict.INCONCLUSIVE, reason
        if self.score.block_count < MIN_BLOCK_COUNT:
            return Verdict.INCONCLUSIVE, f"the time was over before {MIN_BLOCK_COUNT} blocks"
        return Verdict.INCONCLUSIVE, f"undecided after {self.score.block_count} blocks"


def run_duel(
    bench: Launcher,
    candidate: Settings,
    requests: Sequence[PayloadRequest],
    objective: DuelObjective,
    *,
    baseline: Settings | None = None,
    rule: BlockRule | None = None,
    noise: float | None = None,
    deadline: Deadline = lambda: False,
    on_launch: OnLaunch | None = None,
) -> DuelReport:
    """Launch baseline and candidate in turns until the rule decides or the time is over.

    With ``candidate`` equal to ``baseline`` it is an A/A duel: every claim it makes is false.

    Args:
        bench: must really launch; a recording has no fresh launches to give.
        requests: payloads of every launch; they must cover what the objective scores and guards.
        objective: scores a pair of launches and names the guards.
        baseline: settings of the first arm; none by default.
        rule: when to stop and what may be claimed.
        noise: the host's A/A noise (``stats.aa_noise``), the least spread ever assumed.
        deadline: once it says that the time is over, the blocks so far decide.
        on_launch: called after every launch.
    """
    launches = FreshLaunches(bench, requests, on_launch)
    blocks = _Blocks(objective)
    rule = rule or BlockRule()
    while True:
        is_last = len(blocks.score) >= rule.max_block_count or deadline()
        look = _Look.at(blocks, rule, noise, is_last=is_last)
        end = look.verdict()
        if end is not None:
            return _report(candidate, look, launches.count, *end)
        try:
            blocks.add(list(_abba(launches, baseline or {}, candidate)))
        except LaunchFailedError as failure:
            verdict = Verdict.KEEP_DEFAULT if failure.is_unfit else Verdict.INCONCLUSIVE
            return _report(candidate, look, launches.count, verdict, str(failure))


def _abba(
    launches: FreshLaunches, baseline: Settings, candidate: Settings
) -> Iterator[dict[int, float]]:
    is_tested = dict(candidate) != dict(baseline)
    yield launches.medians_us(baseline, "the baseline", is_tested=False)
    for _ in range(2):
        yield launches.medians_us(candidate, "the candidate", is_tested=is_tested)
    yield launches.medians_us(baseline, "the baseline", is_tested=False)


def _report(
    candidate: Settings, look: _Look, launch_count: int, verdict: Verdict, message: str
) -> DuelReport:
    return DuelReport(
        settings=dict(candidate),
        block_count=look.score.block_count,
        launch_count=launch_count,
        score_ratio=look.score.ratio,
        interval=_interval(look.score),
        verdict=verdict,
        guards={size: _interval(estimate) for size, (_, estimate) in look.guards.items()},
        rejected_guards=look.guards_that(GuardAnswer.REJECTED),
        message=message,
    )


def _interval(estimate: Estimate) -> Interval:
    if estimate.block_count < MIN_BLOCK_COUNT:
        return Interval(0.0, math.inf, f"fewer than {MIN_BLOCK_COUNT} blocks of fresh launches")
    method = (
        f"t interval over {estimate.block_count} ABBA blocks of fresh launches, "
        f"{estimate.df} degrees of freedom, error level {100 * estimate.level:.2g} % at this look"
    )
    return Interval(estimate.ratio_low, estimate.ratio_high, method)


def _in_words(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size} B" for size in sizes)
