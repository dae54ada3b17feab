"""The command line on a host with stand-in GPUs: real rank processes, made-up times.

    STANDIN_GPUS=2 python -m tests.support.standin_cli search --trials 12

For trying whole commands, and scripts that call them, where there is no GPU.
"""

from __future__ import annotations

import functools
import os
import sys

import nccltune.bench.session as session
import nccltune.cli.launch_path as launch_path
import nccltune.cli.sources as sources
from nccltune.bench.launcher import GpuBench
from nccltune.cli import main
from nccltune.host.hardware import Hardware
from tests.support.hosts import REPOSITORY, STANDIN_MODULE, standin_gpu


def standin_hardware() -> Hardware:
    """Return as many stand-in GPUs as STANDIN_GPUS says, all linked."""
    count = int(os.environ.get("STANDIN_GPUS", "2"))
    links = tuple(tuple("X" if i == j else "NV18" for j in range(count)) for i in range(count))
    gpus = tuple(standin_gpu(idx) for idx in range(count))
    return Hardware(driver_version="0.0", gpus=gpus, links=links)


def install() -> None:
    """Put the stand-ins in place of NVML and of the GPU device."""
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    for module, name, standin in (
        (session, "read_gpus", standin_hardware),
        (sources, "read_gpus", standin_hardware),
        (launch_path, "read_gpus", standin_hardware),
        (session, "read_memory_used_bytes", lambda uuids: {}),
        (session, "read_foreign_processes", lambda uuids, own: []),
        (session, "GpuBench", functools.partial(_standin_bench, device_module=STANDIN_MODULE)),
    ):
        setattr(module, name, standin)


def _standin_bench(plan: object, base: dict[str, str], **options: object) -> GpuBench:
    base = {**base, "STANDIN_FAULTS": os.environ.get("STANDIN_FAULTS", "")}
    return GpuBench(plan, base, **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    install()
    sys.exit(main())
