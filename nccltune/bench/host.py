"""Where the ranks run: GPU, CPU cores and environment of each, and whether the host is fit."""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.bench.cpus import CpuTopology, read_cpu_topology, share_cpus
from nccltune.bench.fitness import (
    check_gpu_memory,
    find_busy,
    find_contradictions,
    find_small_shm,
    find_tight_shm,
    find_unseen_memory,
)
from nccltune.host.conf_files import (
    CONF_FILE_VARIABLE,
    ETC_CONF_PATH,
    neutral_settings,
    read_conf_files,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nccltune.host.fingerprint import LinkMatrix
    from nccltune.host.hardware import Gpu, Hardware
    from nccltune.measurement import Settings

FROM_THIS_PROCESS = frozenset(
    {
        "CUDA_CACHE_PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "LOGNAME",
        "PATH",
        "PYTHONHOME",
        "PYTHONPATH",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
"""All that a rank takes from this program's environment. It runs in the same interpreter with the
same torch, which must be found and have a home and room for files whatever the launch's own
environment is, even with ``env -i`` in front of the server."""

FROM_LAUNCH = frozenset({"CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "SGLANG_NCCL_SO_PATH"})
"""All that a rank takes from what the server will find in its environment: what decides which NCCL
and which CUDA libraries are loaded. One that the launch unsets is unset in a rank, too."""

MULTICAST_OFF: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Set in every rank, whatever else is asked: NVLink multicast is pinned off and never searched."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Where each rank runs.

    Attributes:
        gpus: one a rank; the same one each time when it is shared.
        is_shared: all ranks on one GPU, for diagnosis: times mean nothing there.
        cpu_sets: CPUs that each rank is bound to; empty to bind none.
        links: ways between the ranks' GPUs; empty where unknown.
        notes: what is not as it should be, in words.
    """

    gpus: tuple[Gpu, ...]
    is_shared: bool
    rank_count: int
    cpu_sets: tuple[frozenset[int], ...] = ()
    links: LinkMatrix = ()
    notes: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUID of every GPU in use, once, in rank order."""
        return tuple(dict.fromkeys(gpu.uuid for gpu in self.gpus))

    def device_ordinal(self, rank: int) -> int:
        """Return the number under which a rank's process finds its GPU."""
        return 0 if self.is_shared else rank


def plan_host(
    hardware: Hardware,
    gpus: Sequence[Gpu],
    *,
    is_shared: bool,
    cpus: CpuTopology | None = None,
) -> HostPlan:
    """Plan where the ranks run.

    Args:
        hardware: what the GPUs were chosen from.
        gpus: one a rank, as ``choose_gpus`` returns them.
        is_shared: whether it is the same GPU each time.
        cpus: what the ranks may use; None to read it from this host.
    """
    topology = read_cpu_topology() if cpus is None else cpus
    shares = share_cpus(topology, [gpu.numa_node for gpu in gpus])
    return HostPlan(
        gpus=tuple(gpus),
        is_shared=is_shared,
        rank_count=len(gpus),
        cpu_sets=shares.cpu_sets,
        links=hardware.restricted_to(gpus).links,
        notes=shares.notes,
    )


def preflight(
    plan: HostPlan,
    environ: Mapping[str, str],
    *,
    shm_free_bytes: int | None,
    payload_bytes: int,
    own_pids: Collection[int] = (),
    is_forced: bool = False,
) -> list[str]:
    """Say whether this host is fit to measure on, before minutes are spent.

    Args:
        plan: where the ranks run, with the GPUs as just read.
        environ: NCCL variables that will hold in every launch.
        shm_free_bytes: of ``/dev/shm`` (``fitness.read_shm_free_bytes``); None where unknown.
        payload_bytes: the largest payload or guard.
        own_pids: processes that are ours.
        is_forced: go on although GPUs are in use or ``/dev/shm`` looks too small; both turn into
            warnings.

    Returns:
        Warnings for the report.

    Raises:
        BusyError: somebody else computes on these GPUs.
        HostError: too little ``/dev/shm`` or GPU memory.
    """
    # Ranks that share a GPU talk through sockets, so that /dev/shm does not matter.
    shm = None if plan.is_shared else (plan.rank_count, plan.links, environ, shm_free_bytes)
    small = find_small_shm(*shm) if shm else []
    obstacles = [*find_busy(plan.gpus, own_pids), *small]
    if obstacles and not is_forced:
        raise obstacles[0]
    return [
        *plan.notes,
        *(f"forced: {obstacle}" for obstacle in obstacles),
        *check_gpu_memory(plan.gpus, payload_bytes),
        *find_unseen_memory(plan.gpus),
        *(find_tight_shm(*shm) if shm and not small else []),
        *find_contradictions(plan.links, environ),
    ]


def rank_environ(
    base: Mapping[str, str],
    plan: HostPlan,
    rank: int,
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    launch_environ: Mapping[str, str] | None = None,
    conf_names: Collection[str] | None = None,
) -> dict[str, str]:
    """Return the whole environment of a rank's process.

    This program's own environment counts only as far as ``FROM_THIS_PROCESS`` goes, and the
    launch's only as far as ``FROM_LAUNCH`` does. NCCL variables that the operator has set are no
    part of either: they hold only if the caller puts them into ``base``, on top of what SGLang sets
    by itself.

    Args:
        base: variables that hold in every launch, below the settings.
        plan: where the ranks run; every rank sees every GPU, as SGLang's ranks do.
        rank: whose environment.
        settings: what this launch is to measure.
        environ: this program's environment; None for this process's.
        launch_environ: what the server would find in its environment; None for ``environ``.
        conf_names: variables that NCCL's configuration files would set; None to look.
    """
    own = os.environ if environ is None else environ
    launch = own if launch_environ is None else launch_environ
    names = _read_conf_names(own) if conf_names is None else conf_names
    return {
        **neutral_settings(names),
        **{name: value for name, value in own.items() if name in FROM_THIS_PROCESS},
        **{name: value for name, value in launch.items() if name in FROM_LAUNCH},
        **base,
        "CUDA_VISIBLE_DEVICES": ",".join(plan.uuids),
        **(_shared_environ(rank) if plan.is_shared else {}),
        # Replaces the file in the home folder, and does so even where it cannot be opened.
        CONF_FILE_VARIABLE: os.devnull,
        **settings,
        **MULTICAST_OFF,
    }


def _shared_environ(rank: int) -> dict[str, str]:
    """Make NCCL accept ranks on one GPU: each calls itself a host, reached by loopback."""
    return {
        "NCCL_HOSTID": f"nccltune-rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def _read_conf_names(environ: Mapping[str, str]) -> set[str]:
    """Name what NCCL's files would set in a rank, in both folders that it may take for home."""
    homes = {Path(environ["HOME"])} if environ.get("HOME") else set()
    with suppress(KeyError):  # a container's user that has no entry
        homes.add(Path(pwd.getpwuid(os.getuid()).pw_dir))
    files = read_conf_files({}, None, ETC_CONF_PATH)
    for home in homes:
        files += read_conf_files({}, home, ETC_CONF_PATH)
    return {name for file in files for name in file.settings}
