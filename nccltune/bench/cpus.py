"""CPU cores for the ranks: cores of its own for each rank, near its GPU where that is known."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

SYS_CPU_ROOT = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The CPUs that this process may use.

    Attributes:
        cores: groups of CPUs that are hardware threads of one core, in the kernel's order.
        nodes: CPUs by NUMA node; empty where the kernel does not say.
    """

    cores: tuple[frozenset[int], ...]
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CpuShares:
    """One set of CPUs a rank, and what is not as it should be, in words."""

    cpu_sets: tuple[frozenset[int], ...]
    notes: tuple[str, ...] = ()


def read_cpu_topology(
    available: AbstractSet[int] | None = None, sys_root: Path = SYS_CPU_ROOT
) -> CpuTopology:
    """Read cores and NUMA nodes, cut to the CPUs that this process may use.

    Args:
        available: those CPUs; None to ask the kernel.
        sys_root: folder with ``cpu/`` and ``node/``. What is missing there is left out: a CPU of
            unknown siblings counts as a core.
    """
    usable = frozenset(os.sched_getaffinity(0) if available is None else available)
    cores: list[frozenset[int]] = []
    seen: set[int] = set()
    for cpu in sorted(usable):
        if cpu in seen:
            continue
        listed = _read_cpu_list(sys_root / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        core = (listed & usable) | {cpu}
        cores.append(core)
        seen |= core
    nodes = {}
    for folder in sorted(sys_root.glob("node/node[0-9]*")):
        cpus = _read_cpu_list(folder / "cpulist") & usable
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return CpuTopology(tuple(cores), nodes)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Read the kernel's list form.

    >>> sorted(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def share_cpus(topology: CpuTopology, rank_nodes: Sequence[int | None]) -> CpuShares:
    """Deal cores to ranks.

    Every rank gets as many cores as the host has for each, from its GPU's node as far as that has
    enough, else from what is left. A core is never split between ranks while there are cores
    enough; with fewer CPUs than ranks the kernel shares all of them, and the shares say so.

    Args:
        topology: what there is.
        rank_nodes: NUMA node of each rank's GPU, None where unknown.
    """
    rank_count = len(rank_nodes)
    units, notes = list(topology.cores), []
    if len(units) < rank_count:
        units = [frozenset({cpu}) for core in units for cpu in sorted(core)]
        notes.append(
            f"{rank_count} ranks share {len(topology.cores)} CPU cores: times will be noisier than"
            " on a host with a core for each"
        )
    if len(units) < rank_count:
        everything = frozenset().union(*units)
        return CpuShares((everything,) * rank_count, tuple(notes))
    quota = len(units) // rank_count
    dealt = _deal_near(units, topology.nodes, rank_nodes, quota)
    left = [unit for unit in units if not any(unit <= cpus for cpus in dealt.values())]
    sets = []
    strangers = 0
    for rank, node in enumerate(rank_nodes):
        if rank not in dealt:
            dealt[rank] = frozenset().union(*left[:quota])
            left = left[quota:]
            strangers += node is not None and bool(topology.nodes)
        sets.append(dealt[rank])
    if strangers:
        notes.append(
            f"{strangers} of {rank_count} ranks run on CPU cores far from their GPU: this process"
            " may not use enough cores near it"
        )
    return CpuShares(tuple(sets), tuple(notes))


def _deal_near(
    units: Sequence[frozenset[int]],
    nodes: Mapping[int, frozenset[int]],
    rank_nodes: Sequence[int | None],
    quota: int,
) -> dict[int, frozenset[int]]:
    """Deal each node's cores to the ranks that live there, as far as they go round."""
    dealt: dict[int, frozenset[int]] = {}
    for node, cpus in nodes.items():
        ranks = [rank for rank, home in enumerate(rank_nodes) if home == node]
        near = [unit for unit in units if unit <= cpus]
        if not ranks or not near:
            continue
        each = max(1, min(quota, len(near) // len(ranks)))
        for position, rank in enumerate(ranks[: len(near) // each]):
            dealt[rank] = frozenset().union(*near[position * each : (position + 1) * each])
    return dealt


def _read_cpu_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpu_list(path.read_text())
    except (OSError, ValueError):
        return frozenset()
