"""A host to launch on, as real processes see it: packages of a server, a made-up NVML, a command.

Everything is files in one folder, found through ``PYTHONPATH`` and ``PATH``, so that a process
started anywhere meets the same host.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.host.facts import read_here
from nccltune.profile import Profile
from tests.support.fake_nvml import nvswitch_host, pcie_host

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from tests.support.fake_nvml import FakeNvml

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = {"NCCL_PROTO": "allreduce:LL", "NCCL_ALGO": "allreduce:Ring", "NCCL_MAX_CTAS": "8"}
FLAGS = (
    "--model-path",
    "/nowhere/model",
    "--tp-size",
    "8",
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "3",
    "--disable-custom-all-reduce",
    "--enforce-disable-flashinfer-allreduce-fusion",
)
_KINDS = {"nvswitch": nvswitch_host, "pcie": pcie_host}
_SHIM = """
import sys
here = {here!r}
sys.path.remove(here)
del sys.modules[__name__]
import {name} as real  # what loading it costs belongs to the figure
sys.path.insert(0, here)
sys.path.append({repository!r})
from tests.support.fake_nvml import {host}
sys.modules[__name__] = {host}({count})
"""
_SCRIPT = """#!{python} -S
import os, sys
report = os.environ.get("STANDIN_REPORT")
if report:
    with open(report, "wb") as file:
        file.write(open("/proc/self/environ", "rb").read())
sys.exit(int(os.environ.get("STANDIN_STATUS", "0")))
"""


@dataclass(frozen=True, slots=True)
class LaunchHost:
    """Where the parts of the host lie.

    Attributes:
        site: packages of the server's interpreter, for ``PYTHONPATH``.
        nvml: a module that stands in for ``pynvml``, for ``PYTHONPATH``.
        sglang: the command; it writes the environment block that it got to ``$STANDIN_REPORT``.
    """

    root: Path
    site: Path
    nvml: Path
    sglang: Path
    fake: FakeNvml

    @property
    def command(self) -> tuple[str, ...]:
        """An EAGLE-3 launch at tensor parallel size 8."""
        return (str(self.sglang), "serve", *FLAGS)

    def environ(self, **changes: str) -> dict[str, str]:
        """Return an environment in which processes meet this host."""
        path = os.pathsep.join([str(self.nvml), str(self.site), str(REPOSITORY)])
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": path,
            "NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"],
            **changes,
        }

    def fingerprint(self) -> Fingerprint:
        """Return what a launch on this host reads."""
        return read_here(sys.executable, self.environ(), nvml=self.fake)

    def profile(self, name: str = "kimi", **changes: object) -> Profile:
        """Return a profile that was made on this host."""
        parts: dict[str, object] = {
            "settings": dict(SETTINGS),
            "source": "gpus",
            "fingerprint": self.fingerprint().to_json(),
            **changes,
        }
        return Profile(name, **parts)  # type: ignore[arg-type]


def make_host(root: Path, *, kind: str = "pcie", count: int = 8) -> LaunchHost:
    """Lay out a host below ``root``."""
    site = make_site(root / "site")
    nvml = root / "nvml"
    nvml.mkdir(parents=True)
    shim = _SHIM.format(
        here=str(nvml),
        name="pynvml",
        repository=str(REPOSITORY),
        host=_KINDS[kind].__name__,
        count=count,
    )
    (nvml / "pynvml.py").write_text(shim)
    sglang = root / "bin" / "sglang"
    sglang.parent.mkdir()
    sglang.write_text(_SCRIPT.format(python=sys.executable))
    sglang.chmod(0o755)
    return LaunchHost(root, site, nvml, sglang, _KINDS[kind](count))


def make_site(
    folder: Path, *, nccl: str = "2.28.9", sglang: str = "0.5.15.post1", library: bytes = b"nccl"
) -> Path:
    """Lay out the packages of a server's interpreter: torch, NCCL's wheel and SGLang, all empty."""
    for name in ("torch", "sglang", "nvidia/nccl/lib"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "nvidia/nccl/lib/libnccl.so.2").write_bytes(library)
    for name in (f"sglang-{sglang}", f"nvidia_nccl_cu13-{nccl}"):
        (folder / f"{name}.dist-info").mkdir(exist_ok=True)
    record = folder / f"nvidia_nccl_cu13-{nccl}.dist-info" / "RECORD"
    record.write_text(f"nvidia/nccl/lib/libnccl.so.2,sha256=x,{len(library)}\n")
    return folder


def read_block(path: Path) -> dict[str, str]:
    """Read an environment block that the command has written."""
    entries = path.read_bytes().decode(errors="surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def not_mounted(folder: Path, kind: str) -> Path:
    """Return what a state folder is where its volume was not mounted: missing, dangling or file."""
    path = folder / "volume" / "nccltune"
    if kind != "missing":
        path.parent.mkdir()
    if kind == "dangling":
        path.symlink_to(folder / "nowhere")
    if kind == "file":
        path.write_text("in the way")
    return path
