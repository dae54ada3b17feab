from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nccltune.verify.judging.numbers import summarize, summarize_arms
from nccltune.verify.model import Boot, Chunk, Run, Seen, Stream
from nccltune.verify.noise import boot_noise
from tests.support.verify_boots import DEFAULT, FOLK, PLAIN, a_boot, a_stream


def test_summarize_two_boots_averages_them_as_the_effect_is() -> None:
    boots = [a_boot(DEFAULT, 0, 16.0), a_boot(DEFAULT, 1, 25.0), a_boot(FOLK, 2, 99.0)]

    summary = summarize("default", boots)

    assert (summary.boot_count, summary.run_count, summary.tokens) == (2, 2, 1000)
    assert summary.ms_per_verify == pytest.approx(20.0)  # geometric
    assert summary.spread_pct == pytest.approx(100.0 * math.log(25 / 16) / math.sqrt(2.0))
    assert summary.ttft_short_ms == pytest.approx(50.0)
    assert summary.ttft_long_ms == pytest.approx(900.0)
    # 250 steps for the 499 tokens after the first.
    assert summary.itl_p50_ms == pytest.approx((16.0 + 25.0) / 2.0 * 250 / 499)
    assert summary.itl_p99_ms == pytest.approx(25.0 * 250 / 499)
    assert summary.start_s == 60.0


def test_summarize_tok_s_overall_and_mean_differ_as_runs_do() -> None:
    fast, slow = a_stream(10.0), a_stream(30.0)
    runs = (Run((fast,), 2.0), Run((slow,), 8.0))
    boot = replace(a_boot(DEFAULT, 0), runs=runs)

    summary = summarize("default", [boot])

    assert summary.tok_s == pytest.approx(1000 / 10.0)
    assert summary.tok_s_mean == pytest.approx((250.0 + 62.5) / 2.0)


def test_summarize_acceptance_weighs_streams_by_their_steps() -> None:
    long = replace(a_stream(10.0), verify_count=300, accept_length=2.0, accept_rate=0.5)
    short = replace(a_stream(10.0), verify_count=100, accept_length=1.0, accept_rate=0.0)
    boot = replace(a_boot(DEFAULT, 0), runs=(Run((long, short), 1.0),))

    summary = summarize("default", [boot])

    assert summary.accept_length == pytest.approx(1.75)
    assert summary.accept_rate == pytest.approx(0.375)


def test_summarize_positions_add_up_and_are_empty_where_one_stream_is_silent() -> None:
    told = [a_boot(DEFAULT, 0, by_position=(5, 3)), a_boot(DEFAULT, 1, by_position=(1, 2, 4))]

    assert summarize("default", told).accept_by_position == (6, 5, 4)
    assert summarize("default", [*told, a_boot(DEFAULT, 2)]).accept_by_position == ()


def test_summarize_plain_decoding_has_no_acceptance() -> None:
    summary = summarize("plain", [a_boot(PLAIN, 0, 11.0)])

    assert summary.ms_per_verify == pytest.approx(11.0)
    assert (summary.accept_length, summary.accept_rate) == (None, None)


def one_piece() -> Boot:
    stream = Stream(30, 500, 5.0, (Chunk(5.0, 500),), 250, 2.0, 0.5)
    return replace(a_boot(DEFAULT, 0), runs=(Run((stream,), 5.0),))


def test_summarize_answer_in_one_piece_has_no_step_time_and_no_latency() -> None:
    summary = summarize("default", [one_piece(), a_boot(DEFAULT, 1)])

    assert summary.ms_per_verify is None
    assert summary.spread_pct is None
    assert summarize("default", [one_piece()]).itl_p50_ms is None


def test_summarize_arms_without_boots_says_nothing_of_them() -> None:
    first, second = summarize_arms([DEFAULT, FOLK], [a_boot(DEFAULT, 0)])

    assert first.boot_count == 1
    assert first.spread_pct is None
    assert second.boot_count == 0
    assert (second.tok_s, second.tok_s_mean, second.ms_per_verify) == (None, None, None)


def test_summarize_one_simulating_boot_marks_the_arm() -> None:
    boots = [a_boot(DEFAULT, 0), a_boot(DEFAULT, 1, seen=Seen(is_simulated_acceptance=True))]

    assert summarize("default", boots).is_simulated
    assert not summarize("default", boots[:1]).is_simulated


def boots_of(default: Sequence[float], folk: Sequence[float]) -> list[Boot]:
    times = [*((DEFAULT, ms) for ms in default), *((FOLK, ms) for ms in folk)]
    return [a_boot(arm, position, ms) for position, (arm, ms) in enumerate(times)]


def test_boot_noise_is_that_of_boots_of_one_arm() -> None:
    source = random.Random(5)
    found = []
    for _ in range(300):
        first, second = (
            [ms * math.exp(source.gauss(0.0, 0.02)) for _ in range(4)] for ms in (10.0, 40.0)
        )
        sd, df = boot_noise(boots_of(first, second)) or (0.0, 0)
        assert df == 6
        found.append(sd)

    assert statistics.fmean(found) == pytest.approx(0.02, rel=0.1)


def test_boot_noise_with_one_disturbed_boot_stays_small() -> None:
    calm, folk = (10.0, 10.01, 9.99, 10.02), (9.0, 9.01, 9.02, 8.99)
    quiet, _ = boot_noise(boots_of(calm, folk)) or (0.0, 0)
    disturbed, _ = boot_noise(boots_of((14.0, *calm[1:]), folk)) or (1.0, 0)

    assert 0.0 < quiet < disturbed < 3.0 * quiet


def test_boot_noise_of_few_boots_is_not_known() -> None:
    assert boot_noise(boots_of((10.0, 11.0), (9.0, 9.1))) is None
    assert boot_noise([a_boot(DEFAULT, 0), a_boot(FOLK, 1)]) is None
    assert boot_noise([one_piece(), one_piece()]) is None
