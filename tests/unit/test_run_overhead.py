"""The verdict of ``benchmarks/run_overhead.py``: a limit for the stand-in driver alone."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

judge = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "run_overhead.py"))["judge"]


@pytest.mark.parametrize(
    ("median_ms", "gpu_count", "words", "status"),
    [
        (80.0, 0, "within the limit of 80 ms", 0),
        (80.1, 0, "ABOVE the limit of 80 ms", 1),
        (12.0, 8, "real driver of 8 GPUs, for which there is no limit", 0),
        (300.0, 2, "real driver of 2 GPUs, for which there is no limit", 0),
    ],
)
def test_judge_holds_the_stand_in_alone_to_the_limit(
    median_ms: float, gpu_count: int, words: str, status: int
) -> None:
    verdict, found = judge(median_ms, 80.0, gpu_count)

    assert words in verdict
    assert f"{median_ms:.1f} ms" in verdict
    assert found == status
