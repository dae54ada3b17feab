"""A container with nccltune installed from its wheel, a stand-in SGLang, and two stand-in GPUs.

Built in layers: Debian, nccltune's dependencies (both cached between runs), and what is under test.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.nspawn import ROOT, Layers, Machine, base_folder, cache_lock

REPOSITORY = Path(__file__).resolve().parents[2]
STANDINS = REPOSITORY / "tests" / "support"
TARGET_PYTHON = "3.11"
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")

VENV = "/opt/nccltune"
PROGRAM = f"{VENV}/bin/nccltune"
SERVER_PYTHON = "/opt/sglang/bin/python"
STATE = "/var/lib/nccltune"
SERVER_USER = "serve"
SERVER = "sglang@kimi.service"
SERVICE = "nccltuned.service"
CONF = "etc/nccltune/kimi.conf"
UP_TIMEOUT_S = 60.0
RANK_TITLE = "sglang::scheduler_TP"
UUIDS = ("GPU-aaaaaaaa-0000-0000-0000-aaaaaaaaaaaa", "GPU-bbbbbbbb-0000-0000-0000-bbbbbbbbbbbb")

SETTINGS = {
    "NCCL_PROTO": "allreduce:LL",
    "NCCL_ALGO": "allreduce:Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_CTAS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}
SERVER_FLAGS = (
    "--model-path /models/kimi --tp 2 --host 127.0.0.1 --port 30000 --disable-custom-all-reduce "
    "--enforce-disable-flashinfer-allreduce-fusion --speculative-algorithm EAGLE3 "
    "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
)
SERVER_COMMAND = (SERVER_PYTHON, "-m", "sglang.launch_server", *SERVER_FLAGS.split())

_POLL_S = 0.05
_NCCL_VERSION = "2.28.9"
_LIBRARY = b"a stand-in for NCCL"
_SAVE_PROFILE = """
import json, sys
from nccltune.host.facts import read_here
from nccltune.profile import Profile
from nccltune.store import save_candidate
here = read_here(sys.argv[1], {}).to_json()
save_candidate(Profile("tuned", json.loads(sys.argv[2]), source="gpus", fingerprint=here))
"""


def build(folder: Path) -> tuple[Path, ...]:
    """Make the layers of a machine, uppermost first.

    Args:
        folder: where what belongs to this run alone is made.
    """
    below = (_dependency_layer(), base_folder())
    layers = Layers(folder, below)
    wheel = _build_wheel(folder)
    shutil.copy(wheel, layers.upper / ROOT)
    pip = f"{VENV}/bin/python -m pip install --no-index --no-deps --no-compile"
    user = f"useradd --create-home {SERVER_USER}"
    layers.run("sh", "-c", f"set -e; {pip} /{wheel.name}; rm /{wheel.name}; {user}")
    _lay_out_server(layers)
    _lay_out_gpus(layers, folder)
    layers.write(f"/{CONF}", server_conf())
    layers.run(PROGRAM, "install", "--units", "--python", SERVER_PYTHON)
    layers.run("systemctl", "enable", "nccltuned.service", "sglang@kimi.service")
    return (layers.upper.parent / "upper", *below)


def server_conf(**variables: str) -> str:
    """Return the file of a server's unit."""
    lines = {"SGLANG_PYTHON": SERVER_PYTHON, "SGLANG_ARGS": SERVER_FLAGS, **variables}
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def make_active(layers: Layers, binds: Mapping[Path, str] | None = None) -> None:
    """Save a profile that was made on the stand-in host, and activate it."""
    settings = json.dumps(SETTINGS)
    layers.run(f"{VENV}/bin/python", "-c", _SAVE_PROFILE, SERVER_PYTHON, settings, binds=binds)
    layers.run(PROGRAM, "profile", "activate", "tuned", binds=binds)


def restart(machine: Machine) -> None:
    """Start the server anew."""
    machine.run("systemctl", "reset-failed", check=False)
    machine.run("systemctl", "restart", SERVER)


def properties(machine: Machine, unit: str, *names: str) -> list[str]:
    """Return properties of a unit, in the order of their names."""
    show = ["systemctl", "show", "--value", unit]
    return [machine.run(*show, f"--property={name}").stdout.strip() for name in names]


def write_unit(machine: Machine, path: str, text: str) -> None:
    """Put a unit or a drop-in into the folder that a boot empties."""
    file = machine.root / "run/systemd/system" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    machine.run("systemctl", "daemon-reload")


def show_driver(machine: Machine) -> None:
    """Let the container's procfs show the stand-in driver, as a real one does."""
    machine.run("mount", "--bind", "/opt/driver", "/proc/driver")
    machine.run("touch", "/dev/nvidia0", "/dev/nvidia1")


def rank_environs(machine: Machine) -> list[dict[str, str]]:
    """Return the environment of every rank process of a server, read from procfs."""
    blocks = [Path(f"/proc/{pid}/environ").read_bytes().decode() for pid in rank_pids(machine)]
    return [
        {name: value for name, _, value in (each.partition("=") for each in block.split("\0"))}
        for block in blocks
    ]


