"""Token streams: how fast, how many accepted, and what is wrong with them on demand."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang.srt import wishes

WORDS = ("the", "river", "runs", "past", "an", "old", "mill", "and", "nobody", "looks")


@dataclass(frozen=True)
class Step:
    """What has come so far after one prefill or verify step."""

    token_count: int
    verify_count: int


@dataclass(frozen=True)
class Speed:
    """How long things take in this server, drawn once a boot."""

    prefill_ms: float
    prefill_token_us: float
    step_ms: float
    noise_pct: float
    accept_length: float

    @classmethod
    def of_boot(cls, num_steps: int, environ: Mapping[str, str]) -> Speed:
        """Take the wished speed, this boot's own noise and the ranks' environment into account."""
        boot = random.Random(wishes.text("SEED") or None)
        factor = wishes.factor(environ)
        factor *= 1.0 + boot.gauss(0.0, wishes.number("BOOT_NOISE_PCT")) / 100.0
        step_ms = wishes.number("STEP_MS", 1.0) + num_steps * wishes.number("DRAFT_STEP_MS")
        accepted = wishes.number("ACCEPT_LEN", 2.0) if num_steps else 1.0
        return cls(
            prefill_ms=wishes.number("PREFILL_MS", 1.0) * factor,
            prefill_token_us=wishes.number("PREFILL_TOKEN_US"),
            step_ms=step_ms * factor,
            noise_pct=wishes.number("NOISE_PCT"),
            accept_length=min(accepted, num_steps + 1.0),
        )


def run_steps(speed: Speed, prompt_tokens: int, wanted: int) -> Iterator[Step]:
    """Yield one step after another, each when its time has come."""
    noise = random.Random()
    due_s = time.perf_counter()
    due_s += (speed.prefill_ms + prompt_tokens * speed.prefill_token_us / 1000.0) / 1000.0
    done, verified, owed = min(1, wanted), 0, 0.0
    _wait_until(due_s)
    yield Step(done, verified)
    while done < wanted:
        owed += speed.accept_length
        taken = int(owed)
        owed -= taken
        due_s += speed.step_ms * (1.0 + noise.gauss(0.0, speed.noise_pct) / 100.0) / 1000.0
        done, verified = min(wanted, done + taken), verified + 1
        _wait_until(due_s)
        yield Step(done, verified)


def text_of(token_count: int) -> str:
    return " ".join(WORDS[idx % len(WORDS)] for idx in range(token_count))


def speculation(step: Step, num_steps: int) -> dict[str, object]:
    """Return the ``spec_*`` fields of a last chunk."""
    proposed = step.verify_count * num_steps
    correct = max(0, step.token_count - step.verify_count)
    return {
        "spec_accept_rate": correct / proposed if proposed else 0.0,
        "spec_accept_length": step.token_count / step.verify_count if step.verify_count else 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": step.verify_count,
    }


def _wait_until(moment_s: float) -> None:
    remaining_s = moment_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
