"""Which streams tell the time of a step, and which only seem to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nccltune.errors import ServerError
from nccltune.verify.load.believing import check_timed
from nccltune.verify.model import Chunk, Run, Stream

STEPS, STEP_S = 250, 0.010


def run_of(arrivals: list[float], *, ttft_s: float = 0.08, steps: int = STEPS) -> Run:
    """Return an answer of two tokens a step, of which each arrives when it is said.

    Args:
        arrivals: seconds after the first token, one a step.
        ttft_s: seconds to the first token.
        steps: verify steps.
    """
    chunks = [Chunk(ttft_s, 1)]
    chunks += [Chunk(ttft_s + at_s, 3 + 2 * idx) for idx, at_s in enumerate(arrivals)]
    tokens = chunks[-1].tokens
    duration_s = chunks[-1].at_s
    stream = Stream(7, tokens, duration_s, tuple(chunks), steps, tokens / steps)
    return Run((stream,), duration_s)


def code_of(run: Run, info: Mapping[str, object] | None = None) -> str:
    try:
        check_timed(run, info or {})
    except ServerError as error:
        return error.code
    return ""


def together(count: int) -> list[float]:
    """Let the tokens of so many steps arrive at once, over and over."""
    return [STEP_S * count * -(-(idx + 1) // count) for idx in range(STEPS)]


@pytest.mark.parametrize(
    ("arrivals", "code"),
    [
        (together(1), ""),
        (together(2), ""),
        (together(5), ""),
        (together(20), "bursts"),
        (together(125), "bursts"),
        (together(250), "bursts"),
        ([0.0] * 249 + [0.002], "bursts"),
        ([0.0] * 125 + [0.002] * 125, "bursts"),
        ([0.00001 * idx for idx in range(250)], "bursts"),
        ([0.00001 * (idx + 1) for idx in range(249)] + [0.2], "bursts"),
        (
            [0.00001 * (idx + 1) for idx in range(125)] + [0.5 + 0.00001 * k for k in range(125)],
            "bursts",
        ),
    ],
    ids=[
        "even",
        "pairs",
        "fives",
        "twenties",
        "halves",
        "rest",
        "held",
        "two",
        "drained",
        "drained but one",
        "drained twice",
    ],
)
def test_steps_are_timed_only_if_they_came_one_after_the_other(
    arrivals: list[float], code: str
) -> None:
    assert code_of(run_of(arrivals, ttft_s=2.5 if arrivals[-1] < 1.0 else 0.08)) == code


def test_moment_at_which_the_host_stood_still_is_no_burst() -> None:
    even = [0.001 * (idx + 1) for idx in range(10)]

    assert (
        code_of(run_of([even[0], *(at_s + 0.1 for at_s in even[1:])], ttft_s=0.002, steps=10)) == ""
    )


@pytest.mark.parametrize(("interval", "code"), [(1, "bursts"), (40, ""), ("40", "bursts")])
def test_server_that_sends_so_many_tokens_at_once_is_no_burst(interval: object, code: str) -> None:
    assert code_of(run_of(together(20)), {"stream_interval": interval}) == code


def test_counts_that_run_ahead_of_the_tokens_are_no_time() -> None:
    """Ten times as many tokens are said to be there as are, until all are."""
    chunks = tuple(Chunk(0.08 + STEP_S * idx, min(500, 20 * idx + 1)) for idx in range(26))

    assert code_of(Run((Stream(7, 500, 2.6, chunks, STEPS, 2.0),), 2.6)) == "bursts"


@pytest.mark.parametrize(
    ("algorithm", "code"),
    [("EAGLE3", "no_verify_count"), ("NGRAM", "no_verify_count"), (None, ""), ("NONE", "")],
)
def test_server_that_speculates_has_to_count_its_steps(algorithm: object, code: str) -> None:
    chunks = tuple(Chunk(0.1 + 0.01 * idx, idx + 1) for idx in range(20))
    plain = Run((Stream(7, 20, chunks[-1].at_s, chunks),), chunks[-1].at_s)

    assert code_of(plain, {"speculative_algorithm": algorithm}) == code


def test_answer_in_one_piece_has_no_time() -> None:
    assert code_of(Run((Stream(7, 20, 1.0, (Chunk(1.0, 20),), 10, 2.0),), 1.0)) == "cannot_be_timed"


def test_steps_that_all_came_first_have_no_time() -> None:
    chunks = (Chunk(0.1, 3), Chunk(0.2, 4))

    assert code_of(Run((Stream(7, 4, 0.2, chunks, 1, 4.0),), 0.2)) == "cannot_be_timed"
