from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nccltune.envvars import check_settings
from nccltune.measurement import Launch, Outcome, PayloadRequest, Settings
from nccltune.recording import Manifest, PayloadShape, RecordingWriter, candidate_key
from nccltune.search.recording_plan import (
    BASELINE_EVERY,
    HOST_FAULT_LIMIT,
    design_candidates,
    plan_candidates,
    record,
)
from nccltune.search.space import Space
from nccltune.store import find_profile
from tests.support.model_bench import ModelBench
from tests.support.studies import FACTS

FOLK = find_profile("folk-ll-ring").profile.settings
REQUESTS = (PayloadRequest(43008, 123), PayloadRequest(67108864, 4))
SPACE = Space(FACTS, {})
MANIFEST = Manifest(
    origin="test",
    gpus="2x Stand-in",
    driver=None,
    nccl=None,
    torch=None,
    recorded_at="2026-01-01",
    method="made up",
    base_environment={},
    world_size=2,
    payloads=tuple(PayloadShape(one.size_bytes, one.graph_count) for one in REQUESTS),
)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordingWriter]:
    with RecordingWriter(tmp_path / "made.json", "made", MANIFEST) as writer:
        yield writer


def make(
    writer: RecordingWriter,
    bench: ModelBench,
    candidates: Sequence[Settings],
    stop_after: int = 999,
) -> int:
    return record(
        bench, candidates, REQUESTS, writer, is_over=lambda: len(bench.launches) >= stop_after
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 10, 60, 120])
def test_design_candidates_are_distinct_valid_and_as_many_as_asked(count: int, seed: int) -> None:
    designed = design_candidates(SPACE, count, seed)

    assert len(designed) == count
    assert len({tuple(sorted(one.items())) for one in designed}) == count
    assert {} not in designed
    for settings in designed:
        check_settings(settings)


def test_design_candidates_hold_every_choice_alone_before_any_pair() -> None:
    alone = [SPACE.settings({name: choice}) for name, choice in SPACE.single_choices()]

    assert all(one in design_candidates(SPACE, 60, 0) for one in alone)
    few = design_candidates(SPACE, len(alone), 0)
    assert sorted(map(str, few)) == sorted(map(str, alone))


def test_design_candidates_are_in_an_order_of_their_own_and_the_same_for_a_seed() -> None:
    first, second = (design_candidates(SPACE, 80, seed) for seed in (0, 1))

    assert design_candidates(SPACE, 80, 0) == first
    assert first != second
    assert any(len(one) > 1 for one in first[:20])


def test_design_candidates_of_a_small_space_are_all_that_there_are() -> None:
    names = {name for name, _ in SPACE.single_choices() if name.startswith("NCCL_")}
    pinned = dict.fromkeys(names - {"NCCL_ALGO"}, "1")
    space = Space(FACTS, {**pinned, "NCCL_THREAD_THRESHOLDS": "1 1 1 1 1 1"})

    assert len(design_candidates(space, 50, 0)) == 2


# Every one is among the designed candidates, or is the one before it in other words.
DUPLICATES: list[Settings] = [
    {"NCCL_MIN_NCHANNELS": "8"},
    {"NCCL_MIN_CTAS": "8"},
    {"NCCL_MIN_NCHANNELS": "8"},
    {"NCCL_PROTO": "ll"},
    {"NCCL_PROTO": "allreduce:LL"},
    {"NCCL_NTHREADS": "128"},
]
KEPT = [DUPLICATES[0], DUPLICATES[3], DUPLICATES[5]]


def plan(
    count: int, own: Sequence[Settings] = (), held: Sequence[Settings] = (), seed: int = 0
) -> list[Settings]:
    return plan_candidates(SPACE, count, seed, own=own, folk=FOLK, held=held)


@pytest.mark.parametrize("count", [4, 10, 70])
@pytest.mark.parametrize("own", [[], DUPLICATES, [FOLK], [{"NCCL_THREAD_THRESHOLDS": "-2 -2"}]])
def test_plan_candidates_are_as_many_as_asked_whatever_equals_what(
    count: int, own: list[Settings]
) -> None:
    planned = plan(count, own)

    assert len(planned) == len({candidate_key(one) for one in planned}) == count
    assert {} not in map(dict, map(candidate_key, planned))
    assert FOLK in planned


