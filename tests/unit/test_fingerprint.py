from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nccltune.host.fingerprint import Fingerprint, Match, MatchKind, compare

HERE = Fingerprint(
    gpu_names=("NVIDIA H200",) * 2,
    gpu_uuids=("GPU-a", "GPU-b"),
    driver_version="580.159.04",
    nccl_version="2.28.9",
    link_matrix=(("X", "NV18"), ("NV18", "X")),
    numa_nodes=(0, 1),
    world_size=2,
    torch_version="2.11.0+cu130",
)
OTHER_SERIALS = ("GPU-c", "GPU-d")


def changed(field: str, value: object) -> dict[str, object]:
    return {**HERE.to_json(), field: value}


def test_compare_with_itself_is_identical() -> None:
    assert compare(HERE, replace(HERE)) == Match(MatchKind.IDENTICAL)


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"gpu_uuids": OTHER_SERIALS}, ("gpu_uuids",)),
        ({"driver_version": "580.95.05"}, ("driver_version",)),
        ({"torch_version": "2.12.0"}, ("torch_version",)),
        ({"numa_nodes": (2, 3)}, ("numa_nodes",)),
        (
            {"gpu_uuids": OTHER_SERIALS, "driver_version": "580.1"},
            ("gpu_uuids", "driver_version"),
        ),
    ],
)
def test_compare_with_same_kind_of_host_is_equivalent(
    changes: dict[str, Any], differing: tuple[str, ...]
) -> None:
    assert compare(HERE, replace(HERE, **changes)) == Match(MatchKind.EQUIVALENT, differing)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu_names", ("NVIDIA H100", "NVIDIA H200")),
        ("nccl_version", "2.29.2"),
        ("nccl_version", None),
        ("driver_version", "570.86.10"),
        ("driver_version", None),
        ("link_matrix", (("X", "SYS"), ("SYS", "X"))),
        ("link_matrix", (("X", "NV12"), ("NV12", "X"))),
        ("numa_nodes", (0, 0)),
        ("world_size", 4),
    ],
)
def test_compare_with_other_kind_of_host_is_foreign_and_names_the_field(
    field: str, value: object
) -> None:
    there = replace(HERE, **{field: value})  # type: ignore[arg-type]

    assert compare(HERE, there) == Match(MatchKind.FOREIGN, (field,))
    assert compare(there, HERE).kind is MatchKind.FOREIGN


def test_compare_with_other_gpu_count_is_foreign() -> None:
    there = replace(
        HERE,
        gpu_names=("NVIDIA H200",),
        gpu_uuids=("GPU-a",),
        link_matrix=(("X",),),
        numa_nodes=(0,),
        world_size=1,
    )

    match = compare(HERE, there)

    assert match.kind is MatchKind.FOREIGN
    assert match.differing == ("gpu_names", "world_size", "link_matrix", "numa_nodes")


def test_compare_with_foreign_host_names_only_what_makes_it_foreign() -> None:
    there = replace(HERE, gpu_uuids=OTHER_SERIALS, nccl_version="2.29.7", torch_version="2.12")

    assert compare(HERE, there) == Match(MatchKind.FOREIGN, ("nccl_version",))


def test_compare_with_same_gpus_in_other_order_and_other_links_is_foreign() -> None:
    links = (("X", "PIX", "SYS"), ("PIX", "X", "SYS"), ("SYS", "SYS", "X"))
    ordered = replace(
        HERE,
        gpu_names=("A",) * 3,
        gpu_uuids=("1", "2", "3"),
        link_matrix=links,
        numa_nodes=(0, 0, 1),
        world_size=3,
    )
    turned = replace(
        ordered,
        gpu_uuids=("1", "3", "2"),
        link_matrix=(("X", "SYS", "PIX"), ("SYS", "X", "SYS"), ("PIX", "SYS", "X")),
        numa_nodes=(0, 1, 0),
    )

    assert compare(ordered, turned) == Match(MatchKind.FOREIGN, ("link_matrix", "numa_nodes"))


@pytest.mark.parametrize("torch_version", [None, "2.11.0+cu130"])
def test_compare_without_known_torch_is_identical(torch_version: str | None) -> None:
    one = replace(HERE, torch_version=torch_version)

    assert compare(one, replace(HERE, torch_version=None)).kind is MatchKind.IDENTICAL


