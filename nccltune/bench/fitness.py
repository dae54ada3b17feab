"""Whether a host is fit to measure on: GPUs in use, shared memory, GPU memory, inherited settings.

Each check says what it found; ``nccltune.bench.host.preflight`` decides what stops a measurement.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.envvars.settings import search_domain
from nccltune.errors import BusyError, HostError
from nccltune.host.hardware import SAME_GPU, Gpu, GpuProcess

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nccltune.host.fingerprint import LinkMatrix

SHM_PATH = Path("/dev/shm")  # noqa: S108 - NCCL's own choice

SHM_SEGMENT_BYTES = 9_637_888
"""One connection through host memory: buffers of default size for three protocols (nccl#290)."""

DEFAULT_BUFFER_BYTES = 4 << 20
"""The part of it that NCCL_BUFFSIZE sets: NCCL's own size of the Simple protocol's buffer."""

DEFAULT_CHANNELS = 2
"""Fewest channels that NCCL opens by itself between GPUs without NVLink."""

SEARCHED_CHANNELS = max(int(value) for value in search_domain("NCCL_MIN_CTAS"))
SEARCHED_BUFFER_BYTES = max(int(value) for value in search_domain("NCCL_BUFFSIZE"))
"""The most that a search asks for there."""

RANK_ALLOWANCE_BYTES = 1 << 30
"""For a rank's CUDA context, torch and NCCL's buffers: a round figure set aside, not measured."""

UNSEEN_MEMORY_BYTES = 1 << 30
"""GPU memory in use without a process to show for it, from which on it is worth a word."""

DIRECT_LINKS = ("NV", "PIX", "PXB")
"""NCCL's default P2P level: GPUs that are farther apart talk through host memory."""

NAMED_PROCESSES = 4
"""As many are named in a message that has to stay one line."""


def read_shm_free_bytes(path: Path = SHM_PATH) -> int | None:
    """Return the free bytes of NCCL's shared-memory folder; None where there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def estimate_shm_bytes(
    rank_count: int,
    channel_count: int = DEFAULT_CHANNELS,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> int:
    """Estimate what NCCL takes from ``/dev/shm`` when all ranks of a host talk through it.

    A ring needs one connection a rank and channel; a tree inside one host is a chain, used in both
    directions. NCCL connects each of them when it is first used: one alone takes less.
    """
    segment_bytes = SHM_SEGMENT_BYTES - DEFAULT_BUFFER_BYTES + buffer_bytes
    return (rank_count + 2 * (rank_count - 1)) * channel_count * segment_bytes


def searched_shm_bytes(rank_count: int) -> int:
    """Estimate it for the candidate of a search that takes most."""
    return estimate_shm_bytes(rank_count, SEARCHED_CHANNELS, SEARCHED_BUFFER_BYTES)


def estimate_rank_bytes(payload_bytes: int, rank_count: int) -> int:
    """Estimate the GPU memory of one rank.

    The data check holds every rank's part in four-byte numbers and the exact sum in eight-byte
    ones, where the payload has two-byte ones; timing needs less.
    """
    return (2 * rank_count + 10) * payload_bytes + RANK_ALLOWANCE_BYTES


def find_busy(gpus: Sequence[Gpu], own_pids: Collection[int]) -> list[BusyError]:
    """Name every GPU that somebody else computes on."""
    errors = []
    for gpu in _distinct(gpus):
        others = [process for process in gpu.processes or () if process.pid not in own_pids]
        if others:
            message = (
                f"GPU {gpu.idx} ({gpu.uuid}) is in use by {_named(others)}: end that, choose other"
                " GPUs with CUDA_VISIBLE_DEVICES, or measure anyway with --force"
            )
            errors.append(BusyError(message, code="gpu_busy"))
    return errors


def find_unseen_memory(gpus: Sequence[Gpu]) -> list[str]:
    """Name GPUs whose memory is used by nobody that shows: another container's work, as a rule."""
    return [
        f"GPU {gpu.idx} ({gpu.uuid}): {gpu.memory_used_bytes >> 20} MiB are in use by processes"
        " that do not show here, so that times may be disturbed"
        for gpu in _distinct(gpus)
        if not gpu.processes
        and gpu.memory_used_bytes is not None
        and gpu.memory_used_bytes >= UNSEEN_MEMORY_BYTES
    ]


def find_small_shm(
    rank_count: int, links: LinkMatrix, environ: Mapping[str, str], free_bytes: int | None
) -> list[HostError]:
    """Say when ``/dev/shm`` cannot hold what the ranks need of it even without any settings."""
    needed_bytes = estimate_shm_bytes(rank_count)
    if free_bytes is None or free_bytes >= needed_bytes or not _needs_shm(links, environ):
        return []
    message = (
        f"{SHM_PATH} has {free_bytes >> 20} MiB free, but {rank_count} ranks need about"
        f" {needed_bytes >> 20} MiB there, {SHM_SEGMENT_BYTES} B a connection, because some GPUs"
        f" reach one another only through host memory: {_shm_advice(rank_count)}"
    )
    return [HostError(message, code="shm_too_small")]


def find_tight_shm(
    rank_count: int, links: LinkMatrix, environ: Mapping[str, str], free_bytes: int | None
) -> list[str]:
    """Warn when some candidates may not fit, or would not if NVLink or P2P failed."""
    if free_bytes is None:
        is_needed = _needs_shm(links, environ)
        return [f"{SHM_PATH} cannot be looked at, and NCCL needs it here"] if is_needed else []
    free = f"{SHM_PATH} has {free_bytes >> 20} MiB free"
    if not _needs_shm(links, environ):
        if free_bytes >= estimate_shm_bytes(rank_count):
            return []
        reason = "enough as long as the GPUs reach one another directly; otherwise"
    elif free_bytes >= searched_shm_bytes(rank_count):
        return []
    else:
        reason = "candidates with many channels and large buffers may not fit;"
    return [f"{free}: {reason} {_shm_advice(rank_count)}"]


def check_gpu_memory(gpus: Sequence[Gpu], payload_bytes: int) -> list[str]:
    """Return warnings about unreadable memory.

    Raises:
        HostError: the ranks' buffers do not fit beside what is in use.
    """
    each_bytes = estimate_rank_bytes(payload_bytes, len(gpus))
    ranks_on = Counter(gpu.uuid for gpu in gpus)
    warnings = []
    for gpu in _distinct(gpus):
        needed_bytes = each_bytes * ranks_on[gpu.uuid]
        if gpu.memory_free_bytes is None:
            warnings.append(f"GPU {gpu.idx} ({gpu.uuid}) does not say how much memory is free")
        elif gpu.memory_free_bytes < needed_bytes:
            raise HostError(
                f"GPU {gpu.idx} ({gpu.uuid}) has {gpu.memory_free_bytes >> 20} MiB free, but"
                f" payloads up to {payload_bytes} B need about {needed_bytes >> 20} MiB: free"
                " memory there or ask for smaller payloads",
                code="gpu_memory_too_small",
            )
    return warnings


def contradicting_settings(links: LinkMatrix, environ: Mapping[str, str]) -> dict[str, str]:
    """Return settings that keep NCCL from NVLinks which join every pair of GPUs."""
    names = {name for row in links for name in row if name != SAME_GPU}
    if not names or not all(name is not None and name.startswith("NV") for name in names):
        return {}
    harmless = {"NCCL_P2P_LEVEL": ("", "NVL"), "NCCL_P2P_DISABLE": ("", "0")}
    return {
        variable: environ[variable]
        for variable, values in harmless.items()
        if environ.get(variable, "") not in values
    }


def find_contradictions(links: LinkMatrix, environ: Mapping[str, str]) -> list[str]:
    """Name inherited settings that keep NCCL from links which are there."""
    return [
        f"{variable}={value} is inherited, although NVLink joins every pair of GPUs: it holds in"
        " baseline and candidates alike; unset it unless it was measured here"
        for variable, value in contradicting_settings(links, environ).items()
    ]


def _distinct(gpus: Sequence[Gpu]) -> list[Gpu]:
    return list({gpu.uuid: gpu for gpu in gpus}.values())


def _named(processes: Sequence[GpuProcess]) -> str:
    shown = [f"pid {p.pid} ({_mib(p.memory_used_bytes)})" for p in processes[:NAMED_PROCESSES]]
    more_count = len(processes) - len(shown)
    return ", ".join(shown) + (f" and {more_count} more" if more_count else "")


def _mib(size_bytes: int | None) -> str:
    return "memory unknown" if size_bytes is None else f"{size_bytes >> 20} MiB"


def _needs_shm(links: LinkMatrix, environ: Mapping[str, str]) -> bool:
    """Whether some ranks talk through host memory; unknown links count as such."""
    if environ.get("NCCL_SHM_DISABLE") == "1":
        return False
    if environ.get("NCCL_P2P_DISABLE") == "1" or environ.get("NCCL_P2P_LEVEL") == "LOC":
        return True
    names = {name for row in links for name in row if name != SAME_GPU}
    return not names or any(name is None or not name.startswith(DIRECT_LINKS) for name in names)


def _shm_advice(rank_count: int) -> str:
    gib = -(-searched_shm_bytes(rank_count) >> 30)
    return f"start the container with --shm-size={gib}g or --ipc=host"
