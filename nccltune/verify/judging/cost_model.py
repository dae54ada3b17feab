"""Which number of draft steps would serve fastest, from the arms that were measured.

A decode step with k >= 1 draft steps is a verify forward of k + 1 tokens, k draft forwards and what
speculation costs whatever k is, so its time is taken as a straight line: ``fixed_ms + per_step_ms *
k``. Plain decoding pays none of that and does not lie on the line (7.7 ms where the line of 2 and 5
steps would say 9.5: docs/results/one-h200-sglang). What was measured is used as it is; the
line only fills the gaps between measured arms. Accept length: ``accept_model``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccltune.stats import student_t_quantile
from nccltune.verify.judging.accept_model import (
    AcceptModel,
    AcceptPoint,
    AcceptSource,
    fit_accept_model,
)

_CONFIDENCE = 0.95
UNCHECKED_SHARE = 0.95
"""An estimate that nothing checks counts as a rival of the best from this share of its speed."""


@dataclass(frozen=True, slots=True)
class ArmPoint:
    """One measured arm.

    Attributes:
        num_steps: draft steps; 0 for plain decoding.
        ms_per_step: of a decode step, one a boot.
        accept_length: tokens a decode step; 1 for plain decoding.
        accept_by_position: decode steps that accepted exactly 0, 1, 2, ... draft tokens.
    """

    arm: str
    num_steps: int
    ms_per_step: tuple[float, ...]
    accept_length: float
    accept_by_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One number of steps.

    Attributes:
        tok_s: of one stream while it decodes, prefill left out.
        tok_s_low: lower end of the 95 % interval; None where nothing tells how sure it is.
        is_measured: an arm had this number of steps.
    """

    num_steps: int
    ms_per_step: float
    accept_length: float
    tok_s: float
    tok_s_low: float | None
    tok_s_high: float | None
    is_measured: bool


@dataclass(frozen=True, slots=True)
class CostModel:
    """A line through the measured arms, and what it says of each number of steps between them.

    Attributes:
        speculation_ms: what a decode step costs more as soon as there is any speculation, draft
            steps left out; None where plain decoding was not measured.
        df: degrees of freedom of the boot-to-boot noise.
        spare_arm_count: arms beyond the two that any line fits exactly; 0 leaves it unchecked.
        misfit_pct: how far the worst arm lies from the line.
        estimates: ascending in steps, from the fewest measured to the most.
        contenders: other numbers of steps that cannot be told from the best.
        notes: what to keep in mind, one sentence each.
    """

    fixed_ms: float
    per_step_ms: float
    speculation_ms: float | None
    df: int
    spare_arm_count: int
    misfit_pct: float
    accept_source: AcceptSource
    estimates: tuple[StepEstimate, ...]
    best: StepEstimate
    contenders: tuple[int, ...]
    notes: tuple[str, ...]

    def at(self, num_steps: int) -> StepEstimate | None:
        """Return the estimate for a number of steps; None beyond what was measured."""
        return next((one for one in self.estimates if one.num_steps == num_steps), None)

    @property
    def sentence(self) -> str:
        """The best number of steps, and how sure that is."""
        best = self.best
        basis = "measured" if best.is_measured else "by the cost model, not measured"
        text = f"{steps_in_words(best.num_steps)} would serve fastest: {best.tok_s:.1f} tok/s"
        text += f" while decoding ({basis}"
        if best.tok_s_low is not None and best.tok_s_high is not None:
            text += f", {best.tok_s_low:.1f} to {best.tok_s_high:.1f}"
        text += ")"
        if self.contenders:
            rivals = ", ".join(str(steps) for steps in self.contenders)
            text += f"; it cannot be told from {rivals}"
        if self.accept_source is AcceptSource.SIMULATED:
            text += "; for the acceptance that was set, and no other"
        return text


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no model was fitted."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Line:
    """Least squares over every boot that speculates, with the noise that boots of one arm show.

    Attributes:
        means_ms: of every measured arm, plain decoding (0) among them.
    """

    fixed_ms: float
    per_step_ms: float
    means_ms: Mapping[int, float]
    counts: Mapping[int, int]
    df: int
    noise_ms: float
    misfit_ms: float

    @classmethod
    def through(cls, boots_ms: Mapping[int, Sequence[float]]) -> _Line:
        every = [(steps, ms) for steps, row in boots_ms.items() for ms in row]
        pairs = [(steps, ms) for steps, ms in every if steps]
        middle_steps = statistics.fmean(steps for steps, _ in pairs)
        middle_ms = statistics.fmean(ms for _, ms in pairs)
        width = math.fsum((steps - middle_steps) ** 2 for steps, _ in pairs)
        slope = math.fsum((s - middle_steps) * (ms - middle_ms) for s, ms in pairs) / width
        fixed_ms = middle_ms - slope * middle_steps
        means_ms = {steps: statistics.fmean(row) for steps, row in boots_ms.items()}
        squares = math.fsum((ms - means_ms[steps]) ** 2 for steps, ms in every)
        df = len(every) - len(boots_ms)
        return cls(
            fixed_ms=fixed_ms,
            per_step_ms=slope,
            means_ms=means_ms,
            counts={steps: len(row) for steps, row in boots_ms.items()},
            df=df,
            noise_ms=math.sqrt(squares / df) if df else math.inf,
            misfit_ms=max(abs(ms - fixed_ms - slope * k) for k, ms in means_ms.items() if k),
        )

    @property
    def speculation_ms(self) -> float | None:
        return self.fixed_ms - self.means_ms[0] if 0 in self.means_ms else None

    @property
    def spare_arm_count(self) -> int:
        return sum(steps > 0 for steps in self.means_ms) - 2

    @property
    def misfit_pct(self) -> float:
        return 100.0 * max(
            abs(ms / (self.fixed_ms + self.per_step_ms * k) - 1.0)
            for k, ms in self.means_ms.items()
            if k
        )

    def at(self, steps: int) -> tuple[float, float]:
        """Return ms per step and the half width of its interval, infinite where nothing tells."""
        if steps in self.means_ms:
            return self.means_ms[steps], self._half_ms(1.0 / self.counts[steps])
        ms = self.fixed_ms + self.per_step_ms * steps
        counts = {k: count for k, count in self.counts.items() if k}
        if not self.spare_arm_count or steps < min(counts):
            return ms, math.inf
        total = sum(counts.values())
        middle = math.fsum(k * count for k, count in counts.items()) / total
        width = math.fsum(count * (k - middle) ** 2 for k, count in counts.items())
        share = 1.0 / total + (steps - middle) ** 2 / width
        # A curve shows as arms off the line; between them it may be off as far.
        return ms, self._half_ms(share) + self.misfit_ms

    def _half_ms(self, variance_share: float) -> float:
        if not self.df:
            return math.inf
        quantile = student_t_quantile(0.5 + 0.5 * _CONFIDENCE, self.df)
        return quantile * self.noise_ms * math.sqrt(variance_share)