HIDDEN = replace(HERE, link_matrix=(("X", None), (None, "X")), is_partial=True)


def test_compare_with_hidden_topology_of_the_same_gpus_is_equivalent() -> None:
    expected = Match(MatchKind.EQUIVALENT, ("link_matrix", "is_partial"))

    assert compare(HERE, HIDDEN) == expected
    assert compare(HIDDEN, HERE) == expected


@pytest.mark.parametrize("numa_nodes", [(None, 1), (0, None), (None, None), (None, 0)])
def test_compare_with_hidden_numa_node_of_the_same_gpus_is_equivalent(
    numa_nodes: tuple[int | None, int | None],
) -> None:
    there = replace(HERE, numa_nodes=numa_nodes)

    assert compare(HERE, there) == Match(MatchKind.EQUIVALENT, ("numa_nodes",))
    assert compare(HERE, replace(there, gpu_uuids=OTHER_SERIALS)).kind is MatchKind.FOREIGN


def test_compare_with_hidden_topology_on_both_sides_of_the_same_gpus_is_identical() -> None:
    assert compare(HIDDEN, replace(HIDDEN)).kind is MatchKind.IDENTICAL


def test_compare_with_hidden_topology_of_other_gpus_is_foreign() -> None:
    there = replace(HIDDEN, gpu_uuids=OTHER_SERIALS)

    assert compare(HERE, there) == Match(MatchKind.FOREIGN, ("link_matrix", "is_partial"))
    assert compare(HIDDEN, there) == Match(MatchKind.FOREIGN, ("link_matrix", "is_partial"))


def test_compare_with_visible_but_flattened_topology_of_other_gpus_is_foreign() -> None:
    there = replace(HERE, gpu_uuids=OTHER_SERIALS, is_partial=True)

    assert compare(HERE, there) == Match(MatchKind.FOREIGN, ("is_partial",))


def test_from_json_reads_back_what_to_json_wrote() -> None:
    for fingerprint in (HERE, HIDDEN, replace(HERE, torch_version=None, numa_nodes=(None, 0))):
        written = json.loads(json.dumps(fingerprint.to_json()))

        assert written == fingerprint.to_json()
        assert Fingerprint.from_json(written) == fingerprint


def test_from_json_without_optional_fields_fills_them() -> None:
    data = HERE.to_json()
    del data["torch_version"], data["is_partial"]

    assert Fingerprint.from_json(data) == replace(HERE, torch_version=None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "expected an object"),
        (None, "expected an object"),
        ({}, "no field 'driver_version'"),
        (changed("colour", "green"), "unknown field 'colour'"),
        (changed("gpu_names", "NVIDIA H200"), "gpu_names must be a list"),
        (changed("gpu_names", [1, 2]), "gpu_names must hold text, not 1"),
        (changed("gpu_uuids", ["GPU-a"]), "2 gpu_names need as many gpu_uuids"),
        (changed("driver_version", 580), "driver_version must hold text, not 580"),
        (changed("link_matrix", ["X", "NV18"]), "link_matrix must hold lists"),
        (changed("link_matrix", [["X", 18], [18, "X"]]), "link_matrix must hold text"),
        (changed("link_matrix", [["X"], ["X"]]), "rows and columns of link_matrix"),
        (changed("numa_nodes", ["0", "1"]), "numa_nodes must hold numbers"),
        (changed("numa_nodes", [True, False]), "numa_nodes must hold numbers"),
        (changed("world_size", 0), "world_size must be a positive number, not 0"),
        (changed("world_size", "2"), "world_size must be a positive number"),
        (changed("world_size", True), "world_size must be a positive number"),
        (changed("is_partial", 1), "is_partial must be true or false"),
    ],
)
def test_from_json_with_bad_data_names_the_field(data: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fingerprint.from_json(data)


def test_digest_is_equal_for_equal_facts_only() -> None:
    assert HERE.digest() == Fingerprint.from_json(HERE.to_json()).digest()
    assert HERE.digest() != replace(HERE, world_size=3).digest()
    assert len(HERE.digest()) == 64
