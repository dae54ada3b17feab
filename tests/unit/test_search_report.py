"""The answer of a search, on a bench in this process: verdict, words, table, what did not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nccltune.measurement import Launch, Outcome, Settings
from nccltune.payloads.derive import default_workload
from nccltune.recording import candidate_key
from nccltune.search import report as texts
from nccltune.search.engine import SearchPlan, run_search
from nccltune.search.result import Progress, SearchResult, Stage, TrialsEnd, Verdict
from nccltune.search.space import RING_LL, THRESHOLDS, Space
from tests.support.model_bench import ModelBench, RecordingOf
from tests.support.studies import FACTS, OBJECTIVE

THREADS = {"NCCL_NTHREADS": "128"}
WIDE = {"NCCL_MIN_CTAS": "16"}
BOTH = {**THREADS, **WIDE, "NCCL_BUFFSIZE": "1048576"}
FOLK = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
GUARDS = set(OBJECTIVE.guard_sizes)
PLAN = SearchPlan(workload=default_workload(), facts=FACTS, trial_count=4, seed=1)


def effect(settings: Settings, size_bytes: int) -> float:
    """Threads and width help; LL alone helps and ruins large payloads; nothing else changes."""
    factor = 1.0
    if settings.get("NCCL_NTHREADS") == "128":
        factor *= 0.9
    if settings.get("NCCL_MIN_CTAS") == "16":
        factor *= 0.95
    if settings.get("NCCL_PROTO") == "LL" and size_bytes == 67108864:
        factor *= 3.3
    return factor


class Watch:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []

    def update(self, progress: Progress) -> None:
        """Note one moment."""
        self.seen.append(progress)


def search(
    tmp_path: Path,
    bench: Any,
    *candidates: Settings,
    observer: Watch | None = None,
    is_resume: bool = False,
    **changes: Any,
) -> SearchResult:
    changes.setdefault("trial_count", 1 + len(candidates) + ("folk" in changes))
    plan = dataclasses.replace(PLAN, extra_candidates=candidates, **changes)
    path = tmp_path / "studies" / "one.journal"
    return run_search(plan, bench, path, is_resume=is_resume, observer=observer or Watch())


def recorded_baselines() -> Sequence[Launch]:
    bench = ModelBench(noise=0.004)
    return [bench.launch({}, OBJECTIVE.requests) for _ in range(6)]


def test_improved_says_so_with_everything_that_it_rests_on(tmp_path: Path) -> None:
    bench = ModelBench(effect, noise=0.002)
    result = search(tmp_path, bench, BOTH)

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == {**THREADS, **WIDE}
    assert result.duel is not None
    assert result.duel.settings == result.settings
    assert result.score_ratio == result.duel.score_ratio == pytest.approx(0.855, abs=0.01)
    assert result.score_interval.low < 0.855 < result.score_interval.high < 0.99
    assert result.sentence.startswith("Improved: the communication time of a decode step fal")
    assert f"to {result.score_ratio:.3f} (95 % interval" in result.sentence
    assert result.ablation is not None
    assert {step.variable: step.is_dropped for step in result.ablation} == {
        "NCCL_NTHREADS": False,
        "NCCL_MIN_CTAS": False,
        "NCCL_BUFFSIZE": True,
    }
    assert result.collectives is not None
    assert result.collectives.outcome is Outcome.OK
    assert bench.checked == [result.settings, {}]
    assert result.memory_bytes_per_gpu == 1 << 27
    assert result.not_run == ""
    assert (result.trial_count, result.outcome_counts) == (2, {Outcome.OK: 2})


def test_improved_table_is_of_fresh_launches_payload_by_payload(tmp_path: Path) -> None:
    result = search(tmp_path, ModelBench(effect, noise=0.002), THREADS)

    assert [row.size_bytes for row in result.payloads] == sorted(
        request.size_bytes for request in OBJECTIVE.requests
    )
    assert {row.size_bytes for row in result.payloads if row.is_guard} == GUARDS
    assert sum(row.weight for row in result.payloads) == pytest.approx(1.0)
    for row in result.payloads:
        assert row.ratio == pytest.approx(0.9, abs=0.01)
        assert row.tuned_us == pytest.approx(row.ratio * row.baseline_us)
        assert row.used == "ring LL, 4 channels"
        assert (row.ratio_low is not None) is row.is_guard


def test_nothing_helps_is_a_verdict_with_its_own_words(tmp_path: Path) -> None:
    result = search(tmp_path, ModelBench(noise=0.002), THREADS, WIDE, BOTH)

    assert result.verdict is Verdict.KEEP_DEFAULT
    assert result.settings == {}
    assert result.sentence == (
        "The defaults are already best here: none of 4 trials gains 1 % over them."
    )
    assert result.not_run == texts.NO_PROMISE
    assert result.duel is None
    assert result.ablation is None


def test_sentence_names_the_smallest_gain_that_was_asked_for(tmp_path: Path) -> None:
    result = search(tmp_path, ModelBench(effect), THREADS, min_gain=0.25)

    assert result.verdict is Verdict.KEEP_DEFAULT
    assert "none of 2 trials gains 25 %" in result.sentence


def test_too_few_trials_do_not_rule_a_gain_out(tmp_path: Path) -> None:
    result = search(tmp_path, ModelBench(), THREADS, trial_count=40, timeout_s=1e-9)

    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.trial_count == 1
    assert result.sentence == (
        "Inconclusive: no gain of 1 % found in 1 trial, too few to rule one out."
    )


FAULTS = [one for one in Outcome if one.is_candidates_fault]


@pytest.mark.parametrize("outcome", FAULTS)
@pytest.mark.parametrize("is_recording", [False, True])
def test_nothing_that_could_be_measured_says_nothing_of_the_defaults(
    tmp_path: Path, outcome: Outcome, is_recording: bool
) -> None:
    model = ModelBench(
        ending=lambda settings: outcome if settings else Outcome.OK,
        recorded=recorded_baselines() if is_recording else (),
    )
    bench = RecordingOf(model) if is_recording else model
    result = search(tmp_path, bench, THREADS, trial_count=12)

    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.trial_count == 12
    assert result.sentence == (
        "Inconclusive: none of 11 candidates could be measured, too few to rule a gain of 1 % out."
    )


@pytest.mark.parametrize("measured_count", [1, 8, 9, 12])
def test_ten_measured_trials_are_enough_however_many_fail(
    tmp_path: Path, measured_count: int
) -> None:
    launched: list[Settings] = []

    def crashes_later(settings: Settings) -> Outcome:
        launched.extend([settings] if settings else [])
        return Outcome.CRASHED if len(launched) > measured_count and settings else Outcome.OK

    result = search(tmp_path, ModelBench(ending=crashes_later), trial_count=20, use_duel=False)

    assert result.trial_count == 20
    if measured_count >= texts.ENOUGH_TRIALS - 1:
        assert result.verdict is Verdict.KEEP_DEFAULT
    else:
        assert result.verdict is Verdict.INCONCLUSIVE
        assert f"only {measured_count} of 19 candidates could be measured" in result.sentence


def test_few_that_could_be_measured_are_named_beside_a_lost_duel(tmp_path: Path) -> None:
    calls: list[Settings] = []

    def lucky_once(settings: Settings, _size_bytes: int) -> float:
        calls.append(settings)
        return 0.9 if settings and len(calls) < 20 else 1.0

    bench = ModelBench(lucky_once, ending=fails_unless_threads, noise=0.002)
    result = search(tmp_path, bench, THREADS, trial_count=12)

    assert result.duel is not None
    assert result.duel.verdict is Verdict.KEEP_DEFAULT
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.sentence.endswith(
        "no gain worth having; only 1 of 11 candidates could be measured."
    )


def fails_unless_threads(settings: Settings) -> Outcome:
    return Outcome.OK if settings in ({}, THREADS) else Outcome.CRASHED


def test_given_twice_or_in_other_words_is_measured_once(tmp_path: Path) -> None:
    bench = ModelBench()
    narrow = {"NCCL_MIN_CTAS": "4"}
    respelled = ({"NCCL_MIN_NCHANNELS": "4"}, {"NCCL_PROTO": "allreduce:LL", "NCCL_ALGO": "ring"})
    result = search(
        tmp_path, bench, narrow, *respelled, narrow, folk=FOLK, trial_count=6, use_duel=False
    )

    launched = [one for one in bench.launches if one]
    assert launched[:2] == [FOLK, narrow]
    assert len({candidate_key(one) for one in launched}) == len(launched) == 5
    assert [one.settings for one in result.comparisons] == [FOLK]


def test_gain_that_was_only_luck_does_not_survive_fresh_launches(tmp_path: Path) -> None:
    calls: list[Settings] = []

    def lucky_once(settings: Settings, _size_bytes: int) -> float:
        calls.append(settings)
        return 0.9 if settings and len(calls) < 20 else 1.0

    result = search(tmp_path, ModelBench(lucky_once, noise=0.002), THREADS)

    assert result.verdict is Verdict.KEEP_DEFAULT
    assert result.duel is not None
    assert result.settings == {}
    assert result.sentence == (
        "The defaults are already best here: the best of 2 trials did not hold"
        " (no gain worth having)."
    )


def test_candidate_that_crashes_in_its_first_block_keeps_the_defaults(tmp_path: Path) -> None:
    watch = Watch()

    def crashing(settings: Settings) -> Outcome:
        is_in_duel = bool(watch.seen) and watch.seen[-1].stage is Stage.DUEL
        return Outcome.CRASHED if settings and is_in_duel else Outcome.OK

    result = search(tmp_path, ModelBench(effect, ending=crashing), THREADS, observer=watch)

    assert result.duel is not None
    assert result.duel.block_count == 0
    assert (result.verdict, result.settings) == (Verdict.KEEP_DEFAULT, {})
    assert "did not hold (a fresh launch of the candidate ended crashed" in result.sentence


@pytest.mark.parametrize("seed", range(8))
def test_best_of_many_recorded_equals_is_no_gain(tmp_path: Path, seed: int) -> None:
    equals = [
        {"NCCL_MIN_CTAS": ctas, "NCCL_NTHREADS": threads}
        for ctas in ("1", "2", "4", "8", "16", "32", "64")
        for threads in ("64", "128", "256", "512")
    ]
    model = ModelBench(noise=0.02, seed=seed)
    baselines = [model.launch({}, OBJECTIVE.requests) for _ in range(8)]
    bench = RecordingOf(dataclasses.replace(model, recorded=baselines, candidates=equals))

    result = search(tmp_path, bench, trial_count=40, seed=seed)

    assert result.score_ratio < 0.985  # the luckiest of them
    assert result.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "; no size was guarded."),
        (1, ", and the one guarded size, 14336 B, gets less than 5 % slower."),
        (2, ", and none of 2 guarded sizes gets 5 % slower or more."),
        (3, ", and none of 3 guarded sizes gets 5 % slower or more."),
    ],
)
def test_sentence_speaks_of_the_guards_that_there_were(
    tmp_path: Path, count: int, words: str
) -> None:
    whole = default_workload()
    few = dataclasses.replace(whole, guards=whole.guards[:count])

    result = search(tmp_path, ModelBench(effect, noise=0.002), BOTH, workload=few)

    assert result.verdict is Verdict.IMPROVED
    assert result.sentence.endswith(words)


def test_guard_that_breaks_on_fresh_launches_is_named(tmp_path: Path) -> None:
    calls: list[int] = []

    def slower_later(settings: Settings, size_bytes: int) -> float:
        calls.append(size_bytes)
        if settings and size_bytes == 67108864 and len(calls) > 50:
            return 1.5
        return 0.9 if settings else 1.0

    result = search(tmp_path, ModelBench(slower_later, noise=0.002), THREADS)

    assert result.verdict is Verdict.KEEP_DEFAULT
    assert result.duel is not None
    assert result.duel.rejected_guards == (67108864,)
    assert "slower at a guarded size: 67108864 B" in result.sentence


def test_guards_that_break_at_the_first_repeat_end_it_before_the_duel(tmp_path: Path) -> None:
    launches: list[int] = []

    def slower_at_once(settings: Settings, size_bytes: int) -> float:
        launches.append(size_bytes)
        if settings and size_bytes == 67108864 and len(launches) > 14:
            return 1.5
        return 0.9 if settings else 1.0

    result = search(tmp_path, ModelBench(slower_at_once, noise=0.002), THREADS)

    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.duel is None
    assert result.not_run == texts.NOT_HELD
    assert "not proven on fresh launches" in result.sentence


@pytest.mark.parametrize("outcome", [one for one in Outcome if one.is_candidates_fault])
def test_winner_under_which_other_collectives_fail_is_not_saved(
    tmp_path: Path, outcome: Outcome
) -> None:
    bench = ModelBench(effect, noise=0.002, collectives=(outcome,))
    result = search(tmp_path, bench, THREADS)

    assert result.verdict is Verdict.KEEP_DEFAULT
    assert result.settings == {}
    assert result.collectives is not None
    assert result.collectives.outcome is outcome
    assert result.sentence == (
        "The defaults are already best here: the best of 2 trials did not hold"
        f" (other collectives ended {outcome} under it)."
    )


def test_second_best_wins_where_the_best_fails_the_check(tmp_path: Path) -> None:
    bench = ModelBench(effect, noise=0.002, collectives=(Outcome.CRASHED, Outcome.OK))
    result = search(tmp_path, bench, THREADS, WIDE)

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == WIDE
    assert bench.checked == [THREADS, WIDE, {}]
    assert result.score_ratio == pytest.approx(0.95, abs=0.01)
    assert all(row.ratio == pytest.approx(0.95, abs=0.01) for row in result.payloads)


def test_check_that_fails_by_the_hosts_fault_is_repeated_once(tmp_path: Path) -> None:
    bench = ModelBench(effect, noise=0.002, collectives=(Outcome.HOST_BUSY, Outcome.OK))

    assert search(tmp_path, bench, THREADS).verdict is Verdict.IMPROVED


def test_check_that_the_host_does_not_allow_proves_nothing(tmp_path: Path) -> None:
    bench = ModelBench(effect, noise=0.002, collectives=(Outcome.HOST_FAILED,))
    result = search(tmp_path, bench, THREADS)

    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.settings == {}
    assert "the other collectives could not be checked" in result.sentence


SMALL = {name: "1" for name in Space(FACTS, {}).choices if name not in ("NCCL_PROTO", RING_LL)}
ENDS: dict[str, tuple[TrialsEnd, bool, dict[str, Any], dict[str, Any]]] = {
    "complete": (TrialsEnd.COMPLETE, False, {}, {}),
    "exhausted": (TrialsEnd.EXHAUSTED, False, {}, {"pinned": {**SMALL, THRESHOLDS: "1"}}),
    "nothing_to_search": (
        TrialsEnd.EXHAUSTED,
        False,
        {},
        {"pinned": {**SMALL, THRESHOLDS: "1", "NCCL_PROTO": "LL"}},
    ),
    "out_of_time": (TrialsEnd.OUT_OF_TIME, False, {}, {"timeout_s": 1e-9}),
    "baseline_interrupted": (TrialsEnd.INTERRUPTED, True, {"interrupt_at": 0}, {}),
    "trial_interrupted": (TrialsEnd.INTERRUPTED, True, {"interrupt_at": 3}, {}),
    # After twelve trials, and the baseline a second time among them.
    "proof_interrupted": (TrialsEnd.COMPLETE, True, {"interrupt_at": 14}, {}),
}


@pytest.mark.parametrize("case", ENDS)
def test_result_says_why_there_are_no_more_trials(tmp_path: Path, case: str) -> None:
    end, is_interrupted, of_bench, changes = ENDS[case]

    result = search(tmp_path, ModelBench(effect, **of_bench), THREADS, trial_count=12, **changes)

    assert (result.trials_end, result.is_interrupted) == (end, is_interrupted)
    assert (result.trial_count == 12) is (end is TrialsEnd.COMPLETE)


@pytest.mark.parametrize("is_resume", [False, True])
def test_recording_of_which_all_was_tried_is_exhausted(tmp_path: Path, is_resume: bool) -> None:
    bench = RecordingOf(
        ModelBench(effect, recorded=recorded_baselines(), candidates=(THREADS, WIDE))
    )
    if is_resume:
        search(tmp_path, bench, trial_count=3)

    result = search(tmp_path, bench, trial_count=40, is_resume=is_resume)

    assert (result.trials_end, result.trial_count) == (TrialsEnd.EXHAUSTED, 3)


def test_without_duel_nothing_is_claimed(tmp_path: Path) -> None:
    bench = ModelBench(effect, noise=0.002)
    result = search(tmp_path, bench, THREADS, use_duel=False)

    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.not_run == texts.NOT_ASKED
    assert result.score_ratio == pytest.approx(0.9, abs=0.01)
    assert "not proven on fresh launches" in result.sentence
    assert len(bench.launches) == 2


def test_recording_answers_from_the_spread_of_its_defaults(tmp_path: Path) -> None:
    bench = RecordingOf(
        ModelBench(effect, recorded=recorded_baselines(), candidates=(THREADS, WIDE))
    )
    result = search(tmp_path, bench, trial_count=40)

    assert result.verdict is Verdict.IMPROVED
    assert result.settings == THREADS
    assert result.trial_count == 3
    assert result.not_run == texts.NO_FRESH
    assert "spread of 6 recorded launches of the defaults" in result.score_interval.method
    assert result.score_interval.low < result.score_ratio < result.score_interval.high < 1.0
    assert {row.size_bytes for row in result.payloads} == {
        request.size_bytes for request in OBJECTIVE.requests
    }


def test_recorded_gain_within_the_spread_of_the_defaults_is_not_claimed(tmp_path: Path) -> None:
    noisy = ModelBench(noise=0.05, seed=3)
    baselines = [noisy.launch({}, OBJECTIVE.requests) for _ in range(5)]
    bench = RecordingOf(
        ModelBench(
            lambda settings, _: 0.97 if settings else 1.0, recorded=baselines, candidates=(WIDE,)
        )
    )
    result = search(tmp_path, bench, trial_count=40)

    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.score_interval.high > 1.0


def test_folk_profile_is_measured_whole_and_judged_in_words(tmp_path: Path) -> None:
    bench = ModelBench(effect, noise=0.002)
    result = search(tmp_path, bench, THREADS, folk=FOLK)

    (folk,) = result.comparisons
    assert folk.name == "folk-ll-ring"
    assert folk.settings == FOLK
    assert set(folk.ratios) == {request.size_bytes for request in OBJECTIVE.requests}
    assert folk.ratios[67108864] == pytest.approx(3.3, abs=0.05)
    assert folk.message == (
        "no better than the defaults at verify sizes, 3.3 times as long at 67108864 B"
    )
    assert bench.launches[1] == FOLK


def test_folk_profile_that_fails_says_how(tmp_path: Path) -> None:
    bench = ModelBench(endings={1: Outcome.UNSUPPORTED})
    result = search(tmp_path, bench, folk=FOLK)

    (folk,) = result.comparisons
    assert folk.outcome is Outcome.UNSUPPORTED
    assert (folk.score_ratio, folk.ratios) == (None, {})
    assert folk.message == "it ended unsupported"


def test_folk_profile_that_the_host_failed_on_comes_again(tmp_path: Path) -> None:
    bench = ModelBench(effect, endings={1: Outcome.HOST_BUSY, 2: Outcome.HOST_BUSY})
    result = search(tmp_path, bench, THREADS, folk=FOLK)

    assert bench.launches[1:4] == [FOLK, FOLK, FOLK]
    assert len(result.comparisons) == 1
    assert result.trial_count == 3


def test_given_settings_that_a_recording_does_not_hold_are_left_out(tmp_path: Path) -> None:
    bench = RecordingOf(ModelBench(effect, recorded=recorded_baselines(), candidates=(THREADS,)))
    result = search(tmp_path, bench, WIDE, folk=FOLK, trial_count=40)

    assert result.comparisons == ()
    assert bench.bench.launches[1:] == [THREADS]


@pytest.mark.parametrize("interrupt_at", [0, 1, 2, 3, 5, 8, 14, 20])
def test_interrupt_anywhere_keeps_what_is_known_and_resume_goes_on(
    tmp_path: Path, interrupt_at: int
) -> None:
    stopped = search(
        tmp_path, ModelBench(effect, noise=0.002, interrupt_at=interrupt_at), BOTH, WIDE
    )

    assert stopped.is_interrupted
    assert stopped.verdict is Verdict.INCONCLUSIVE
    assert stopped.settings == {}
    assert stopped.sentence.startswith(f"Stopped after {stopped.trial_count} trial")
    assert stopped.not_run == texts.ENDED
    resumed = search(tmp_path, ModelBench(effect, noise=0.002), BOTH, WIDE, is_resume=True)
    assert resumed.verdict is Verdict.IMPROVED
    assert not resumed.is_interrupted
    assert resumed.trial_count == 3


def test_observer_sees_every_launch_before_and_after_in_order(tmp_path: Path) -> None:
    watch = Watch()
    bench = ModelBench(effect, noise=0.002)
    search(tmp_path, bench, BOTH, WIDE, observer=watch)

    stages = list(dict.fromkeys(one.stage for one in watch.seen))
    assert stages == list(Stage)
    finished = [one for one in watch.seen if one.launch is not None]
    assert len(finished) == len(bench.launches) + len(bench.checked)
    assert [one.launch.settings for one in finished if one.launch] == [
        *bench.launches,
        *bench.checked,
    ]
    assert watch.seen[0].remaining_s is None
    assert watch.seen[0].best_score_ratio is None
    assert watch.seen[-1].best_score_ratio == pytest.approx(0.855, abs=0.01)
    assert all((one.remaining_s or 0.0) >= 0.0 for one in watch.seen)
    assert all(0 <= one.trial_idx <= one.trial_total for one in watch.seen)


def test_search_with_everything_pinned_ends_at_once(tmp_path: Path) -> None:
    names = {name for name, _ in Space(FACTS, {}).single_choices() if name.startswith("NCCL_")}
    pinned = {**dict.fromkeys(names, "1"), "NCCL_THREAD_THRESHOLDS": "1 1 1 1 1 1"}
    result = search(tmp_path, ModelBench(), trial_count=40, pinned=pinned)

    assert result.trial_count == 1
    assert result.verdict is Verdict.INCONCLUSIVE
