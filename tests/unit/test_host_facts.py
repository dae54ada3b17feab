from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.errors import HostError, NccltuneError, UsageProblem
from nccltune.host import facts as host_facts
from nccltune.host.facts import nccl_version, read_here, read_host, read_visible
from nccltune.host.hardware import read_gpus
from nccltune.host.server_python import package_dirs
from nccltune.seen_files import OwnFiles
from tests.support.fake_nvml import (
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    FakeNvml,
    fake_uuid,
    nvswitch_host,
    pcie_host,
)
from tests.support.launch_host import make_site

if TYPE_CHECKING:
    from tests.conftest import Require

PYTHON = sys.executable


def environ_of(site: Path, **changes: str) -> dict[str, str]:
    return {"PYTHONPATH": str(site), **changes}


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a library would be loaded to learn its version."""

    def refuse(library: str, environ: object) -> str:
        pytest.fail(f"{library} was loaded")

    monkeypatch.setattr(host_facts, "_loaded_version", refuse)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer 2.99.0 for every library that is loaded, and note which."""
    loaded: list[str] = []

    def note(library: str, environ: object) -> str:
        loaded.append(library)
        return "2.99.0"

    monkeypatch.setattr(host_facts, "_loaded_version", note)
    return loaded


@pytest.mark.usefixtures("no_loading")
def test_read_here_takes_gpus_in_the_launchs_order_and_nccl_of_its_interpreter(
    tmp_path: Path,
) -> None:
    site = make_site(tmp_path, nccl="2.30.7")
    environ = environ_of(site, CUDA_VISIBLE_DEVICES="3,1")

    here = read_here(PYTHON, environ, nvml=pcie_host(4))

    assert here.gpu_uuids == (fake_uuid(3), fake_uuid(1))
    assert here.nccl_version == "2.30.7"
    assert (here.world_size, here.torch_version) == (2, None)


@pytest.mark.usefixtures("no_loading")
def test_read_host_knows_the_architecture(tmp_path: Path) -> None:
    assert read_host(PYTHON, environ_of(tmp_path), nvml=pcie_host(4)).gpu_architecture == "sm120"


@pytest.mark.usefixtures("no_loading")
def test_read_here_with_one_gpu_is_that_one(tmp_path: Path) -> None:
    here = read_here(PYTHON, environ_of(tmp_path), nvml=pcie_host(1))

    assert here.gpu_uuids == (fake_uuid(0),)
    assert here.nccl_version is None


def test_read_here_without_a_driver_is_a_host_error() -> None:
    with pytest.raises(HostError) as refusal:
        read_here(PYTHON, {}, nvml=FakeNvml(init_error=LIBRARY_NOT_FOUND))

    assert refusal.value.code == "nvml_absent"


def test_read_here_with_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageProblem, match="no GPU 9"):
        read_here(PYTHON, {"CUDA_VISIBLE_DEVICES": "9"}, nvml=pcie_host(4))


@pytest.mark.parametrize(
    ("visible", "order", "handle_count", "p2p_count"),
    [
        (None, (0, 1, 2, 3, 4, 5, 6, 7), 8, 28),
        ("0,1", (0, 1), 2, 1),
        ("7,4,5,6", (7, 4, 5, 6), 4, 6),
        ("2", (2,), 1, 0),
        # All of them, to find whose UUIDs these are.
        (f"{fake_uuid(4)},{fake_uuid(2)}", (4, 2), 8, 28),
    ],
)
def test_read_visible_asks_only_for_gpus_named_by_number(
    visible: str | None, order: tuple[int, ...], handle_count: int, p2p_count: int
) -> None:
    nvml = nvswitch_host(8)
    hardware = read_gpus(nvml)
    nvml.calls.clear()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    facts = read_visible(environ, nvml=nvml)

    chosen = [hardware.gpus[idx] for idx in order]
    assert facts.fingerprint == hardware.fingerprint(chosen, nccl_version=None)
    assert nvml.calls["nvmlDeviceGetHandleByIndex"] == handle_count
    assert nvml.calls["nvmlDeviceGetP2PStatus"] == p2p_count
    assert nvml.open_count == 0


@pytest.mark.parametrize(
    ("visible", "lost", "words"),
    [
        ("0,9", (), "no GPU 9, only 0, 1, 2, 3, and"),
        ("1,2", (1,), "no GPU 1, only 0, 2, 3, and CUDA would stop there; GPU 1 cannot be read"),
        ("2", (2,), "no GPU 2, only 0, 1, 3, and"),
        ("0,1", (0, 1, 2, 3), "reboot the host"),
    ],
)
def test_read_visible_names_every_gpu_where_one_is_not_to_be_had(
    visible: str, lost: tuple[int, ...], words: str
) -> None:
    nvml = nvswitch_host(4)
    for idx in lost:
        nvml.gpus[idx].errors["handle"] = GPU_IS_LOST

    with pytest.raises(NccltuneError, match=words):
        read_visible({"CUDA_VISIBLE_DEVICES": visible}, nvml=nvml)

    assert nvml.open_count == 0


