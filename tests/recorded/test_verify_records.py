"""Verifies of real servers on real GPUs, judged anew: the README's sentences rest on them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from nccltune.cli.verify_answer import conclude
from nccltune.verify.judging.judgement import Cause, Judgement, Verdict
from nccltune.verify.record import load
from tests.support.hosts import REPOSITORY

RESULTS = REPOSITORY / "docs/results"


def judged(kept: str, folder: Path) -> Judgement:
    """Judge one record of docs/results, named by how its path begins, as verify does at its end."""
    (packed,) = RESULTS.glob(f"{kept}*.json.gz")
    path = folder / packed.name.removesuffix(".gz")
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return conclude(load(path)).judgement


@pytest.mark.parametrize(
    ("kept", "verdict", "words"),
    [
        (
            "two-h200-sglang/chain/record-20261130-031113",
            Verdict.GAIN,
            "found-shm saves 2.7 % (1.9 to 3.6 %) of the time per verify step of default; time to "
            "first token of the short prompt varies too much to compare",
        ),
        (
            "two-h200-sglang/chain/record-20261130-032041",
            Verdict.GAIN,
            "found-nvlink saves 1.0 % (0.8 to 1.3 %) of the time per verify step of default",
        ),
        (
            "two-h200-sglang/tuned-shm/record",
            Verdict.GAIN,
            "found-shm saves 3.4 % (3.1 to 3.7 %) of the time per verify step of default; time to "
            "first token of the short prompt varies too much to compare",
        ),
        (
            "one-h200-sglang/steps/record",
            Verdict.REGRESSION,
            "5 steps is slower than 2 steps: it takes 10.0 % (9.8 to 10.3 %) more time per verify",
        ),
        (
            "one-h200-sglang/again/record",
            Verdict.NO_DIFFERENCE,
            "no difference worth having: again saves 0.0 % (-0.1 to 0.1 %)",
        ),
        (
            "one-h200-sglang/profile/record",
            Verdict.INCONCLUSIVE,
            "nothing is claimed for routes-proof: NCCL is not on the path: tensor parallel size 1",
        ),
        (
            "two-h200-sglang/tuned-nvlink/record",
            Verdict.INCONCLUSIVE,
            "undecided: one block of 4 boots",
        ),
        (
            "two-h200-sglang/folk/record",
            Verdict.INCONCLUSIVE,
            "undecided: no whole block of 4 boots",
        ),
    ],
)
def test_kept_record_still_says_what_is_written_of_it(
    tmp_path: Path, kept: str, verdict: Verdict, words: str
) -> None:
    judgement = judged(kept, tmp_path)

    assert judgement.verdict is verdict
    assert judgement.sentence.startswith(words)
    assert Cause.SIMULATED in {reason.cause for reason in judgement.reasons}