def from_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that the profile sets."""
    return {name: value for name, value in environ.items() if name in SETTINGS}


def is_active(machine: Machine, unit: str) -> bool:
    """Tell whether a unit is up."""
    done = machine.run("systemctl", "is-active", unit, check=False)
    return done.stdout.strip() == "active"


def wait_for(condition: Callable[[], object], machine: Machine, what: str) -> None:
    """Wait until a condition holds, or fail with the end of the journal."""
    deadline = time.monotonic() + UP_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never: {what}\n{machine.journal('--lines=60')}")
        time.sleep(_POLL_S)


def wait_for_server(machine: Machine) -> None:
    """Wait until the server of the unit is up."""
    wait_for(lambda: is_active(machine, SERVER), machine, f"{SERVER} is active")


def read_status(machine: Machine) -> dict[str, Any]:
    """Return the envelope of ``nccltune status``."""
    done = machine.run(PROGRAM, "status", "--json", check=False, environ={"NCCLTUNE_HOME": STATE})
    envelope: dict[str, Any] = json.loads(done.stdout)
    return envelope


def read_metrics(machine: Machine) -> str:
    """Let the service look again, and return its metrics."""
    machine.run("systemctl", "kill", "--signal=HUP", SERVICE)
    url = "http://127.0.0.1:9469/metrics"
    code = f"import urllib.request as r; print(r.urlopen('{url}', timeout=10).read().decode())"
    return machine.run("python3", "-c", code).stdout


def rank_pids(machine: Machine) -> list[int]:
    """Return the rank processes of all servers, as seen from outside, the oldest first."""
    return [pid for pid in sorted(machine.processes()) if _title(pid).startswith(RANK_TITLE)]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


def _dependency_layer() -> Path:
    """Return a layer with nccltune's dependencies in a virtual environment; cached."""
    wanted = _dependencies()
    key = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    below = (base_folder(),)
    with cache_lock(f"dependencies-{key}") as folder:
        if folder.is_dir():
            return folder / "upper"
        partial = folder.with_suffix(".partial")
        for old in (partial, *folder.parent.glob("dependencies-*[!k]")):  # locks stay
            shutil.rmtree(old, ignore_errors=True)
        layers = Layers(partial, below)
        wheels = layers.upper / ROOT / "wheels"
        wheels.mkdir()
        _download(wanted, wheels)
        install = f"{VENV}/bin/python -m pip install --no-index --find-links /wheels"
        names = " ".join(f"'{each}'" for each in wanted)
        server = f"python3 -m venv --without-pip {Path(SERVER_PYTHON).parents[1]}"
        script = f"set -e; python3 -m venv {VENV}; {install} {names}; {server}; rm -r /wheels"
        layers.run("sh", "-c", script)
        partial.rename(folder)
        return folder / "upper"


def _dependencies() -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return sorted(project["dependencies"])


def _download(wanted: list[str], folder: Path) -> None:
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True)
    platforms = [f"--platform={each}_{machine.stdout.strip()}" for each in PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={TARGET_PYTHON}", "--implementation=cp"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    _run([*command, *target, *platforms, *wanted])


def _build_wheel(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--wheel-dir", str(folder)]
    _run([sys.executable, "-m", "pip", "wheel", *options, str(REPOSITORY)])
    (wheel,) = folder.glob("nccltune-*.whl")
    return wheel


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _lay_out_server(layers: Layers) -> None:
    """Put the stand-in SGLang, and what passes for its NCCL, into the server's interpreter."""
    packages = f"/opt/sglang/lib/python{TARGET_PYTHON}/site-packages"
    target = layers.upper / ROOT / packages.lstrip("/")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(STANDINS / "standin_sglang/site", target, dirs_exist_ok=True, ignore=ignored)
    library = target / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_bytes(_LIBRARY)
    record = f"nvidia/nccl/lib/libnccl.so.2,sha256=x,{len(_LIBRARY)}\n"
    layers.write(f"{packages}/nvidia_nccl_cu13-{_NCCL_VERSION}.dist-info/RECORD", record)


def _lay_out_gpus(layers: Layers, folder: Path) -> None:
    """Compile the stand-in NVML, and lay out what the driver would show in procfs."""
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-fno-tree-loop-distribute-patterns"]
    _run(["gcc", *flags, "-o", str(library), str(STANDINS / "standin_nvml.c")])
    inside = layers.upper / ROOT / "usr/local/lib"
    inside.mkdir(parents=True, exist_ok=True)
    shutil.copy(library, inside)
    layers.run("ldconfig")
    module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    layers.write("/opt/driver/nvidia/version", module)
    for idx, uuid in enumerate(UUIDS):
        facts = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {idx}\n"
        layers.write(f"/opt/driver/nvidia/gpus/0000:0{idx + 1}:00.0/information", facts)
