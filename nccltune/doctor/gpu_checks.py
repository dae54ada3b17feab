"""The GPUs: what the driver says of them, how they reach one another, and who else uses them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

from nccltune.bench.fitness import (
    SHM_PATH,
    find_small_shm,
    find_tight_shm,
    find_unseen_memory,
    read_shm_free_bytes,
)
from nccltune.doctor.check import Check, Status, counted, split_advice
from nccltune.errors import HostError
from nccltune.host.hardware import read_peer_refusals
from nccltune.live.procfs import TITLE_PREFIX, read_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nccltune.doctor.case import Case
    from nccltune.host.hardware import Gpu

_DEPENDENT = ("gpu_links", "peer_access", "gpu_users", "shm")
_MIB = 1 << 20


def check_gpus(case: Case) -> Iterator[Check]:
    """Look at NVML, the GPUs of the launch, their links, their users, and shared memory."""
    yield _nvml(case)
    if case.gpu_error is not None:
        message, fix = split_advice(str(case.gpu_error))
        yield Check("gpus", Status.FAIL, message, fix)
    elif case.gpus:
        yield _chosen(case.gpus)
    if not case.gpus:
        for name in _DEPENDENT:
            yield Check(name, Status.SKIP, "no GPU to look at")
        return
    yield _links(case)
    yield _peer_access(case)
    yield _users(case)
    yield _shm(case)


def _nvml(case: Case) -> Check:
    name = "nvml"
    if case.nvml_error is not None:
        message, fix = split_advice(str(case.nvml_error))
        return Check(name, Status.FAIL, message, fix)
    hardware = case.hardware
    assert hardware is not None  # noqa: S101 - there is either hardware or an error
    if hardware.problems:
        fix = "see Xid lines in the kernel log; reset or replace the GPU, or reboot the host"
        return Check(name, Status.FAIL, "; ".join(hardware.problems), fix)
    count = counted(len(hardware.gpus), "GPU")
    version = hardware.driver_version or "of unknown version"
    return Check(name, Status.OK, f"driver {version} answers for {count}")


def _chosen(gpus: tuple[Gpu, ...]) -> Check:
    counts = Counter(gpu.name for gpu in gpus)
    models = ", ".join(f"{count}x {model}" for model, count in counts.items())
    if len(counts) > 1:
        message = f"a launch would mix GPU models: {models}; all wait for the slowest"
        return Check("gpus", Status.WARN, message, "choose equal GPUs with CUDA_VISIBLE_DEVICES")
    unknown = [str(gpu.idx) for gpu in gpus if gpu.is_mig_enabled is None]
    hidden = f"; whether MIG is off cannot be read of {', '.join(unknown)}" if unknown else ""
    return Check("gpus", Status.OK, f"a launch would use {models}{hidden}")


def _links(case: Case) -> Check:
    name = "gpu_links"
    if len(case.gpus) < 2:
        return Check(name, Status.SKIP, "one GPU has no links to look at")
    names = [case.links[i][j] for i, j in combinations(range(len(case.gpus)), 2)]
    counts = Counter(link or "unknown" for link in names)
    shown = ", ".join(f"{count} {link}" for link, count in counts.most_common())
    message = f"links between pairs of GPUs: {shown}"
    here = case.here
    if here is not None and here.is_partial:
        fix = "give the container /sys and its GPUs' real topology; until then profiles found here "
        fix += "hold for these very GPUs alone"
        return Check(name, Status.WARN, f"{message}; part of the topology is hidden here", fix)
    nvlinks = {link for link in counts if link.startswith("NV")}
    if len(nvlinks) > 1:
        fix = "see nvidia-smi nvlink --status for links that are down"
        return Check(name, Status.WARN, f"{message}; NVLink is not equally wide everywhere", fix)
    if nvlinks and len(counts) > 1:
        fix = (
            "choose GPUs that NVLink joins with CUDA_VISIBLE_DEVICES, or see whether links are down"
        )
        return Check(name, Status.WARN, f"{message}; NVLink joins only some pairs", fix)
    return Check(name, Status.OK, message)


def _peer_access(case: Case) -> Check:
    name = "peer_access"
    gpus = case.gpus
    if len(gpus) < 2:
        return Check(name, Status.SKIP, "one GPU has no peers")
    try:
        refusals = read_peer_refusals([gpu.uuid for gpu in gpus], case.sources.nvml)
    except HostError as error:
        message, fix = split_advice(str(error))
        return Check(name, Status.FAIL, message, fix)
    pairs = list(combinations(range(len(gpus)), 2))
    reasons = {(i, j): refusals[i][j] or refusals[j][i] for i, j in pairs}
    refused = {pair: reason for pair, reason in reasons.items() if reason}
    if refused:
        (i, j), reason = next(iter(refused.items()))
        which = f"GPUs {gpus[i].idx} and {gpus[j].idx}"
        more = f" and {counted(len(refused) - 1, 'more pair')}" if len(refused) > 1 else ""
        message = f"the driver grants no direct access between {which}{more}: {reason}"
        has_nvlink = any((case.links[i][j] or "").startswith("NV") for i, j in refused)
        fix = (
            "see the kernel log and nvidia-smi topo -p2p r: NVLink is there and cannot be used"
            if has_nvlink
            else "where these GPUs can do it at all: allow it in firmware and driver, and see "
            "IOMMU and ACS; else NCCL goes through host memory"
        )
        return Check(name, Status.FAIL if has_nvlink else Status.WARN, message, fix)
    if any(refusals[i][j] is None for i, j in pairs):
        return Check(name, Status.SKIP, "the driver does not say whether GPUs reach one another")
    return Check(name, Status.OK, f"the driver grants direct access between all {len(gpus)} GPUs")


def _users(case: Case) -> Check:
    """Name who computes on the GPUs; SGLang's own processes are what they are there for."""
    name = "gpu_users"
    hidden = [str(gpu.idx) for gpu in case.gpus if gpu.processes is None]
    used = [(gpu, process) for gpu in case.gpus for process in gpu.processes or ()]
    titles = {process.pid: _title(case, process.pid) for _, process in used}
    foreign = [(gpu, p) for gpu, p in used if not _is_sglang(titles[p.pid])]
    if foreign:
        shown = ", ".join(
            f"pid {p.pid} ({titles[p.pid] or 'not visible here'}) on GPU {gpu.idx}"
            for gpu, p in foreign[:4]
        )
        more = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
        fix = "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES, before measuring"
        return Check(name, Status.WARN, f"others compute on these GPUs: {shown}{more}", fix)
    for unseen in find_unseen_memory(case.gpus):
        fix = "look for processes of other containers with nvidia-smi on the host"
        return Check(name, Status.WARN, unseen, fix)
    if hidden:
        message = f"the driver does not list the processes on GPU {', '.join(hidden)}"
        return Check(name, Status.SKIP, message)
    ours = counted(len(titles), "SGLang process runs", "SGLang processes run")
    serving = f"; {ours} there" if titles else ""
    return Check(name, Status.OK, f"nobody else computes on these GPUs{serving}")


def _title(case: Case, pid: int) -> str:
    process = read_process(pid, case.sources.proc)
    return "" if process is None else " ".join(process.argv)[:60]


def _is_sglang(title: str) -> bool:
    return title.startswith(TITLE_PREFIX) or "sglang" in title.split(" --", maxsplit=1)[0]


def _shm(case: Case) -> Check:
    name = "shm"
    if len(case.gpus) < 2:
        return Check(name, Status.SKIP, "one rank needs no shared memory")
    path = case.sources.root / SHM_PATH.relative_to("/")
    free_bytes = read_shm_free_bytes(path)
    facts = (len(case.gpus), case.links, case.nccl_environ, free_bytes)
    for error in find_small_shm(*facts):
        message, _, fix = str(error).rpartition(": ")
        return Check(name, Status.FAIL, message, fix)
    for warning in find_tight_shm(*facts):
        message, _, fix = warning.rpartition("; ")
        return Check(name, Status.WARN, message or warning, fix if message else "")
    free = "an unknown amount" if free_bytes is None else f"{free_bytes // _MIB} MiB"
    return Check(name, Status.OK, f"{SHM_PATH} has {free} free, enough for these GPUs")
