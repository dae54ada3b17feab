from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.trial import TrialState

from nccltune.envvars import canonical, check_settings
from nccltune.errors import HostError
from nccltune.measurement import Outcome, Settings
from nccltune.recording import candidate_key
from nccltune.search.objective import FAILED_SCORE, GuardState
from nccltune.search.space import THRESHOLDS, Space
from nccltune.search.trials import CONSTRAINT, Trials
from tests.support.model_bench import ModelBench, RecordingOf
from tests.support.studies import FACTS, OBJECTIVE, open_trials, study_of

LL = {"NCCL_PROTO": "allreduce:LL"}
TREE = {"NCCL_ALGO": "allreduce:Tree"}
THREADS = {"NCCL_NTHREADS": "128"}
SCORED = set(OBJECTIVE.weights)
FAULTS = [outcome for outcome in Outcome if outcome.is_candidates_fault]
HOST_FAULTS = (Outcome.HOST_BUSY, Outcome.HOST_FAILED)

Open = Callable[..., Trials]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.journal"


def effect(settings: Settings, size_bytes: int) -> float:
    """LL helps and breaks the largest guard, 128 threads help, the tree is hopeless."""
    factor = 1.0
    if settings.get("NCCL_PROTO") == "allreduce:LL":
        factor *= 3.0 if size_bytes == 67108864 else 0.8
    if settings.get("NCCL_NTHREADS") == "128":
        factor *= 0.95
    if settings.get("NCCL_ALGO") == "allreduce:Tree":
        factor *= 3.0
    return factor


def started(path: Path, bench: ModelBench, **options: object) -> Trials:
    """Trials after the baseline."""
    trials = open_trials(path, bench, **options)  # type: ignore[arg-type]
    trials.measure_baseline()
    return trials


def test_measure_baseline_becomes_trial_0_once(path: Path) -> None:
    trials = started(path, ModelBench())
    trials.measure_baseline()

    assert [one.launch.settings for one in trials.finished] == [{}]
    assert trials.finished[0].assessment is not None
    assert trials.finished[0].assessment.score_ratio == 1.0
    assert len(trials.baselines) == 2
    assert [trial.value for trial in study_of(path).trials] == [1.0]


@pytest.mark.parametrize("outcome", [one for one in Outcome if one is not Outcome.OK])
def test_measure_baseline_gets_a_second_chance(path: Path, outcome: Outcome) -> None:
    trials = started(path, ModelBench(endings={0: outcome}))

    assert [one.launch.outcome for one in trials.finished] == [Outcome.OK]


def test_measure_baseline_that_does_not_run_is_the_end(path: Path) -> None:
    trials = open_trials(path, ModelBench(ending=lambda _settings: Outcome.CRASHED))

    with pytest.raises(HostError, match=r"baseline itself does not run \(crashed: it") as caught:
        trials.measure_baseline()

    assert caught.value.code == "baseline_failed"
    assert trials.finished == []


def test_measure_tells_score_and_guards(path: Path) -> None:
    trials = started(path, ModelBench(effect))
    good, bad = trials.measure(THREADS), trials.measure(LL, is_whole=True)

    assert good is not None
    assert good.is_eligible
    assert bad is not None
    assert bad.assessment is not None
    assert bad.assessment.guard is GuardState.BROKEN
    assert not bad.is_eligible
    _, told_good, told_bad = study_of(path).trials
    assert told_good.value == pytest.approx(0.95)
    assert told_good.constraints[CONSTRAINT] <= 0.0
    assert told_good.params["NCCL_NTHREADS"] == "128"
    assert told_bad.value == pytest.approx(0.8)
    assert told_bad.constraints[CONSTRAINT] == pytest.approx(3.0 - 1.03)


def test_measure_ends_early_once_it_is_decided_unless_asked_for_the_whole(path: Path) -> None:
    trials = started(path, ModelBench(effect))
    hopeless, broken = trials.measure(TREE), trials.measure(LL)
    whole = trials.measure({**TREE, **LL}, is_whole=True)

    assert hopeless is not None
    assert hopeless.launch.is_pruned
    assert set(hopeless.launch.median_us) < SCORED
    assert broken is not None
    assert broken.launch.is_pruned
    assert set(broken.launch.median_us) == SCORED | {67108864}
    assert not hopeless.is_eligible
    assert not broken.is_eligible
    assert whole is not None
    assert not whole.launch.is_pruned
    assert len(whole.launch.payloads) == len(OBJECTIVE.requests)


@pytest.mark.parametrize("outcome", FAULTS)
def test_measure_failing_settings_are_told_as_bad_and_infeasible(
    path: Path, outcome: Outcome
) -> None:
    trials = started(path, ModelBench(endings={1: outcome}))
    tried = trials.measure(LL)

    assert tried is not None
    assert tried.assessment is None
    assert not tried.is_eligible
    told = study_of(path).trials[1]
    assert told.state is TrialState.COMPLETE
    assert told.value == FAILED_SCORE
    assert told.constraints[CONSTRAINT] > 0.0
    assert trials.outcome_counts == {Outcome.OK: 1, outcome: 1}
    (failure,) = trials.failures
    assert (failure.trial_idx, failure.settings, failure.outcome) == (1, LL, outcome)
    assert failure.message == f"it ended {outcome}"


