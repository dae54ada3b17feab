"""The model of effects, and what is proposed and chosen by it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.search.model import SETTING_COST, WORST_LOG, Model, Observed
from nccltune.search.space import Space
from tests.support.model_bench import ModelBench
from tests.support.studies import FACTS, open_trials

if TYPE_CHECKING:
    from nccltune.measurement import Settings
    from nccltune.search.space import Params

CHOICES = {
    "protocol": (None, "ll", "simple"),
    "channels": (None, "1", "2", "4", "8", "16"),
    "buffer": (None, "small", "large"),
}
GUARD = 67108864


def params(**chosen: str) -> Params:
    return {**dict.fromkeys(CHOICES), **chosen}


def seen(log_score: float, guard: float = 0.0, **chosen: str) -> Observed:
    return Observed(params(**chosen), log_score, {GUARD: guard})


def model_of(*trials: Observed, noise: float = 0.01) -> Model:
    return Model(CHOICES, [seen(0.0), *trials], noise, {GUARD: 0.005})


def test_effects_add_up() -> None:
    model = model_of(seen(-0.1, protocol="ll"), seen(-0.05, buffer="large"))
    (both,) = model.expect([params(protocol="ll", buffer="large")])

    assert both.log_score == pytest.approx(-0.15 + 2 * SETTING_COST, abs=0.01)


def test_a_choice_of_many_trials_is_known_better_than_its_luckiest_one() -> None:
    lucky = seen(-0.13, protocol="ll", buffer="small")
    others = [seen(-0.1, protocol="ll", channels=channels) for channels in ("1", "4", "16")]
    (expected,) = model_of(lucky, *others, noise=0.03).expect([lucky.params])

    assert -0.13 < expected.log_score - 2 * SETTING_COST < -0.1


def test_neighbouring_values_are_alike() -> None:
    model = model_of(seen(-0.1, channels="8"))
    near, far = model.expect([params(channels="4"), params(channels="1")])

    assert near.log_score < far.log_score < 0.0


def test_how_bad_a_bad_choice_is_does_not_matter() -> None:
    one, other = (model_of(seen(worst, protocol="simple")) for worst in (WORST_LOG, 2.0))

    assert one.expect([params(protocol="simple")]) == other.expect([params(protocol="simple")])


def test_guards_add_up_too() -> None:
    """Broken by one setting alone, and held again together with another."""
    model = model_of(
        seen(-0.07, 0.04, protocol="ll"),
        seen(-0.02, -0.09, channels="16"),
    )
    alone, together = model.expect([params(protocol="ll"), params(protocol="ll", channels="16")])

    assert not alone.holds
    assert together.holds
    assert next(iter(model.proposals(random.Random(0)))) == params(protocol="ll", channels="16")


def test_a_guard_that_was_not_measured_says_nothing() -> None:
    unmeasured = Observed(params(protocol="ll"), -0.1, {})
    (expected,) = model_of(unmeasured, seen(0.0, 0.2, channels="1")).expect([unmeasured.params])

    assert expected.log_score < -0.05
    assert expected.holds


def test_proposals_change_one_or_two_dimensions_of_the_best_and_name_each_once() -> None:
    best = params(protocol="ll", channels="8")
    model = model_of(seen(-0.1, protocol="ll", channels="8"), seen(0.1, channels="1"))
    proposed = list(model.proposals(random.Random(0)))

    changes = [sum(one[name] != best[name] for name in CHOICES) for one in proposed]
    assert set(changes) == {1, 2}
    assert len({tuple(one.items()) for one in proposed}) == len(proposed)
    assert len(proposed) == (2 + 5 + 2) + (2 * 5 + 2 * 2 + 5 * 2)


def test_proposals_with_nothing_known_are_a_matter_of_chance() -> None:
    first = {str(next(iter(model_of().proposals(random.Random(seed))))) for seed in range(8)}

    assert len(first) > 2


def effect(settings: Settings, size_bytes: int) -> float:
    """128 threads and a cap of 32 channels pay, buffers do nothing."""
    del size_bytes
    threads = 0.9 if settings.get("NCCL_NTHREADS") == "128" else 1.0
    return threads * (0.96 if settings.get("NCCL_MAX_CTAS") == "32" else 1.0)


def test_finalists_come_without_what_does_nothing(tmp_path: Path) -> None:
    trials = open_trials(tmp_path / "one.journal", ModelBench(effect))
    trials.measure_baseline()
    threads, cap = {"NCCL_NTHREADS": "128"}, {"NCCL_MAX_CTAS": "32"}
    pays = {**threads, **cap}
    idle = {"NCCL_BUFFSIZE": "1048576"}
    outside = {"NCCL_CROSS_NIC": "1"}
    for settings in ({**pays, **idle}, {**threads, **idle}, threads, cap, idle, outside):
        trials.measure(settings)

    assert trials.finalists(3) == [pays, threads, cap]
    assert outside in trials.finalists(9)
    assert trials.finalists(1) == [pays]


def test_finalists_keep_one_setting_at_least(tmp_path: Path) -> None:
    trials = open_trials(tmp_path / "one.journal", ModelBench())
    trials.measure_baseline()
    trials.measure({"NCCL_BUFFSIZE": "1048576", "NCCL_NTHREADS": "512"})

    (only,) = trials.finalists(3)
    assert len(only) == 1


def test_propose_leaves_out_what_nccl_would_take_for_another_candidate(tmp_path: Path) -> None:
    trials = open_trials(tmp_path / "one.journal", ModelBench(effect), sampler="model")
    space = Space(FACTS, {})
    trials.measure_baseline()
    trials.measure({"NCCL_MAX_CTAS": "1"})
    for _ in range(20):
        settings = trials.propose()
        assert settings is not None
        known = space.params(settings)
        assert known is not None
        assert space.settings(known) == settings
        trials.measure(settings)
    assert len({str(one.launch.settings) for one in trials.finished}) == len(trials.finished)
