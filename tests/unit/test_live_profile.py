"""How the active profile stands on a host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.host.fingerprint import Fingerprint, MatchKind
from nccltune.inject.marker import settings_digest
from nccltune.live.profile_standing import judge_profile
from nccltune.profile import Profile
from nccltune.store import ActiveState

HERE = Fingerprint(
    gpu_names=("H200",) * 2,
    gpu_uuids=("GPU-0", "GPU-1"),
    driver_version="580.1",
    nccl_version="2.28.9",
    link_matrix=(("X", "NV18"), ("NV18", "X")),
    numa_nodes=(0, 0),
    world_size=2,
)
SETTINGS = {"NCCL_ALGO": "allreduce:ring"}


def active(made_on: Fingerprint | None = HERE) -> ActiveState:
    fingerprint = None if made_on is None else made_on.to_json()
    profile = Profile("mine", SETTINGS, fingerprint=fingerprint)
    return ActiveState(profile, "mine", None, Path("/state/profiles/mine.json"))


def test_judge_on_the_same_host_has_nothing_to_say() -> None:
    live = judge_profile(active(), HERE)

    assert live.match is MatchKind.IDENTICAL
    assert (live.stale, live.advice, live.is_degraded) == ((), "", False)
    assert live.digest == settings_digest(SETTINGS)


@pytest.mark.parametrize(
    ("change", "match", "stale", "advice"),
    [
        ({"driver_version": "580.2"}, MatchKind.EQUIVALENT, "the driver", "nccltune verify -- CMD"),
        ({"driver_version": "590.1"}, MatchKind.FOREIGN, "the driver", "nccltune search"),
        ({"nccl_version": "2.30.7"}, MatchKind.FOREIGN, "NCCL", "nccltune search"),
        (
            {"gpu_uuids": ("GPU-8", "GPU-9")},
            MatchKind.EQUIVALENT,
            "the GPUs",
            "nccltune verify -- CMD",
        ),
        ({"gpu_names": ("H100",) * 2}, MatchKind.FOREIGN, "the GPUs", "nccltune search"),
    ],
    ids=["driver_patch", "driver_branch", "nccl", "other_gpus", "other_model"],
)
def test_judge_after_a_change_of_the_host_is_stale_and_says_what_to_run(
    change: dict[str, object], match: MatchKind, stale: str, advice: str
) -> None:
    live = judge_profile(active(), replace(HERE, **change))  # type: ignore[arg-type]

    assert live.match is match
    assert live.stale == (stale,)
    assert live.advice == advice
    assert live.is_degraded is (match is MatchKind.FOREIGN)


def test_judge_takes_the_gpus_that_it_was_found_on_out_of_all() -> None:
    larger = Fingerprint(
        gpu_names=("L4", *HERE.gpu_names),
        gpu_uuids=("GPU-9", *HERE.gpu_uuids),
        driver_version="580.1",
        nccl_version="2.28.9",
        link_matrix=(("X", "SYS", "SYS"), ("SYS", "X", "NV18"), ("SYS", "NV18", "X")),
        numa_nodes=(1, 0, 0),
        world_size=3,
    )

    assert judge_profile(active(), larger).match is MatchKind.IDENTICAL


def test_judge_where_a_gpu_is_gone_is_foreign() -> None:
    smaller = replace(
        HERE,
        gpu_names=("H200",),
        gpu_uuids=("GPU-0",),
        link_matrix=(("X",),),
        numa_nodes=(0,),
        world_size=1,
    )

    live = judge_profile(active(), smaller)

    assert live.match is MatchKind.FOREIGN
    assert "world_size" in live.differing


def test_judge_before_a_server_has_run_compares_all_but_nccl_and_says_so() -> None:
    live = judge_profile(active(), replace(HERE, nccl_version=None))

    assert live.match is MatchKind.IDENTICAL
    assert "NCCL" in live.unknown


def test_judge_without_any_gpu_in_sight_is_degraded_as_launches_are() -> None:
    live = judge_profile(active(), None, "no NVIDIA driver found")

    assert live.match is None
    assert live.unknown == "no NVIDIA driver found"
    assert live.is_degraded
    assert live.advice == "nccltune doctor"


def test_judge_of_a_profile_for_no_particular_host_is_not_degraded() -> None:
    live = judge_profile(active(None), None, "no NVIDIA driver found")

    assert not live.is_degraded
    assert live.match is None


def test_judge_of_a_broken_fingerprint_is_a_problem_with_the_file() -> None:
    state = active()
    assert state.profile is not None
    broken = replace(state, profile=replace(state.profile, fingerprint={"gpu_names": 3}))

    live = judge_profile(broken, HERE)

    assert "/state/profiles/mine.json" in live.problem
    assert live.is_degraded


@pytest.mark.parametrize(
    ("previous", "advice"),
    [(None, "nccltune profile activate NAME"), ("older", "nccltune profile rollback")],
)
def test_judge_of_a_profile_that_cannot_be_used_says_why_and_what_to_do(
    previous: str | None, advice: str
) -> None:
    state = ActiveState(None, "mine", "is gone", Path("/x"), previous=previous)

    live = judge_profile(state, None)

    assert (live.problem, live.advice, live.is_degraded) == ("is gone", advice, True)


def test_judge_where_nothing_is_active_is_calm() -> None:
    live = judge_profile(ActiveState(None, None, None, Path("/x")), None)

    assert live.name is None
    assert not live.is_degraded
    assert live.advice == ""


@pytest.mark.parametrize("source", ["shared-gpu", "recording:h200-2x-shm"])
def test_judge_of_what_was_not_measured_on_real_ranks_is_degraded_unless_a_person_insists(
    source: str,
) -> None:
    state = active()
    assert state.profile is not None
    state = replace(state, profile=replace(state.profile, source=source))

    live = judge_profile(state, HERE)
    assert live.is_degraded
    assert "--any-host" in live.problem

    said = judge_profile(replace(state, any_host_gpus=HERE.gpu_uuids), HERE)
    assert (said.is_degraded, said.is_insisted_on) == (False, True)


@pytest.mark.parametrize("any_host_gpus", [(), HERE.gpu_uuids])
@pytest.mark.parametrize("source", ["shared-gpu", "recording:h200-2x-shm"])
def test_judge_of_what_was_not_measured_where_no_gpu_can_be_read_asks_for_any_host_each_time(
    source: str, any_host_gpus: tuple[str, ...]
) -> None:
    state = active()
    assert state.profile is not None
    profile = replace(state.profile, source=source)

    live = judge_profile(replace(state, profile=profile, any_host_gpus=any_host_gpus), None)

    assert live.is_degraded
    assert live.problem.endswith(
        "this host's GPUs cannot be read, so that each launch needs --any-host"
    )
    # Somebody may well have activated it here: that alone does not help.
    assert "nobody" not in live.problem
    assert live.advice == "nccltune run --any-host -- CMD"


def test_judge_of_a_foreign_profile_that_a_person_insists_on_is_not_degraded() -> None:
    foreign = active(replace(HERE, nccl_version="2.27.5"))
    assert judge_profile(foreign, HERE).is_degraded

    live = judge_profile(replace(foreign, any_host_gpus=HERE.gpu_uuids), HERE)

    assert live.match is MatchKind.FOREIGN
    assert not live.is_degraded