@pytest.mark.parametrize("outcome", HOST_FAULTS)
def test_measure_hosts_fault_is_no_trial_and_the_third_in_a_row_is_the_end(
    path: Path, outcome: Outcome
) -> None:
    bench = ModelBench(endings=dict.fromkeys((1, 2, 4, 5, 6), outcome))
    trials = started(path, bench)

    assert trials.measure(LL) is None
    assert trials.measure(LL) is None
    assert trials.measure(LL) is not None
    assert trials.measure(TREE) is None
    assert trials.measure(TREE) is None
    with pytest.raises(HostError, match="3 launches in a row failed like that") as caught:
        trials.measure(TREE)

    assert caught.value.code == outcome.value
    assert len(study_of(path).trials) == len(trials.finished) == 2


def test_has_tried_sees_through_the_spelling(path: Path) -> None:
    trials = started(path, ModelBench())
    trials.measure({"NCCL_PROTO": "LL", "NCCL_MAX_NCHANNELS": "16"})

    assert trials.has_tried({"NCCL_MAX_CTAS": "16", "NCCL_PROTO": "allreduce:ll"})
    assert trials.has_tried({})
    assert not trials.has_tried({"NCCL_MAX_CTAS": "16"})


def test_measure_settings_outside_the_space_are_a_trial_without_parameters(path: Path) -> None:
    trials = started(path, ModelBench())
    trials.measure({"NCCL_CROSS_NIC": "1"})

    assert study_of(path).trials[1].params == {}
    assert trials.finished[1].is_eligible


def test_ranked_is_best_first_each_once_and_leaves_out_what_cannot_win(path: Path) -> None:
    trials = started(path, ModelBench(effect, endings={5: Outcome.CRASHED}))
    wide = {"NCCL_MIN_CTAS": "4"}
    for settings in (wide, THREADS, LL, TREE, {"NCCL_BUFFSIZE": "1048576"}, THREADS):
        trials.measure(settings)

    assert [one.launch.settings for one in trials.ranked()] == [THREADS, wide]


@pytest.mark.parametrize("sampler", ["model", "random"])
@pytest.mark.parametrize("seed", [0, 1])
def test_propose_never_repeats_and_is_always_valid(path: Path, sampler: str, seed: int) -> None:
    trials = started(path, ModelBench(effect), sampler=sampler, seed=seed)
    proposed = []
    for _ in range(15):
        settings = trials.propose()
        assert settings
        check_settings(settings)
        proposed.append(tuple(canonical(settings).items()))
        trials.measure(settings)

    assert len(set(proposed)) == len(proposed)


def test_propose_tells_the_study_only_what_was_measured(path: Path) -> None:
    trials = started(path, ModelBench(effect), sampler="model")
    space = Space(FACTS, {})
    for _ in range(13):
        settings = trials.propose()
        assert settings is not None
        trials.measure(settings)

    told = study_of(path).trials
    assert len(told) == len(trials.finished)
    for trial, one in zip(told, trials.finished, strict=True):
        assert space.settings(trial.params) == canonical(one.launch.settings)


def test_propose_from_a_recording_gives_what_is_left_and_then_nothing(path: Path) -> None:
    bench = ModelBench(effect, candidates=(LL, TREE, THREADS))
    trials = started(path, bench)
    found = []
    while (settings := trials.propose()) is not None:
        found.append(settings)
        trials.measure(settings)

    assert sorted(map(str, found)) == sorted(map(str, (LL, TREE, THREADS)))


def test_propose_from_a_recording_first_gives_what_shares_the_setting_that_helped(
    path: Path,
) -> None:
    space = Space(FACTS, {})
    alone = [space.settings({name: choice}) for name, choice in space.single_choices()]
    others = [one for one in alone if one and not one.keys() & THREADS.keys()]
    mixed = [{**a, **b, **THREADS} for a, b in zip(others[::3], others[1::3], strict=False)]
    first, *alike = [one for one in mixed if space.params(one) is not None][:6]

    def helped(settings: Settings, _size_bytes: int) -> float:
        return 0.8 if settings.items() >= THREADS.items() else 1.0

    bench = ModelBench(helped, candidates=(*others, first, *alike))
    trials = started(path, bench, sampler="model")
    trials.measure(first)
    found = []
    for _ in alike:
        settings = trials.propose()
        assert settings is not None
        found.append(settings)
        trials.measure(settings)

    # By nearness to a proposal they came last: each differs from it in two settings more.
    assert all(one in alike for one in found)


