"""What ``nccltune verify --json`` tells scripts, and what every form of its report is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nccltune.verify.boot_data import seen_to_json
from nccltune.verify.judging.cost_model import CostModel, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from nccltune.verify.judging.judgement import Comparison, GuardReport, Judgement
    from nccltune.verify.judging.numbers import ArmSummary
    from nccltune.verify.judging.prediction import Prediction
    from nccltune.verify.model import Arm, Boot
    from nccltune.verify.record import VerifyRecord


@dataclass(frozen=True, slots=True)
class Verified:
    """A verify and all that was concluded.

    Attributes:
        summaries: of each arm, in their order.
        predictions: by arm, where there are any.
        baseline_ids: stored verifies that a running server was held against.
        path: of the record; None where it could not be kept.
        marked: names of profiles that this verify marked as verified.
        next_command: what to do now; empty for nothing.
    """

    record: VerifyRecord
    judgement: Judgement
    summaries: tuple[ArmSummary, ...]
    predictions: Mapping[str, Prediction]
    baseline_ids: tuple[str, ...] = ()
    path: Path | None = None
    marked: tuple[str, ...] = ()
    next_command: str = ""

    @property
    def is_simulated(self) -> bool:
        """Whether any server made acceptance up."""
        return any(summary.is_simulated for summary in self.summaries)

    @property
    def main(self) -> Comparison | None:
        """The comparison that the verdict rests on; None where there is none."""
        return main_comparison(self.judgement)


def main_comparison(judgement: Judgement) -> Comparison | None:
    """Return the comparison with the largest effect among those that answer as the verdict does."""
    agreeing = [each for each in judgement.comparisons if each.answer is judgement.verdict]
    shown = agreeing or judgement.comparisons
    known = [each for each in shown if each.effect_pct is not None]
    if known:
        return max(known, key=lambda each: abs(each.effect_pct or 0.0))
    return shown[0] if shown else None


def verify_data(verified: Verified) -> dict[str, object]:
    """Lay out a verify for the envelope; numbers are not rounded."""
    record, judgement, main = verified.record, verified.judgement, verified.main
    return {
        **judgement_data(judgement),
        "arms": [
            _arm(arm, summary, record)
            for arm, summary in zip(record.arms, verified.summaries, strict=True)
        ],
        "effect_metric": None if main is None else str(main.metric),
        "predictions": {name: _prediction(each) for name, each in verified.predictions.items()},
        "cost_model": _cost_model(judgement.cost_model),
        "is_simulated_acceptance": verified.is_simulated,
        "id": record.id,
        "path": None if verified.path is None else str(verified.path),
        "created_at": record.created_at,
        "launch": list(record.launch),
        "url": record.url,
        "baseline_ids": list(verified.baseline_ids),
        "load": dict(record.load),
        "boots_made": len(record.boots),
        "boots_at_most": record.boot_total,
        "boots": [_boot(boot) for boot in record.boots],
        "fingerprint": None if record.fingerprint is None else record.fingerprint.to_json(),
        "problems": [asdict(problem) for problem in record.problems],
        "notes": list(record.notes),
        "verified_profiles": list(verified.marked),
        "next_command": verified.next_command,
    }


def judgement_data(judgement: Judgement) -> dict[str, object]:
    """Lay out the conclusion: the part that the record keeps too."""
    main = main_comparison(judgement)
    return {
        "verdict": str(judgement.verdict),
        "sentence": judgement.sentence,
        "effect_pct": None if main is None else main.effect_pct,
        "effect_ci_pct": _interval(None if main is None else main.effect_ci_pct),
        "reasons": [{"cause": str(each.cause), "text": each.text} for each in judgement.reasons],
        "comparisons": [_comparison(each) for each in judgement.comparisons],
    }


def _arm(arm: Arm, summary: ArmSummary, record: VerifyRecord) -> dict[str, object]:
    own = [boot for boot in record.boots if boot.arm == arm.name]
    profile = arm.profile
    return {
        "name": arm.name,
        "boots": len(own),
        "runs": [run for boot in own for run in _runs(boot)],
        "summary": asdict(summary),
        "profile": None if profile is None else profile.name,
        "settings": {} if profile is None else dict(profile.settings),
        "command": list(arm.argv),
        "num_steps": arm.num_steps,
        "is_speculative": arm.is_speculative,
    }


def _runs(boot: Boot) -> Iterator[dict[str, object]]:
    for run in boot.runs:
        yield {
            "boot": boot.position,
            "tokens": run.tokens,
            "duration_s": run.duration_s,
            "tok_s": run.tok_s,
            "ttft_ms": run.ttft_ms,
            "accept_length": run.accept_length,
            "accept_rate": run.accept_rate,
            "ms_per_verify": run.ms_per_verify,
        }


def _boot(boot: Boot) -> dict[str, object]:
    seen = seen_to_json(boot.seen)
    del seen["server_info"]  # for the record alone: it is long, and a command and flags say more
    return {
        "arm": boot.arm,
        "position": boot.position,
        "started_at": boot.started_at,
        "start_s": boot.start_s,
        "ms_per_verify": boot.ms_per_verify,
        "ms_per_token": boot.ms_per_token,
        "ttft_short_ms": list(boot.ttft_short_ms),
        "ttft_long_ms": list(boot.ttft_long_ms),
        **seen,
    }


def _comparison(comparison: Comparison) -> dict[str, object]:
    check = comparison.check
    return {
        "arm": comparison.arm,
        "baseline": comparison.baseline,
        "metric": str(comparison.metric),
        "answer": str(comparison.answer),
        "effect_pct": comparison.effect_pct,
        "effect_ci_pct": _interval(comparison.effect_ci_pct),
        "level": comparison.level,
        "block_count": comparison.block_count,
        "guards": [_guard(each) for each in comparison.guards],
        "is_wholly_in_effect": comparison.is_wholly_in_effect,
        "sentence": comparison.sentence,
        "prediction": None if check is None else asdict(check),
    }


def _guard(guard: GuardReport) -> dict[str, object]:
    return {
        "name": guard.name,
        "answer": str(guard.answer),
        "effect_pct": guard.effect_pct,
        "effect_ci_pct": _interval(guard.effect_ci_pct),
        "is_deciding": guard.is_deciding,
        "spread_pct": guard.spread_pct,
        "is_too_uneven": guard.is_too_uneven,
        "is_suspect": guard.is_suspect,
    }


def _prediction(prediction: Prediction) -> dict[str, object]:
    return asdict(prediction) | {"saved_ms": prediction.saved_ms}


def _cost_model(found: CostModel | Refusal | None) -> dict[str, object] | None:
    """Return the model, or why there is none under ``refusal``."""
    if found is None:
        return None
    if isinstance(found, Refusal):
        return {"refusal": found.reason}
    return {"refusal": None, **asdict(found), "best_num_steps": found.best.num_steps}


def _interval(interval: tuple[float, float] | None) -> list[float | None]:
    return [None, None] if interval is None else list(interval)
