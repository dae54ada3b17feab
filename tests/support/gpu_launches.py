"""Launches on hosts that are not there, up to the moment when ranks would start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import nccltune.bench.session as session_module
import nccltune.cli.launch_path as launch_path
import nccltune.cli.sources as sources
from nccltune.bench.nccl_log import NcclReport
from nccltune.bench.session import BenchOptions, Session
from nccltune.cli.sources import Source, demand_here, open_gpus
from nccltune.cli.workload import Demand, WorkloadOptions
from nccltune.host.gpu_choice import VARIABLE, visible_gpus
from nccltune.host.hardware import Hardware, read_gpus
from nccltune.sglang.command import LaunchCommand, parse_launch

if TYPE_CHECKING:
    import pytest

    from nccltune.host.fingerprint import Fingerprint
    from tests.support.fake_nvml import FakeNvml

HostPutter = Callable[["FakeNvml"], Hardware]

_WORDS = (
    "python3", "-m", "sglang.launch_server", "--model-path", "/m",
    "--speculative-algorithm", "EAGLE3", "--enforce-disable-flashinfer-allreduce-fusion",
)  # fmt: skip


def launch(flags: str, before: str = "") -> LaunchCommand:
    """Return an EAGLE-3 launch with these flags, and these words in front of it."""
    return parse_launch([*before.split(), *_WORDS, *flags.split()])


def read(nvml: FakeNvml) -> Hardware:
    """Read a made-up host."""
    return read_gpus(nvml, sys_root=Path("/nonexistent"))


def seen_by(command: LaunchCommand, hardware: Hardware) -> Fingerprint:
    """Return every GPU that a launch sees, in its order."""
    gpus = visible_gpus(hardware, command.environment.get(VARIABLE))
    return hardware.fingerprint(gpus, nccl_version="2.28.9")


def demand_of(command: LaunchCommand | None) -> Demand:
    """Return what ``search`` and ``bench`` are to measure for a launch, with one payload."""
    words = () if command is None else command.argv
    return demand_here(WorkloadOptions(payloads=("43008:122",), launch=words), is_shared=False)


def opened(command: LaunchCommand | None) -> tuple[Source, Session]:
    """Do what ``search``, ``bench`` and ``recording make`` do until the ranks are there."""
    demand = demand_of(command)
    with open_gpus(BenchOptions(rank_count=demand.tp), demand) as (source, session):
        return source, session


def host_putter(patch: pytest.MonkeyPatch) -> HostPutter:
    """Return a function that puts a host before every reader of GPUs; its ranks never start."""

    def put(nvml: FakeNvml) -> Hardware:
        hardware = read(nvml)
        for module in (session_module, sources, launch_path):
            patch.setattr(module, "read_gpus", lambda: hardware)
        patch.setattr(session_module, "GpuBench", _Bench)
        patch.setattr(session_module, "read_shm_free_bytes", lambda: None)
        return hardware

    return put


class _Bench:
    """Starts no rank, and says that NCCL runs."""

    def __init__(self, *_: object, **__: object) -> None:
        self.versions = {"nccl": "2.28.9", "torch": None}

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def inspect(self, *_: object) -> NcclReport:
        return NcclReport(used={43008: "Ring"})