def fit_cost_model(
    points: Sequence[ArmPoint], *, is_simulated: bool = False
) -> CostModel | Refusal:
    """Fit the line and find the best number of steps within what was measured.

    Args:
        points: arms that differ in the number of steps alone.
        is_simulated: the server made acceptance up as it was told to.
    """
    boots_ms: dict[int, list[float]] = {}
    for point in points:
        boots_ms.setdefault(point.num_steps, []).extend(point.ms_per_step)
    boots_ms = {steps: row for steps, row in sorted(boots_ms.items()) if row}
    if sum(steps > 0 for steps in boots_ms) < 2:
        return Refusal(
            "the cost of a draft step takes two arms that speculate and differ in the number of "
            f"steps; measured: {_listed(boots_ms) or 'none'}"
        )
    line = _Line.through(boots_ms)
    if line.per_step_ms <= 0.0 or line.fixed_ms <= 0.0:
        return Refusal(
            f"the arms measured ({_listed(boots_ms)}) give no cost of a draft step that makes "
            f"sense: {line.fixed_ms:.2f} ms fixed, {line.per_step_ms:.2f} ms a draft step"
        )
    accept = fit_accept_model(
        [AcceptPoint(p.num_steps, p.accept_length, p.accept_by_position) for p in points],
        is_simulated=is_simulated,
    )
    estimates = tuple(
        _estimate(steps, line, accept) for steps in range(min(boots_ms), max(boots_ms) + 1)
    )
    best = max(estimates, key=lambda one: one.tok_s)
    return CostModel(
        fixed_ms=line.fixed_ms,
        per_step_ms=line.per_step_ms,
        speculation_ms=line.speculation_ms,
        df=line.df,
        spare_arm_count=line.spare_arm_count,
        misfit_pct=line.misfit_pct,
        accept_source=accept.source,
        estimates=estimates,
        best=best,
        contenders=tuple(
            one.num_steps for one in estimates if one is not best and is_rival(one, best)
        ),
        notes=tuple(_notes(line, accept, min(boots_ms), max(boots_ms))),
    )


def is_rival(one: StepEstimate, best: StepEstimate) -> bool:
    """Whether ``one`` may well be as fast as ``best``."""
    if one.tok_s_high is None or best.tok_s_low is None:
        return max(one.tok_s, one.tok_s_high or 0.0) >= UNCHECKED_SHARE * best.tok_s
    return one.tok_s_high >= best.tok_s_low


def steps_in_words(num_steps: int) -> str:
    """Write ``plain decoding``, ``1 step``, ``2 steps``."""
    if num_steps == 0:
        return "plain decoding"
    return f"{num_steps} step{'s' if num_steps > 1 else ''}"


def _estimate(steps: int, line: _Line, accept: AcceptModel) -> StepEstimate:
    ms, half_ms = line.at(steps)
    length, half_length = accept.at(steps)
    tok_s = 1e3 * length / ms
    share = math.hypot(half_ms / ms, half_length / length)
    is_known = math.isfinite(share)
    return StepEstimate(
        num_steps=steps,
        ms_per_step=ms,
        accept_length=length,
        tok_s=tok_s,
        tok_s_low=tok_s * max(0.0, 1.0 - share) if is_known else None,
        tok_s_high=tok_s * (1.0 + share) if is_known else None,
        is_measured=steps in line.means_ms,
    )


def _notes(line: _Line, accept: AcceptModel, fewest: int, most: int) -> list[str]:
    notes = []
    if line.spare_arm_count:
        notes.append(f"the arm farthest from that line lies {line.misfit_pct:.1f} % off it")
    else:
        notes.append(
            "two arms that speculate make a line whatever they are: nothing checks it, and a "
            "number of steps that was not measured has no interval"
        )
    notes.append(accept.note)
    if not line.df:
        notes.append("one boot an arm says nothing of its own noise")
    beyond = f"more than {most}" if not fewest else f"fewer than {fewest} and more than {most}"
    notes.append(f"{beyond} steps were not measured: no guess")
    return notes


def _listed(boots_ms: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(steps_in_words(steps) for steps in boots_ms)
