from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nccltune.bench.cpus import CpuTopology, parse_cpu_list, read_cpu_topology, share_cpus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def singles(*ranges: range) -> tuple[frozenset[int], ...]:
    return tuple(frozenset({cpu}) for cpus in ranges for cpu in cpus)


def two_sockets(cores_each: int) -> CpuTopology:
    """Two nodes with hyper-threads, numbered as Linux does on x86: siblings half the host apart."""
    count = 2 * cores_each
    cores = tuple(frozenset({cpu, cpu + count}) for cpu in range(count))
    nodes = {
        node: frozenset().union(*cores[node * cores_each : (node + 1) * cores_each])
        for node in (0, 1)
    }
    return CpuTopology(cores, nodes)


def gpu_nodes(home: str, rank_count: int) -> list[int | None]:
    if home == "split":
        return [rank * 2 // rank_count for rank in range(rank_count)]
    return [{"first": 0, "unknown": None, "elsewhere": 7}[home]] * rank_count


def are_disjoint(sets: Sequence[frozenset[int]]) -> bool:
    return sum(map(len, sets)) == len(frozenset().union(*sets))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3\n", {0, 1, 2, 3}), ("0,64\n", {0, 64}), ("0-1,8-9,15", {0, 1, 8, 9, 15}), ("\n", set())],
)
def test_parse_cpu_list_reads_the_kernels_form(text: str, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


def test_read_cpu_topology_finds_cores_and_nodes(tmp_path: Path) -> None:
    for cpu in range(4):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    for node in range(2):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{node},{node + 2}\n")

    topology = read_cpu_topology({0, 1, 2, 3}, tmp_path)

    assert topology.cores == (frozenset({0, 2}), frozenset({1, 3}))
    assert topology.nodes == {0: {0, 2}, 1: {1, 3}}


def test_read_cpu_topology_cuts_to_what_may_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "cpu/cpu1/topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text("1,5\n")
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(cpus)

    topology = read_cpu_topology({1, 2}, tmp_path)

    assert topology.cores == (frozenset({1}), frozenset({2}))
    assert topology.nodes == {0: {1, 2}}


def test_read_cpu_topology_without_sysfs_takes_each_cpu_for_a_core(tmp_path: Path) -> None:
    topology = read_cpu_topology({3, 1}, tmp_path)

    assert topology.cores == (frozenset({1}), frozenset({3}))
    assert topology.nodes == {}


def test_read_cpu_topology_on_this_machine_covers_every_usable_cpu() -> None:
    topology = read_cpu_topology()

    assert topology.cores
    assert are_disjoint(topology.cores)


def test_share_cpus_keeps_ranks_near_their_gpu_with_whole_cores() -> None:
    topology = two_sockets(8)

    shares = share_cpus(topology, [0, 0, 0, 0, 1, 1, 1, 1])

    assert shares.notes == ()
    for rank, cpus in enumerate(shares.cpu_sets):
        assert cpus <= topology.nodes[rank // 4]
        assert len(cpus) == 4
        assert all(core <= cpus or not core & cpus for core in topology.cores)
    assert are_disjoint(shares.cpu_sets)


@pytest.mark.parametrize(
    "topology",
    [
        two_sockets(32),
        two_sockets(2),
        CpuTopology(singles(range(2))),
        CpuTopology(singles(range(96)), {0: frozenset(range(96))}),
        CpuTopology(singles(range(8)), {0: frozenset(range(1)), 1: frozenset(range(1, 8))}),
    ],
    ids=["2x32", "2x2", "2", "96 on one node", "lopsided"],
)
@pytest.mark.parametrize("home", ["split", "first", "unknown", "elsewhere"])
def test_share_cpus_gives_every_rank_cpus_of_its_own_or_says_that_it_cannot(
    topology: CpuTopology, home: str
) -> None:
    everything = frozenset().union(*topology.cores)
    for rank_count in range(1, 65):
        shares = share_cpus(topology, gpu_nodes(home, rank_count))

        assert len(shares.cpu_sets) == rank_count
        assert all(cpus and cpus <= everything for cpus in shares.cpu_sets)
        if rank_count <= len(everything):
            assert are_disjoint(shares.cpu_sets)
        if rank_count > len(topology.cores):
            assert "share" in shares.notes[0]


def test_share_cpus_with_fewer_cpus_than_ranks_shares_all_and_says_so() -> None:
    shares = share_cpus(CpuTopology(singles(range(2))), [None] * 8)

    assert shares.cpu_sets == (frozenset({0, 1}),) * 8
    assert shares.notes == (
        "8 ranks share 2 CPU cores: times will be noisier than on a host with a core for each",
    )


def test_share_cpus_with_fewer_cores_than_ranks_splits_hardware_threads() -> None:
    shares = share_cpus(CpuTopology((frozenset({0, 2}), frozenset({1, 3}))), [None] * 4)

    assert sorted(shares.cpu_sets, key=min) == [{0}, {1}, {2}, {3}]
    assert len(shares.notes) == 1


def test_share_cpus_with_too_few_near_cores_says_who_is_far() -> None:
    topology = CpuTopology(
        singles(range(8)), {0: frozenset({0, 1}), 1: frozenset({2, 3, 4, 5, 6, 7})}
    )

    shares = share_cpus(topology, [0, 0, 0, 0])

    assert shares.cpu_sets[:2] == (frozenset({0}), frozenset({1}))
    assert shares.notes == (
        "2 of 4 ranks run on CPU cores far from their GPU: this process may not use enough cores"
        " near it",
    )


def test_share_cpus_with_unknown_gpu_node_blames_nobody() -> None:
    assert share_cpus(two_sockets(4), [None, None]).notes == ()
