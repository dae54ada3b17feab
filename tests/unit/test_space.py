from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest

from nccltune.envvars import canonical, check_settings
from nccltune.recording import Manifest
from nccltune.search.space import (
    RING_LL,
    SPARSE_SIZES,
    TREE_LL,
    HostFacts,
    Space,
    facts_of_recording,
)

NVLINK = HostFacts(is_ll128_offered=True, has_clusters=True, has_full_nvlink=True, uses_shm=False)
PCIE = HostFacts(is_ll128_offered=False, has_clusters=False, has_full_nvlink=False, uses_shm=True)
ALL_FACTS = [HostFacts(*flags) for flags in itertools.product((False, True), repeat=4)]
PINNED: list[dict[str, str]] = [
    {},
    {"NCCL_PROTO": "LL"},
    {"NCCL_MAX_NCHANNELS": "16"},
    {"NCCL_P2P_LEVEL": "SYS"},
    {"NCCL_THREAD_THRESHOLDS": "8 8 64 16 8 64"},
]
FOLK = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}


def dense_draws(space: Space, seed: int, count: int) -> Iterator[dict[str, str | None]]:
    """Parameters drawn evenly from the whole space."""
    rng = random.Random(seed)
    choices: dict[str, list[str | None]] = {name: [None] for name in space.distributions}
    for name, choice in space.single_choices():
        choices[name].append(choice)
    for _ in range(count):
        yield {name: rng.choice(some) for name, some in choices.items()}


@pytest.mark.parametrize("facts", ALL_FACTS, ids=str)
def test_space_settings_of_any_parameters_can_be_turned_back(facts: HostFacts) -> None:
    for seed, pinned in enumerate(PINNED):
        space = Space(facts, pinned)
        for params in dense_draws(space, seed, 40):
            settings = space.settings(params)
            back = space.params(settings)
            assert back is not None
            assert back.keys() == params.keys()
            assert space.settings(back) == settings
            assert space.params(space.settings(back)) == back


@pytest.mark.parametrize("facts", ALL_FACTS, ids=str)
def test_space_settings_are_valid_and_canonical(facts: HostFacts) -> None:
    space = Space(facts, {})
    for params in dense_draws(space, 7, 60):
        settings = space.settings(params)
        check_settings(settings)
        assert canonical(settings) == settings


@pytest.mark.parametrize("pinned", PINNED, ids=str)
def test_space_never_sets_what_the_operator_has_pinned(pinned: dict[str, str]) -> None:
    space = Space(PCIE, pinned)
    for params in dense_draws(space, 3, 60):
        assert not canonical(space.settings(params)).keys() & canonical(pinned).keys()


def test_space_with_p2p_pinned_leaves_the_other_way_to_say_it_alone() -> None:
    for pinned in ({"NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_DISABLE": "1"}):
        assert not Space(PCIE, pinned).distributions.keys() & {
            "NCCL_P2P_LEVEL",
            "NCCL_P2P_DISABLE",
        }


