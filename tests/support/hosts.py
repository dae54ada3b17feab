"""Hosts that are not there: plans and benches whose ranks drive ``standin_device``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccltune.bench.host import HostPlan
from nccltune.bench.launcher import GpuBench
from nccltune.host.hardware import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

REPOSITORY = Path(__file__).resolve().parents[2]
STANDIN_MODULE = "tests.support.standin_device"


def standin_gpu(idx: int) -> Gpu:
    """Return a GPU that is on no bus."""
    return Gpu(
        idx=idx,
        uuid=f"GPU-{idx:08d}",
        name="Stand-in",
        pci_bus_id=f"0000:{idx:02x}:00.0",
        memory_total_bytes=1 << 37,
        memory_free_bytes=1 << 37,
        memory_used_bytes=0,
        compute_capability="sm90",
        is_mig_enabled=False,
        numa_node=None,
        processes=(),
    )


def standin_plan(rank_count: int, *, is_shared: bool = False) -> HostPlan:
    """Return a plan with one stand-in GPU a rank, or one for all."""
    gpus = tuple(standin_gpu(0 if is_shared else idx) for idx in range(rank_count))
    return HostPlan(gpus=gpus, is_shared=is_shared, rank_count=rank_count)


def standin_bench(
    rank_count: int, *, faults: str = "", base: Mapping[str, str] | None = None, **options: Any
) -> GpuBench:
    """Start a bench of real rank processes on no GPU."""
    environ = {"PYTHONPATH": str(REPOSITORY), "STANDIN_FAULTS": faults, **(base or {})}
    plan = standin_plan(rank_count)
    return GpuBench(plan, environ, device_module=STANDIN_MODULE, **options)
