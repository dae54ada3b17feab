"""The command line under test: its envelope, and GPUs that are not there."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.bench.nccl_log import NcclReport
from nccltune.cli import main
from nccltune.cli.sources import Source
from nccltune.host.fingerprint import Fingerprint
from nccltune.measurement import Launch, Outcome, PayloadMeasurement
from nccltune.search.space import HostFacts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nccltune.measurement import PayloadRequest, Settings

KEYS = ["schema", "command", "status", "exit_code", "data", "warnings", "errors"]
FACTS = HostFacts(is_ll128_offered=False, has_clusters=False, has_full_nvlink=True, uses_shm=False)
FINGERPRINT = Fingerprint(
    gpu_names=("Stand-in", "Stand-in"),
    gpu_uuids=("GPU-0", "GPU-1"),
    driver_version="1",
    nccl_version="2.28.9",
    link_matrix=(("X", "NV18"), ("NV18", "X")),
    numa_nodes=(0, 0),
    world_size=2,
)


class FakeBench:
    """Measures the same times whatever is asked."""

    source = "gpus"

    def __init__(self) -> None:
        self.versions = {"nccl": "2.28.9", "torch": "2.11.0"}

    def launch(self, settings: Settings, requests: Sequence[PayloadRequest], **_: Any) -> Launch:
        payloads = tuple(
            PayloadMeasurement.from_samples(each.size_bytes, [5.0, 6.0, 7.0], is_data_ok=True)
            for each in requests
        )
        return Launch(settings, Outcome.OK, payloads)


@contextmanager
def fake_gpus(*_: object) -> Iterator[tuple[Source, Any]]:
    """Stand in for ``open_gpus``."""
    bench = FakeBench()
    session = SimpleNamespace(
        bench=bench,
        plan=SimpleNamespace(is_shared=False, rank_count=2),
        base={"NCCL_NVLS_ENABLE": "0"},
        baseline_report=NcclReport(),
        fingerprint=FINGERPRINT,
        has_full_nvlink=True,
    )
    yield Source(bench=bench, place="2x-Stand-in", facts=FACTS), session  # type: ignore[arg-type]


def envelope_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command and return its envelope, once it has kept the promises that all make."""
    exit_code = main([*arguments, "--json"] if "--" not in arguments else list(arguments))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    envelope: dict[str, Any] = json.loads(lines[0], parse_constant=pytest.fail)
    assert list(envelope) == KEYS
    assert envelope["schema"] == "nccltune.cli/1"
    assert envelope["exit_code"] == exit_code
    status = {0: "ok", 3: "no", 4: "unknown"}.get(exit_code, "error")
    assert envelope["status"] == status
    for error in envelope["errors"]:
        assert list(error) == ["code", "message"]
        assert error["code"]
        assert "\n" not in error["message"]
    return envelope