@pytest.mark.parametrize(
    ("fact", "dimensions", "is_present"),
    [
        ({"has_clusters": True}, {"NCCL_CGA_CLUSTER_SIZE"}, True),
        ({"has_clusters": False}, {"NCCL_CGA_CLUSTER_SIZE"}, False),
        ({"has_full_nvlink": False}, {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"}, True),
        ({"has_full_nvlink": True}, {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"}, False),
        ({"uses_shm": True}, {"NCCL_SHM_LOCALITY"}, True),
        ({"uses_shm": False}, {"NCCL_SHM_LOCALITY"}, False),
    ],
)
def test_space_has_a_dimension_only_where_the_host_makes_it_matter(
    fact: dict[str, bool], dimensions: set[str], is_present: bool
) -> None:
    space = Space(dataclasses.replace(NVLINK, **fact), {})

    assert (dimensions <= space.distributions.keys()) is is_present
    assert space.dimension_count == len(space.distributions)


@pytest.mark.parametrize("is_offered", [True, False])
def test_space_names_ll128_only_where_nccl_offers_it(is_offered: bool) -> None:
    space = Space(dataclasses.replace(NVLINK, is_ll128_offered=is_offered), {})
    protocols = {choice for name, choice in space.single_choices() if name == "NCCL_PROTO"}

    assert ("allreduce:LL128" in protocols) is is_offered
    assert {"allreduce:LL", "allreduce:Simple"} <= protocols


def test_space_names_only_all_reduce() -> None:
    chosen = Space(NVLINK, {}).single_choices()

    for name, choice in chosen:
        if name in ("NCCL_PROTO", "NCCL_ALGO"):
            assert choice.startswith("allreduce:")


def test_space_settings_lower_bound_above_the_upper_is_written_as_nccl_takes_it() -> None:
    space = Space(NVLINK, {})

    assert space.settings({"NCCL_MIN_CTAS": "32", "NCCL_MAX_CTAS": "8"}) == {
        "NCCL_MIN_CTAS": "8",
        "NCCL_MAX_CTAS": "8",
    }


def test_space_settings_level_beside_disabled_p2p_is_left_out() -> None:
    settings = Space(PCIE, {}).settings({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"})

    assert settings == {"NCCL_P2P_DISABLE": "1"}


def test_space_settings_writes_both_thresholds_in_their_places() -> None:
    settings = Space(NVLINK, {}).settings({TREE_LL: "2", RING_LL: "16"})

    assert settings == {"NCCL_THREAD_THRESHOLDS": "2 -2 -2 16 -2 -2"}


def test_space_settings_of_nothing_chosen_are_the_baseline() -> None:
    space = Space(NVLINK, {})

    assert space.settings(dict.fromkeys(space.distributions)) == {}
    assert space.params({}) == dict.fromkeys(space.distributions)


def test_space_params_of_the_folk_profile_are_known_in_its_own_spelling() -> None:
    on_nvlink = Space(NVLINK, {}).params(FOLK)
    on_pcie = Space(PCIE, {}).params(FOLK)

    assert on_nvlink is not None
    assert on_nvlink["NCCL_PROTO"] == "allreduce:LL"
    assert on_nvlink["NCCL_MAX_CTAS"] == "16"
    assert "NCCL_P2P_LEVEL" not in on_nvlink
    assert on_pcie is not None
    assert on_pcie["NCCL_P2P_LEVEL"] == "SYS"


@pytest.mark.parametrize(
    "settings",
    [
        {"NCCL_CROSS_NIC": "1"},
        {"NCCL_NTHREADS": "100"},
        {"NCCL_PROTO": "bogus"},
        {"NCCL_ALGO": "allreduce:CollnetDirect"},
        {"NCCL_BUFFSIZE": "1000"},
        {"NCCL_THREAD_THRESHOLDS": "-2 4 -2 4 -2 -2"},
        {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 5 -2 -2"},
        {"NCCL_THREAD_THRESHOLDS": "8"},
        {"NCCL_THREAD_THRESHOLDS": "1 2 3 4 5 6 7"},
        {"NCCL_THREAD_THRESHOLDS": "a b c d e f"},
        {"NCCL_THREAD_THRESHOLDS": ""},
    ],
    ids=str,
)
def test_space_params_of_settings_outside_are_none(settings: dict[str, str]) -> None:
    params = Space(NVLINK, {}).params(settings)

    # An empty list of thresholds is none at all.
    assert params == (None if any(settings.values()) else dict.fromkeys(params or {}))


def test_space_params_of_thresholds_with_any_negative_number_are_kept_ones() -> None:
    params = Space(NVLINK, {}).params({"NCCL_THREAD_THRESHOLDS": "-1 -1 -7 4 -2 -2"})

    assert params is not None
    assert (params[TREE_LL], params[RING_LL]) == (None, "4")


@pytest.mark.parametrize("seed", range(4))
def test_space_sparse_params_set_few_dimensions_and_deal_all_of_them_in_turn(seed: int) -> None:
    space = Space(NVLINK, {})
    draws = list(itertools.islice(space.sparse_params(random.Random(seed)), 60))
    chosen = [[name for name, choice in one.items() if choice is not None] for one in draws]

    assert {len(names) for names in chosen} <= set(range(1, max(SPARSE_SIZES) + 1))
    dealt = list(itertools.chain.from_iterable(chosen))
    assert set(dealt[: space.dimension_count + max(SPARSE_SIZES)]) == set(space.distributions)
    again = itertools.islice(space.sparse_params(random.Random(seed)), 60)
    assert list(again) == draws


def test_space_with_everything_pinned_has_no_dimension() -> None:
    names = {name for name, _ in Space(NVLINK, {}).single_choices()}
    values = {name: "1" for name in names if name.startswith("NCCL_")}
    pinned = {**values, "NCCL_THREAD_THRESHOLDS": "1 1 1 1 1 1"}

    space = Space(NVLINK, pinned)

    assert space.dimension_count == 0
    assert next(space.sparse_params(random.Random(0))) == {}
    assert space.settings({}) == {}


@pytest.mark.parametrize(
    ("gpus", "base", "facts"),
    [
        ("2x NVIDIA H200 (NVLink, NV18)", {}, NVLINK),
        (
            "2x NVIDIA H200 (NVLink, NV18)",
            {"NCCL_P2P_DISABLE": "1"},
            dataclasses.replace(NVLINK, is_ll128_offered=False, uses_shm=True),
        ),
        (
            "8x NVIDIA A100 (NODE, NV4, SYS)",
            {},
            HostFacts(
                is_ll128_offered=False, has_clusters=False, has_full_nvlink=False, uses_shm=False
            ),
        ),
        (
            "4x NVIDIA RTX PRO 6000",
            {},
            HostFacts(
                is_ll128_offered=False, has_clusters=False, has_full_nvlink=False, uses_shm=False
            ),
        ),
    ],
    ids=["nvlink", "shm", "pairs", "pcie"],
)
def test_facts_of_recording_come_from_its_description(
    gpus: str, base: dict[str, str], facts: HostFacts
) -> None:
    manifest = Manifest(
        origin="test",
        gpus=gpus,
        driver=None,
        nccl=None,
        torch=None,
        recorded_at="2026-01-01",
        method="none",
        base_environment=base,
        world_size=2,
        payloads=(),
    )

    assert facts_of_recording(manifest) == facts
