"""Whether NCCL carries a launch's all-reduces at all, asked before minutes are spent on it."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from nccltune.cli.envelope import Answer, Complaint
from nccltune.errors import ExitCode, HostError
from nccltune.host.gpu_choice import VARIABLE, visible_gpus
from nccltune.host.hardware import read_gpus
from nccltune.host.launch_gpus import gpus_of_launch
from nccltune.host.match import has_full_nvlink
from nccltune.sglang.allreduce_path import PathVerdict, all_reduce_path
from nccltune.sglang.argv import environ_at_server
from nccltune.sglang.defaults import base_environment, writes_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nccltune.cli.workload import Demand


def find_path(demand: Demand, *, use_gpus: bool) -> PathVerdict | None:
    """Predict what carries the verify all-reduces; None without a launch command.

    Args:
        demand: holds the launch and the model's shape.
        use_gpus: whether it would run on this host's GPUs; else they are not known.
    """
    command = demand.command
    if command is None:
        return None
    environ = environ_at_server(command.argv, os.environ)
    architecture: str | None = None
    is_joined: bool | None = None
    if use_gpus:
        hardware = read_gpus()
        architecture = gpus_of_launch(hardware, environ, command, demand.tp)[0].compute_capability
        here = hardware.fingerprint(
            visible_gpus(hardware, environ.get(VARIABLE)), nccl_version=None
        )
        is_joined = has_full_nvlink(here, replace(command, tp_size=demand.tp or command.tp_size))
    return all_reduce_path(
        command,
        demand.shape,
        gpu_architecture=architecture,
        has_full_nvlink=is_joined,
        environ=environ,
        version=sglang_version(),
    )


def bypass_answer(path: PathVerdict) -> Answer:
    """Say that NCCL settings would not reach this launch, and what would change that."""
    advice = f"; to let NCCL carry them: {path.fix}" if path.fix else ""
    message = f"{path.reason}{advice}; to search all the same add --anyway"
    return Answer(
        data={"all_reduce_path": path_data(path)},
        show=lambda: [
            "NCCL settings do not reach the verify pass of this launch. Nothing was run."
        ],
        exit_code=ExitCode.NO,
        errors=(Complaint("nccl_bypassed", message),),
    )


def bypass_warning(path: PathVerdict | None) -> tuple[str, ...]:
    """Say that NCCL may not carry this launch; nothing when it does, or no launch was given."""
    if path is None or path.is_nccl:
        return ()
    advice = f"; to let NCCL carry them: {path.fix}" if path.fix else ""
    certainty = "may not" if path.is_nccl is None else "does not"
    return (f"NCCL {certainty} carry the verify all-reduces of this launch: {path.reason}{advice}",)


def path_data(path: PathVerdict | None) -> Mapping[str, object] | None:
    """Lay out the path for the envelope."""
    return None if path is None else path.to_json()


def launch_environment(demand: Demand) -> tuple[dict[str, str], dict[str, str]]:
    """Return what SGLang writes for this launch: what gives way to the operator, what does not."""
    if demand.command is None:
        return base_environment(sglang_version(), demand.tp or 2), {}
    environ = environ_at_server(demand.command.argv, os.environ)
    writes = writes_for(demand.command, sglang_version(), environ)
    forced = {write.variable: write.value for write in writes if write.is_forced}
    return {write.variable: write.value for write in writes if not write.is_forced}, forced


def sglang_version() -> str | None:
    """Return the SGLang of this interpreter; None where it has none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def has_no_gpu(error: HostError) -> bool:
    """Tell a host without any NVIDIA GPU from one whose GPUs have a problem."""
    return error.code in ("nvml_absent", "no_gpu")
