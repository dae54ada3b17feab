"""What SGLang writes into the environment by itself before its ranks start, release by release.

A measurement under any other environment tunes a system that nobody runs. Read in SGLang
0.5.10.post1 to 0.5.23; releases between the ones that were read count as the older.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.sglang.command import LaunchCommand

Release = tuple[int, int, int]

GRAPH_REGISTER_RELEASE: Release = (0, 5, 20)
GRAPH_MIXING_RELEASE: Release = (0, 5, 15)
DETERMINISTIC_CHANNELS_RELEASE: Release = (0, 5, 18)

_RELEASE = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_DETERMINISTIC_CHANNELS = "8"


@dataclass(frozen=True, slots=True)
class EnvironmentWrite:
    """One variable that a launch writes.

    Attributes:
        is_forced: written over what the operator set; otherwise only where nothing was set.
        reason: the flag or rule behind it, for people.
    """

    variable: str
    value: str
    is_forced: bool
    reason: str


def release_of(version: str | None) -> Release | None:
    """Read the release out of a version; post releases and local parts do not matter here.

    >>> release_of("0.5.15.post1+cu130")
    (0, 5, 15)
    """
    match = _RELEASE.match(version.strip()) if version else None
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def is_at_least(version: str | None, release: Release) -> bool:
    """Tell whether a version has what came with a release; an unknown one counts as newest."""
    known = release_of(version)
    return known is None or known >= release


def base_environment(version: str | None = None, tp: int = 2) -> dict[str, str]:
    """Return what any plain launch on one node runs under: the baseline of every measurement."""
    environment = {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }
    if tp > 1 and is_at_least(version, GRAPH_REGISTER_RELEASE):
        environment["NCCL_GRAPH_REGISTER"] = "0"
    return environment


SGLANG_BASE_ENVIRONMENT: Mapping[str, str] = base_environment()
"""The base environment of the newest SGLang read."""


def writes_for(
    command: LaunchCommand, version: str | None = None, environ: Mapping[str, str] | None = None
) -> list[EnvironmentWrite]:
    """List what this launch writes, one entry a variable.

    Left out is what depends on the machine: several nodes of one NVLink fabric set
    ``NCCL_CUMEM_ENABLE`` and ``NCCL_MNNVL_ENABLE`` to 1 where nothing was set.

    Args:
        command: the launch.
        version: of the SGLang that runs it; None counts as the newest.
        environ: what SGLang finds, as ``environ_at_server`` gives it; None for nothing.
    """
    writes = [_cumem(command), _nvls(command)]
    if command.dcp_size > 1 and is_at_least(version, GRAPH_MIXING_RELEASE):
        is_forced = command.has("enable_symm_mem")
        reason = f"decode context parallel size {command.dcp_size}"
        writes.append(EnvironmentWrite("NCCL_GRAPH_MIXING_SUPPORT", "0", is_forced, reason))
    is_wide = max(command.tp_size, command.ep_size, command.dp_size, command.attn_dp_size) > 1
    if is_wide and command.has_decode_graphs and is_at_least(version, GRAPH_REGISTER_RELEASE):
        reason = "replayed graphs can hang with registered buffers"
        writes.append(EnvironmentWrite("NCCL_GRAPH_REGISTER", "0", False, reason))
    if command.value("moe_a2a_backend") == "deepep_v2":
        reason = "--moe-a2a-backend deepep_v2"
        writes.append(EnvironmentWrite("EP_REUSE_NCCL_COMM", "0", False, reason))
    if command.is_deterministic and command.tp_size > 1:
        writes += _deterministic(version, environ or {})
    writes.append(EnvironmentWrite("CUDA_DEVICE_MAX_CONNECTIONS", "8", True, "every launch"))
    return writes


def _cumem(command: LaunchCommand) -> EnvironmentWrite:
    name = "NCCL_CUMEM_ENABLE"
    if command.has("enable_symm_mem"):
        return EnvironmentWrite(name, "1", True, "--enable-symm-mem")
    if command.value("moe_a2a_backend") == "deepep_v2":
        return EnvironmentWrite(name, "1", False, "--moe-a2a-backend deepep_v2")
    is_sharded = command.has("enable_kv_cache_sharding") and command.nnodes == 1
    if is_sharded and not command.has("enable_memory_saver"):
        return EnvironmentWrite(name, "1", False, "--enable-kv-cache-sharding")
    return EnvironmentWrite(name, "0", False, "every launch")


def _nvls(command: LaunchCommand) -> EnvironmentWrite:
    for flag in ("enable_nccl_nvls", "enable_symm_mem"):
        if command.has(flag):
            reason = f"--{flag.replace('_', '-')}"
            return EnvironmentWrite("NCCL_NVLS_ENABLE", "1", True, reason)
    return EnvironmentWrite("NCCL_NVLS_ENABLE", "0", False, "every launch")


def _deterministic(version: str | None, environ: Mapping[str, str]) -> list[EnvironmentWrite]:
    reason = "--enable-deterministic-inference"
    writes = [EnvironmentWrite("NCCL_ALGO", "allreduce:tree", True, reason)]
    if is_at_least(version, DETERMINISTIC_CHANNELS_RELEASE):
        count = environ.get("SGLANG_DETERMINISTIC_NCCL_NCHANNELS") or _DETERMINISTIC_CHANNELS
        names = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
        writes += [EnvironmentWrite(name, count, True, reason) for name in names]
    return writes