def test_read_visible_as_the_last_of_a_process_leaves_nvml_open() -> None:
    nvml = nvswitch_host(2)

    read_visible({}, nvml=nvml, is_last=True)

    assert nvml.open_count == 1


@pytest.mark.usefixtures("no_loading")
def test_nccl_version_of_an_unknown_interpreter_is_none() -> None:
    assert nccl_version(None, {}) is None


@pytest.mark.usefixtures("no_loading")
def test_nccl_version_without_torch_is_none(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()

    assert nccl_version(PYTHON, environ_of(tmp_path)) is None


@pytest.mark.usefixtures("no_loading")
def test_nccl_version_believes_a_files_own_name(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2.29.7"
    library.write_bytes(b"x")
    (tmp_path / "libnccl.so.2").symlink_to(library)

    environ = {"SGLANG_NCCL_SO_PATH": str(tmp_path / "libnccl.so.2")}

    assert nccl_version(PYTHON, environ) == "2.29.7"


def test_nccl_version_does_not_believe_metadata_of_another_file(
    tmp_path: Path, loading: list[str]
) -> None:
    site = make_site(tmp_path)
    library = site / "nvidia/nccl/lib/libnccl.so.2"
    library.write_bytes(b"copied over the wheel's")

    assert nccl_version(PYTHON, environ_of(site)) == "2.99.0"
    assert loading == [str(library)]


def test_nccl_version_does_not_choose_between_two_wheels(
    tmp_path: Path, loading: list[str]
) -> None:
    site = make_site(tmp_path)
    (site / "nvidia_nccl_cu12-2.27.5.dist-info").mkdir()

    assert nccl_version(PYTHON, environ_of(site)) == "2.99.0"
    assert len(loading) == 1


def test_nccl_version_of_torchs_own_or_the_systems_library_is_asked_for(
    tmp_path: Path, loading: list[str]
) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    assert nccl_version(PYTHON, environ_of(tmp_path)) == "2.99.0"

    own = tmp_path / "torch" / "lib" / "libnccl.so.2"
    own.write_bytes(b"x")
    assert nccl_version(PYTHON, environ_of(tmp_path)) == "2.99.0"

    assert loading == ["libnccl.so.2", str(own)]


def test_nccl_version_of_a_library_that_cannot_be_loaded_is_none(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\x7fELF and then nothing")

    assert nccl_version(PYTHON, {"SGLANG_NCCL_SO_PATH": str(library)}) is None


@pytest.mark.parametrize(
    ("body", "version"),
    [
        ("*v = 22809; return 0;", "2.28.9"),
        ("*v = 23007; return 0;", "2.30.7"),
        ("*v = 2708; return 0;", "2.7.8"),
        ("return 1;", None),
        ("*(volatile int *)0 = 1; return 0;", None),
    ],
    ids=["2.28.9", "2.30.7", "2.7.8", "refuses", "crashes"],
)
def test_nccl_version_of_a_library_is_what_it_says_itself(
    tmp_path: Path, require: Require, body: str, version: str | None
) -> None:
    require(shutil.which("cc"), "no C compiler")
    source = tmp_path / "nccl.c"
    source.write_text(f"int ncclGetVersion(int *v) {{ {body} }}\n")
    library = tmp_path / "libnccl.so.2"
    words = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(words, check=True, env={"PATH": os.environ["PATH"]})

    assert nccl_version(PYTHON, {"SGLANG_NCCL_SO_PATH": str(library)}) == version


class OthersFiles(OwnFiles):
    """Files of somebody else's server, which lie here."""

    may_run = False


OTHERS = OthersFiles()


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("content", "version"),
    [
        (b"\0" * 3_000_000 + b"NCCL version 2.28.9+cuda13.0\0" + b"\0" * 100, "2.28.9"),
        (b"x" * (2**20 - 10) + b"NCCL version 2.27.5+cuda12.9\0", "2.27.5"),
        (b"NCCL version %s\0", None),
        (b"NCCL version 99999.1.1+\0", None),
        (b"", None),
    ],
    ids=["plain", "across_chunks", "format", "nonsense", "empty"],
)
def test_nccl_of_somebody_elses_server_is_read_and_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, version: str | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was run")

    monkeypatch.setattr(subprocess, "run", refuse)
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(content)
    (tmp_path / "site/torch/lib").mkdir(parents=True)
    shutil.copy(library, tmp_path / "site/torch/lib")

    assert nccl_version(None, {"SGLANG_NCCL_SO_PATH": str(library)}, OTHERS) == version
    assert nccl_version(PYTHON, environ_of(tmp_path / "site"), OTHERS) == version


@pytest.mark.usefixtures("no_loading")
def test_nccl_of_the_system_is_not_known_for_somebody_elses_server(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()

    assert nccl_version(PYTHON, environ_of(tmp_path), OTHERS) is None


def test_interpreter_of_somebody_elses_server_is_not_asked_for_its_folders(tmp_path: Path) -> None:
    shim = tmp_path / "python3"
    shim.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho {tmp_path}\n", encoding="utf-8")
    shim.chmod(0o755)

    assert package_dirs(str(shim), {}, OTHERS) == ()
    assert not (tmp_path / "ran").exists()
