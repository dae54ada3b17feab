"""Hosts for the doctor: a made-up root folder, GPUs, an interpreter's answer, a launch, a model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.doctor import Check, Sources, Status, examine, read_case
from nccltune.doctor.server import NcclLibrary, ProbedServer, ProbeError
from tests.support.fake_nvml import FakeNvml, nvswitch_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nccltune.doctor import Case
    from nccltune.host.fingerprint import Fingerprint

PYTHON = Path("/opt/sglang/bin/python")
LIBRARY = "/opt/sglang/lib/libnccl.so.2"
MOUNTINFO = (
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
    "23 22 0:21 / /dev/shm rw - tmpfs tmpfs rw,size=65536k\n"
)
SERVER = ProbedServer(
    executable=str(PYTHON),
    python_version="3.12.3",
    sglang_version="0.5.23",
    torch_version="2.11.0",
    torch_nccl=NcclLibrary(LIBRARY, "2.28.9"),
    wheels={"nvidia-nccl-cu13": "2.28.9"},
    plugins={"nccltune": "nccltune_hook:activate"},
)


@dataclass
class DoctorHost:
    """One host; change what a test is about, then look at it.

    Attributes:
        server: what the interpreter answers; text for why it does not.
        asked_in: the environments that it was asked in.
    """

    root: Path
    nvml: FakeNvml = field(default_factory=nvswitch_host)
    server: ProbedServer | str = SERVER
    environ: dict[str, str] = field(default_factory=dict)
    user_home: Path | None = None
    python: Path = PYTHON
    asked_in: list[dict[str, str]] = field(default_factory=list)

    def put(self, path: str, text: str) -> Path:
        """Write a file below the root."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def case(self, *argv: str, has_python: bool = True) -> Case:
        """Read it, with the server's interpreter named or not."""
        sources = Sources(
            environ={"NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"], **self.environ},
            root=self.root,
            nvml=self.nvml,
            user_home=self.user_home,
            probe=self._probe,
        )
        return read_case(sources, python=self.python if has_python else None, argv=argv)

    def look(self, *argv: str) -> dict[str, Check]:
        """Run every check; of several of one id the last is returned."""
        return {check.id: check for check in examine(self.case(*argv))}

    def fingerprint(self) -> Fingerprint:
        """Return what a profile made on this host would hold."""
        here = self.case().here
        assert here is not None
        return here

    def _probe(self, python: Path, environ: Mapping[str, str]) -> ProbedServer:
        assert python == self.python
        self.asked_in.append(dict(environ))
        if isinstance(self.server, str):
            raise ProbeError(self.server)
        return self.server


def doctor_host(root: Path) -> DoctorHost:
    """Return a healthy host: eight H200 behind NVSwitch, everything installed, nothing active."""
    host = DoctorHost(root)
    host.put("proc/self/mountinfo", MOUNTINFO)
    host.put("proc/1/comm", "systemd\n")
    (root / "dev" / "shm").mkdir(parents=True)
    return host


def launch_words(folder: Path, *more: str, tp: int = 8) -> tuple[str, ...]:
    """Return an EAGLE-3 launch of the model in ``folder`` whose sums NCCL carries."""
    return (
        str(PYTHON), "-m", "sglang.launch_server",
        "--model-path", str(folder / "target"), "--tp", str(tp),
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(folder / "draft"),
        "--speculative-num-steps", "2", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "3",
        "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion",
        *more,
    )  # fmt: skip


def write_models(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    layers: int = 61,
    hidden: int = 7168,
    **draft: object,
) -> None:
    """Write the configs of a target and of its draft, changed as asked."""
    base = {"hidden_size": hidden, "vocab_size": 32000}
    target = {"architectures": [architecture], "num_hidden_layers": layers, **base}
    written = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, **base, **draft}
    for name, config in (("target", target), ("draft", written)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def assert_status(check: Check, status: Status, *words: str) -> None:
    """Require a status, and words of the sentence or the fix."""
    assert check.status is status, check
    for word in words:
        assert word in f"{check.message} | {check.fix}", check
