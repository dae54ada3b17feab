from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from nccltune.measurement import Launch, Outcome, Settings
from nccltune.search.ablation import ablate
from tests.support.noisy_bench import GUARD_SIZE, REQUESTS, NoisyBench, PlainObjective, scaled

PROFILE = {"NCCL_PROTO": "allreduce:LL", "NCCL_NTHREADS": "512", "NCCL_BUFFSIZE": "1048576"}
OBJECTIVE = PlainObjective()


def proto_pays(settings: Settings) -> Mapping[int, float]:
    """Only the protocol matters: 20 %."""
    return scaled(0.8 if "NCCL_PROTO" in settings else 1.0)


def either_is_enough(settings: Settings) -> Mapping[int, float]:
    """Threads and buffers do the same job: 20 % by either of them, as much by both."""
    has_either = "NCCL_NTHREADS" in settings or "NCCL_BUFFSIZE" in settings
    return scaled((0.8 if has_either else 1.0) * (0.9 if "NCCL_PROTO" in settings else 1.0))


def buffers_save_the_guard(settings: Settings) -> Mapping[int, float]:
    """The protocol pays, and slows the guard by 20 % unless the buffers are set too."""
    if "NCCL_PROTO" not in settings:
        return {}
    return scaled(0.8, 1.0 if "NCCL_BUFFSIZE" in settings else 1.2)


def test_ablate_idle_settings_are_dropped() -> None:
    reduced, steps = ablate(NoisyBench(proto_pays), PROFILE, REQUESTS, OBJECTIVE)

    assert reduced == {"NCCL_PROTO": "allreduce:LL"}
    assert [(step.variable, step.is_dropped) for step in steps] == [
        ("NCCL_PROTO", False),
        ("NCCL_NTHREADS", True),
        ("NCCL_BUFFSIZE", True),
    ]
    assert steps[0].score_ratio_without == pytest.approx(1.25)
    assert steps[1].score_ratio_without == pytest.approx(1.0)


def test_ablate_launches_forth_and_back() -> None:
    bench = NoisyBench(proto_pays)

    ablate(bench, PROFILE, REQUESTS, OBJECTIVE, noise=0.005)

    forth = [{}, PROFILE, *({k: v for k, v in PROFILE.items() if k != n} for n in PROFILE)]
    assert bench.launches[:10] == [*forth, *reversed(forth)]
    reduced = {"NCCL_PROTO": "allreduce:LL"}
    assert bench.launches[10:] == [{}, PROFILE, reduced, reduced, PROFILE, {}]


def test_ablate_linear_drift_cancels() -> None:
    bench = NoisyBench(proto_pays, drift=0.02)

    reduced, steps = ablate(bench, PROFILE, REQUESTS, OBJECTIVE)

    assert reduced == {"NCCL_PROTO": "allreduce:LL"}
    assert steps[0].score_ratio_without == pytest.approx(1.25)


def test_ablate_more_noise_takes_more_rounds() -> None:
    counts = []
    for noise in (0.005, 0.014, 0.05):
        bench = NoisyBench(lambda settings: scaled(0.9 ** len(settings)))
        ablate(bench, PROFILE, REQUESTS, OBJECTIVE, noise=noise)
        counts.append(len(bench.launches))

    assert counts == [10, 20, 30]


def test_ablate_settings_that_stand_in_for_each_other_keep_one() -> None:
    reduced, steps = ablate(NoisyBench(either_is_enough), PROFILE, REQUESTS, OBJECTIVE)

    assert len(reduced) == 2
    assert "NCCL_PROTO" in reduced
    assert sum(step.is_dropped for step in steps) == 1


def test_ablate_puts_back_the_dearest_first() -> None:
    costs = {"NCCL_PROTO": 0.004, "NCCL_NTHREADS": 0.0045, "NCCL_BUFFSIZE": 0.0049}

    def effect(settings: Settings) -> Mapping[int, float]:
        missing = [cost for name, cost in costs.items() if name not in settings]
        return scaled(math.exp(math.fsum(missing) + 0.2 * ("NCCL_ALGO" not in settings)))

    profile = {**PROFILE, "NCCL_ALGO": "allreduce:Ring"}
    reduced, _ = ablate(NoisyBench(effect), profile, REQUESTS, OBJECTIVE)

    assert set(reduced) == {"NCCL_ALGO", "NCCL_BUFFSIZE"}


def test_ablate_never_drops_everything() -> None:
    reduced, steps = ablate(NoisyBench(), PROFILE, REQUESTS, OBJECTIVE)

    assert len(reduced) == 1
    assert sum(step.is_dropped for step in steps) == 2


