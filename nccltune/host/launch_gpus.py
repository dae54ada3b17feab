"""Which GPUs the ranks of a launch run on: one answer for all who measure or look at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nccltune.host.gpu_choice import VARIABLE, choose_gpus
from nccltune.host.match import first_group

if TYPE_CHECKING:
    from nccltune.host.hardware import Gpu, Hardware
    from nccltune.sglang.command import LaunchCommand


def gpus_of_launch(
    hardware: Hardware,
    environ: Mapping[str, str],
    command: LaunchCommand | None,
    rank_count: int | None,
    *,
    is_shared: bool = False,
) -> tuple[Gpu, ...]:
    """Return the GPUs of a launch's first tensor-parallel group, one a rank, in rank order.

    Args:
        hardware: what the host has.
        environ: what SGLang finds, as ``environ_at_server`` gives it.
        command: the launch; None where there is none, and then the first visible GPUs are meant.
        rank_count: tensor-parallel size; None for that of the launch, or for all visible GPUs.
        is_shared: put all ranks on the first of these GPUs.

    Raises:
        HostError: there is no GPU to use, or MIG is on.
        UsageProblem: as for ``choose_gpus``.
    """
    visible = environ.get(VARIABLE)
    if command is None:
        return choose_gpus(hardware, visible, rank_count, is_shared=is_shared)
    count = command.tp_size if rank_count is None else rank_count
    group = first_group(command, count)
    return choose_gpus(hardware, visible, count, is_shared=is_shared, group=group)