# Each is recorded, and the space cannot express it as what NCCL takes it for.
UNRANKED: dict[str, Settings] = {
    "bounds_clash": {"NCCL_MIN_CTAS": "32", "NCCL_MAX_CTAS": "8"},
    "no_variable_of_the_space": {"NCCL_CROSS_NIC": "1"},
    "other_thresholds": {"NCCL_THREAD_THRESHOLDS": "4 4 4 4 4 4"},
    "value_between": {"NCCL_MIN_CTAS": "5"},
    "no_value": {"NCCL_PROTO": "bogus"},
    "level_without_effect": {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"},
}


@pytest.mark.parametrize("sampler", ["model", "random"])
@pytest.mark.parametrize("first", UNRANKED)
def test_propose_from_a_recording_gives_what_the_model_cannot_rank_too(
    path: Path, sampler: str, first: str
) -> None:
    ordered = [UNRANKED[first], *(one for name, one in UNRANKED.items() if name != first)]
    ranked = [LL, TREE, THREADS]
    twins = [{"NCCL_PROTO": "LL"}, {"NCCL_MIN_NCHANNELS": "5"}]
    bench = ModelBench(effect, candidates=(*ordered, *ranked, *twins))
    trials = started(path, bench, sampler=sampler)
    found: list[Settings] = []
    while (settings := trials.propose()) is not None:
        found.append(settings)
        trials.measure(settings)

    assert sorted(map(candidate_key, found)) == sorted(map(candidate_key, [*ordered, *ranked]))
    if sampler == "model":
        places = [idx for idx, one in enumerate(found) if Space(FACTS, {}).params(one) is None]
        assert places == list(range(len(found) - len(places), len(found)))


@pytest.mark.parametrize("only", UNRANKED)
def test_propose_from_a_recording_of_one_candidate_gives_it(path: Path, only: str) -> None:
    trials = started(path, ModelBench(candidates=(UNRANKED[only],)), sampler="model")

    assert trials.propose() == UNRANKED[only]


def test_propose_with_every_variable_pinned_has_nothing_to_propose(path: Path) -> None:
    names = {name for name, _ in Space(FACTS, {}).single_choices() if name.startswith("NCCL_")}
    pinned = {**dict.fromkeys(names, "1"), "NCCL_THREAD_THRESHOLDS": "1 1 1 1 1 1"}

    assert started(path, ModelBench(), pinned=pinned).propose() is None


@pytest.mark.parametrize("sampler", ["model", "random"])
def test_propose_has_nothing_left_only_after_all_that_a_space_holds(
    path: Path, sampler: str
) -> None:
    searched = ("NCCL_PROTO", "NCCL_ALGO", "NCCL_NTHREADS")
    choices = Space(FACTS, {}).choices
    pinned = {name: "1" for name in choices if name.isupper() and name not in searched}
    pinned[THRESHOLDS] = "-2 -2 -2 4 -2 -2"
    trials = started(path, ModelBench(effect), pinned=pinned, sampler=sampler)

    while (settings := trials.propose()) is not None:
        trials.measure(settings)

    assert len(trials.finished) == math.prod(len(choices[name]) for name in searched)


def test_propose_after_a_resume_does_not_begin_again(path: Path) -> None:
    trials = started(path, ModelBench(effect))
    first = trials.propose()
    assert first is not None
    trials.measure(first)

    again = open_trials(path, ModelBench(effect), is_resume=True)

    assert again.propose() not in (first, None)


def test_trials_reopened_are_the_same(path: Path) -> None:
    bench = ModelBench(effect, endings={3: Outcome.TIMEOUT}, noise=0.01)
    trials = started(path, bench)
    for settings in (LL, THREADS, TREE):
        trials.measure(settings)
    trials.measure_baseline()
    trials.measure({"NCCL_MIN_CTAS": "4"})

    again = open_trials(path, bench, is_resume=True)

    assert again.baselines == trials.baselines
    assert again.finished == trials.finished
    assert again.outcome_counts == trials.outcome_counts
    assert again.ranked() == trials.ranked()


def test_ratios_use_the_median_of_the_three_baselines_nearest_in_time(path: Path) -> None:
    times = iter([9.0, 1.0, 2.0, 2.2, 2.2, 2.1])
    bench = ModelBench(lambda _settings, size: now if size else 1.0)
    trials = open_trials(path, bench)
    for settings in ({}, {}, {}, {}, LL, TREE):
        now = next(times)
        if settings:
            tried = trials.measure(settings)
        else:
            trials.measure_baseline()

    assert tried is not None
    assert tried.assessment is not None
    assert [one.assessment.score_ratio for one in trials.finished[1:] if one.assessment] == (
        pytest.approx([1.1, 1.05])
    )
    again = open_trials(path, bench, is_resume=True)
    assert again.finished == trials.finished


def test_noise_is_the_baselines_spread_and_a_recording_has_none(path: Path, tmp_path: Path) -> None:
    trials = started(path, ModelBench(noise=0.01))
    assert trials.noise == {}
    for _ in range(2):
        trials.measure_baseline()
    assert set(trials.noise) == {request.size_bytes for request in OBJECTIVE.requests}
    assert all(0.0 < noise < 0.1 for noise in trials.noise.values())

    recording = RecordingOf(ModelBench(recorded=trials.baselines))
    recorded = open_trials(tmp_path / "two.journal", recording)
    for _ in range(4):
        recorded.measure_baseline()
    assert recorded.noise == {}


def test_engine_time_is_counted(path: Path) -> None:
    trials = started(path, ModelBench())
    before = trials.engine_s
    trials.propose()

    assert trials.engine_s > before > 0.0
