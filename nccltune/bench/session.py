"""From "these GPUs" to a running bench.

Choose, check, start, and look at what NCCL does by itself here.
"""

from __future__ import annotations

import os
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.bench.fitness import read_shm_free_bytes
from nccltune.bench.gpu_watch import GpuWatch
from nccltune.bench.host import MULTICAST_OFF, HostPlan, plan_host, preflight
from nccltune.bench.launcher import DEFAULT_DEADLINE_S, GpuBench
from nccltune.bench.rank import FAULT_VARIABLE
from nccltune.envvars import check_setting
from nccltune.errors import HostError, UsageProblem
from nccltune.host.conf_files import read_conf_files
from nccltune.host.hardware import (
    Hardware,
    read_foreign_processes,
    read_gpus,
    read_memory_used_bytes,
)
from nccltune.host.launch_gpus import gpus_of_launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nccltune.bench.nccl_log import NcclReport
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.measurement import PayloadRequest, Settings
    from nccltune.sglang.command import LaunchCommand

MULTICAST = "NCCL_NVLS_ENABLE"

NOT_SETTINGS = ("NCCL_DEBUG", "NCCL_CONF_FILE", MULTICAST, "NCCL_VERSION")
"""NCCL variables of the operator that are not taken over: logging, files (neutralised), multicast
(always off, and ``_multicast_words`` says so), and a version that container images set and NCCL
does not read."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a person asks of a bench.

    Attributes:
        rank_count: tensor-parallel size; None for all visible GPUs.
        is_shared: put every rank on one GPU; for diagnosis, its times mean nothing.
        deadline_s: for one launch.
        is_forced: measure although somebody else uses the GPUs.
        is_fresh: new interpreters for every launch; only to measure what forking saves.
    """

    rank_count: int | None = None
    is_shared: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S
    is_forced: bool = False
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """A running bench and what is known of where it runs.

    Attributes:
        base: what every rank really runs under, below the settings.
        pinned: the operator's own NCCL variables; they hold in every launch.
        baseline_report: what NCCL does under the baseline.
        warnings: for the report.
    """

    bench: GpuBench
    plan: HostPlan
    hardware: Hardware
    base: Mapping[str, str]
    pinned: Settings
    baseline_report: NcclReport
    fingerprint: Fingerprint
    warnings: tuple[str, ...]

    @property
    def has_clusters(self) -> bool:
        """Whether the GPUs know thread-block clusters (compute capability 9.0 or newer)."""
        names = [gpu.compute_capability or "" for gpu in self.plan.gpus]
        return all(name.removeprefix("sm").isdigit() and int(name[2:]) >= 90 for name in names)

    @property
    def has_full_nvlink(self) -> bool:
        """Whether every GPU in use reaches every other one by NVLink."""
        return self.hardware.restricted_to(self.plan.gpus).has_full_nvlink

    @property
    def identity(self) -> dict[str, object]:
        """What must be equal for results to be compared."""
        return {"fingerprint": self.fingerprint.to_json(), "base": dict(self.base)}