def test_plan_candidates_begin_with_the_operators_own_each_once_and_as_given() -> None:
    assert plan(10, DUPLICATES)[:4] == [*KEPT, FOLK]
    assert plan(1, DUPLICATES) == KEPT
    assert plan(1) == [FOLK]


@pytest.mark.parametrize("done", [0, 1, 5, 20])
def test_plan_candidates_gone_on_with_are_the_same(done: int) -> None:
    planned = plan(20, DUPLICATES)

    again = plan(20, DUPLICATES, held=planned[:done])

    assert sorted(map(candidate_key, again)) == sorted(map(candidate_key, planned))


@pytest.mark.parametrize("seed", [0, 1])
def test_plan_candidates_count_what_is_held(seed: int) -> None:
    held = plan(20)
    more = plan(25, [{"NCCL_PROTO": "LL"}, {"NCCL_MIN_CTAS": "5"}], held=held, seed=seed)

    assert len(more) == 25
    assert {candidate_key(one) for one in held} < {candidate_key(one) for one in more}
    assert len(plan(5, [{"NCCL_MIN_CTAS": "5"}], held=held)) == 21


def test_record_measures_every_candidate_with_the_baseline_in_between(
    writer: RecordingWriter,
) -> None:
    bench = ModelBench()
    candidates = design_candidates(SPACE, 2 * BASELINE_EVERY + 1, 0)

    assert make(writer, bench, candidates) == len(candidates) + 3
    assert [settings for settings in bench.launches if settings] == candidates
    baselines = [idx for idx, settings in enumerate(bench.launches) if not settings]
    assert baselines == [0, BASELINE_EVERY + 1, 2 * (BASELINE_EVERY + 1)]
    assert [one.settings for one in writer.launches] == bench.launches
    assert all(one.started_at for one in writer.launches)


def test_record_measures_every_launch_whole(writer: RecordingWriter) -> None:
    make(writer, ModelBench(lambda settings, _: 9.0 if settings else 1.0), [{"NCCL_ALGO": "x"}])

    assert all(len(one.payloads) == len(REQUESTS) for one in writer.launches)


def test_record_keeps_failures_and_goes_on(writer: RecordingWriter) -> None:
    candidates = design_candidates(SPACE, 4, 0)
    bench = ModelBench(endings={2: Outcome.CRASHED, 3: Outcome.TIMEOUT})

    assert make(writer, bench, candidates) == 5
    outcomes = [one.outcome for one in writer.launches]
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.CRASHED, Outcome.TIMEOUT, Outcome.OK]


def test_record_stopped_goes_on_with_what_is_left(writer: RecordingWriter) -> None:
    candidates = design_candidates(SPACE, 6, 0)

    assert make(writer, ModelBench(), candidates, stop_after=4) == 4
    again = ModelBench()
    assert make(writer, again, candidates) == 4
    assert again.launches == [{}, *candidates[3:]]
    assert make(writer, ModelBench(), candidates) == 0


def test_record_leaves_out_what_the_host_failed_on_and_gives_up_when_it_goes_on(
    writer: RecordingWriter,
) -> None:
    candidates = design_candidates(SPACE, 8, 0)
    once = ModelBench(endings={2: Outcome.HOST_BUSY, 3: Outcome.HOST_FAILED})
    always = ModelBench(ending=lambda settings: Outcome.HOST_BUSY if settings else Outcome.OK)

    assert make(writer, once, candidates[:5]) == 4
    assert writer.missing(candidates[:5]) == candidates[1:3]
    assert make(writer, always, candidates) == 1
    assert len(always.launches) == 1 + HOST_FAULT_LIMIT


def test_record_says_after_every_launch_how_far_it_is(writer: RecordingWriter) -> None:
    candidates = design_candidates(SPACE, 2, 0)
    seen: list[tuple[int, int, Settings]] = []

    def note(done: int, total: int, launch: Launch) -> None:
        seen.append((done, total, launch.settings))

    record(ModelBench(), candidates, REQUESTS, writer, is_over=lambda: False, on_launch=note)

    assert seen == [(0, 2, {}), (0, 2, candidates[0]), (1, 2, candidates[1])]