def test_ablate_setting_that_saves_a_guard_is_kept() -> None:
    reduced, steps = ablate(NoisyBench(buffers_save_the_guard), PROFILE, REQUESTS, OBJECTIVE)

    assert set(reduced) == {"NCCL_PROTO", "NCCL_BUFFSIZE"}
    assert steps[2].score_ratio_without == pytest.approx(1.0)
    assert not steps[2].is_dropped


def test_ablate_guard_that_is_slow_anyway_keeps_nothing_alive() -> None:
    def effect(settings: Settings) -> Mapping[int, float]:
        return scaled(0.8, 1.04) if "NCCL_PROTO" in settings else {}

    reduced, _ = ablate(NoisyBench(effect), PROFILE, REQUESTS, OBJECTIVE)

    assert set(reduced) == {"NCCL_PROTO"}


def test_ablate_baseline_settings_are_never_left_out() -> None:
    pinned = {"NCCL_SOCKET_IFNAME": "lo"}
    bench = NoisyBench(proto_pays)

    reduced, steps = ablate(bench, {**pinned, **PROFILE}, REQUESTS, OBJECTIVE, baseline=pinned)

    assert reduced == {**pinned, "NCCL_PROTO": "allreduce:LL"}
    assert all("NCCL_SOCKET_IFNAME" in launch for launch in bench.launches)
    assert [step.variable for step in steps] == list(PROFILE)


def test_ablate_one_setting_alone_needs_no_launch() -> None:
    bench = NoisyBench()

    assert ablate(bench, {"NCCL_PROTO": "LL"}, REQUESTS, OBJECTIVE) == ({"NCCL_PROTO": "LL"}, ())
    assert bench.launches == []


def test_ablate_profile_that_breaks_without_a_setting_keeps_it() -> None:
    def fails(settings: Settings) -> Outcome:
        is_broken = settings and "NCCL_BUFFSIZE" not in settings
        return Outcome.CRASHED if is_broken else Outcome.OK

    reduced, steps = ablate(NoisyBench(proto_pays, fails=fails), PROFILE, REQUESTS, OBJECTIVE)

    assert set(reduced) == {"NCCL_PROTO", "NCCL_BUFFSIZE"}
    assert steps[2].score_ratio_without is None


def test_ablate_host_fault_once_is_retried() -> None:
    bench = NoisyBench(proto_pays, outcomes={1: Outcome.HOST_BUSY, 3: Outcome.HOST_BUSY})

    reduced, steps = ablate(bench, PROFILE, REQUESTS, OBJECTIVE)

    assert set(reduced) == {"NCCL_PROTO"}
    assert all(step.score_ratio_without is not None for step in steps)


def test_ablate_whole_profile_failing_keeps_everything() -> None:
    bench = NoisyBench(
        proto_pays, fails=lambda settings: Outcome.TIMEOUT if settings == PROFILE else Outcome.OK
    )

    reduced, steps = ablate(bench, PROFILE, REQUESTS, OBJECTIVE)

    assert reduced == PROFILE
    assert all(step.score_ratio_without is None for step in steps)


def test_ablate_without_time_keeps_everything() -> None:
    bench = NoisyBench(proto_pays)

    reduced, steps = ablate(bench, PROFILE, REQUESTS, OBJECTIVE, deadline=lambda: True)

    assert reduced == PROFILE
    assert bench.launches == []
    assert [step.is_dropped for step in steps] == [False] * 3


def test_ablate_time_over_before_all_are_confirmed_drops_what_was_measured() -> None:
    bench = NoisyBench(proto_pays)

    reduced, steps = ablate(
        bench, PROFILE, REQUESTS, OBJECTIVE, noise=0.005, deadline=lambda: len(bench.launches) >= 10
    )

    assert sum(step.is_dropped for step in steps) == 1
    assert len(reduced) == 2


def test_ablate_second_round_cut_short_counts_for_nothing() -> None:
    bench = NoisyBench(proto_pays)

    _, steps = ablate(
        bench, PROFILE, REQUESTS, OBJECTIVE, noise=0.02, deadline=lambda: len(bench.launches) >= 13
    )

    assert steps[0].score_ratio_without == pytest.approx(1.25)


def test_ablate_tells_every_launch() -> None:
    told: list[Launch] = []
    bench = NoisyBench(proto_pays)

    ablate(bench, PROFILE, REQUESTS, OBJECTIVE, on_launch=told.append)

    assert len(told) == len(bench.launches)
    assert all(GUARD_SIZE in launch.median_us for launch in told)