@contextmanager
def open_session(
    options: BenchOptions,
    sglang_base: Mapping[str, str],
    requests: Sequence[PayloadRequest],
    environ: Mapping[str, str] | None = None,
    *,
    command: LaunchCommand | None = None,
) -> Iterator[Session]:
    """Start a bench on this host's GPUs.

    Args:
        options: what was asked.
        sglang_base: variables that SGLang sets by itself.
        requests: the payloads that will be measured.
        environ: what the server would find in its environment: visible GPUs, the operator's NCCL
            variables, and which NCCL and CUDA libraries it loads; None for this process's.
        command: the launch whose GPUs are measured; None for the first visible ones.

    Raises:
        HostError: no GPU, no driver, MIG, too little memory, or NCCL does not run at all.
        UsageProblem: GPUs or ranks that are not there.
        BusyError: somebody else computes on the GPUs.
        RankError: rank processes cannot be started.
    """
    outer = os.environ if environ is None else environ
    hardware = read_gpus()
    gpus = gpus_of_launch(hardware, outer, command, options.rank_count, is_shared=options.is_shared)
    plan = plan_host(hardware, gpus, is_shared=options.is_shared)
    pinned = operator_settings(outer)
    base = {**sglang_base, **pinned, MULTICAST: MULTICAST_OFF[MULTICAST]}
    largest_bytes = max(request.size_bytes for request in requests)
    warnings = preflight(
        plan,
        base,
        shm_free_bytes=read_shm_free_bytes(),
        payload_bytes=largest_bytes,
        is_forced=options.is_forced,
    )
    with GpuBench(
        plan,
        base,
        deadline_s=options.deadline_s,
        is_fresh=options.is_fresh,
        watch=_watch(plan, options),
        environ=outer,
        test_fault=outer.get(FAULT_VARIABLE, ""),
    ) as bench:
        baseline_report = bench.inspect({}, requests)
        if not baseline_report.used:
            _explain_broken_baseline(bench, requests)
        yield Session(
            bench=bench,
            plan=plan,
            hardware=hardware,
            base=base,
            pinned=pinned,
            baseline_report=baseline_report,
            fingerprint=hardware.fingerprint(
                gpus,
                nccl_version=bench.versions.get("nccl"),
                torch_version=bench.versions.get("torch"),
            ),
            warnings=(
                *hardware.problems,
                *warnings,
                *_conf_warnings(outer),
                *_pinned_words(pinned),
                *_multicast_words(sglang_base, outer),
            ),
        )


def _watch(plan: HostPlan, options: BenchOptions) -> GpuWatch:
    """Watch the plan's GPUs; whoever was accepted from the start is not looked for later."""
    return GpuWatch(
        lambda: read_memory_used_bytes(plan.uuids),
        None
        if options.is_forced
        else lambda: [one.uuid for one in read_foreign_processes(plan.uuids, ())],
    )


def operator_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the NCCL variables that the operator has set, but for those that are no settings."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("NCCL_") and value and not name.startswith(NOT_SETTINGS)
    }


def _explain_broken_baseline(bench: GpuBench, requests: Sequence[PayloadRequest]) -> None:
    launch = bench.launch({}, requests[:1])
    if launch.is_complete:
        return
    message = (
        f"NCCL does not run here even by itself ({launch.outcome}: {launch.message});"
        " nothing can be tuned before that works"
    )
    raise HostError(message, code="baseline_failed")


def _conf_warnings(environ: Mapping[str, str]) -> list[str]:
    home = Path(environ["HOME"]) if environ.get("HOME") else None
    words = []
    for file in read_conf_files(environ, home):
        if file.settings:
            names = ", ".join(sorted(file.settings))
            words.append(f"{file.path} sets {names}: not in force while measuring")
        words += [f"{file.path}: {problem}" for problem in file.problems]
    return words


def _multicast_words(sglang_base: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Say that a launch turns NVLink multicast on, which is never done here: it can hang a host."""
    value = environ.get(MULTICAST) or sglang_base.get(MULTICAST, "")
    if value in ("", MULTICAST_OFF[MULTICAST]):
        return []
    who = "this environment" if environ.get(MULTICAST) else "SGLang, for this launch,"
    return [
        f"{who} sets {MULTICAST}={value}: the server may use NVLink multicast, and this was "
        f"measured without it ({MULTICAST}={MULTICAST_OFF[MULTICAST]} in every rank), for it has "
        "hung and failed at start on some hosts; whether what is found here holds on the server "
        "is for nccltune verify to say"
    ]


def _pinned_words(pinned: Settings) -> list[str]:
    if not pinned:
        return []
    listed = " ".join(f"{name}={shlex.quote(value)}" for name, value in pinned.items())
    words = [f"set in this environment, held in every launch and not searched: {listed}"]
    for name, value in pinned.items():
        try:
            check_setting(name, value)
        except UsageProblem as problem:
            words.append(f"in this environment: {problem}")
    return words
