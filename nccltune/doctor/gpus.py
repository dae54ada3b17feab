"""Which GPUs are looked at: those of the launch, else all that are visible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from nccltune.doctor.check import counted
from nccltune.errors import HostError, NccltuneError, UsageProblem
from nccltune.host.gpu_choice import VARIABLE, visible_gpus
from nccltune.host.launch_gpus import gpus_of_launch
from nccltune.host.match import needed_gpus

if TYPE_CHECKING:
    from nccltune.host.hardware import Gpu, Hardware
    from nccltune.sglang.command import LaunchCommand


class Choice(NamedTuple):
    """Every visible GPU, those of the first group of ranks, and why there are none of these."""

    visible: tuple[Gpu, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    error: NccltuneError | None = None


def choose(
    hardware: Hardware | None, environ: Mapping[str, str], launch: LaunchCommand | None
) -> Choice:
    """Choose the GPUs to look at; nothing where the driver shows none.

    Args:
        hardware: what the host has; None where NVML cannot be used.
        environ: what SGLang finds, as ``environ_at_server`` gives it.
        launch: None where there is none.
    """
    if hardware is None:
        return Choice()
    try:
        visible = visible_gpus(hardware, environ.get(VARIABLE))
        if launch is not None and needed_gpus(launch) > len(visible):
            return Choice(visible, error=_too_few(needed_gpus(launch), hardware))
        count = len(visible) if launch is None else max(1, launch.tp_size // launch.nnodes)
        # One GPU is no error by itself: it is looked at as several would be.
        is_one = count == 1
        gpus = gpus_of_launch(hardware, environ, launch, max(2, count), is_shared=is_one)
        return Choice(visible, gpus[:count])
    except (UsageProblem, HostError) as error:
        return Choice(error=error)


def _too_few(wanted: int, hardware: Hardware) -> UsageProblem:
    return UsageProblem(
        f"the launch needs {counted(wanted, 'GPU')} here, and fewer of this host's "
        f"{len(hardware.gpus)} are visible; lower --tp, or see {VARIABLE}",
        code="too_few_gpus",
    )
