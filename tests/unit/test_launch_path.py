"""What carries a launch's all-reduces, where NVLink joins only some of the GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import nccltune.verify.serving.seen as seen
from nccltune.cli.launch_path import find_path, launch_environment
from nccltune.doctor.launch_checks import check_launch
from nccltune.host.facts import HostFacts
from nccltune.host.gpu_choice import VARIABLE as VISIBLE
from nccltune.host.match import has_full_nvlink
from nccltune.inject.profile_effects import effects_on
from nccltune.inject.resolver import resolve
from nccltune.profile import Profile
from nccltune.store import ActiveState, Launches, Policy
from tests.support.doctor_hosts import doctor_host
from tests.support.fake_nvml import FakeNvml, island_host, nvswitch_host, pcie_host
from tests.support.gpu_launches import HostPutter, demand_of, host_putter, launch, read, seen_by

if TYPE_CHECKING:
    from nccltune.host.hardware import Hardware
    from nccltune.sglang.command import LaunchCommand


@pytest.fixture
def put_host(monkeypatch: pytest.MonkeyPatch) -> HostPutter:
    return host_putter(monkeypatch)


def of_run(
    command: LaunchCommand, hardware: Hardware, environ: Mapping[str, str] | None = None
) -> bool | None:
    here = seen_by(command, hardware)
    profile = Profile("mine", {}, source="gpus", fingerprint=here.to_json())
    decision = resolve(
        argv=command.argv,
        environ=environ or {},
        active=ActiveState(profile, "mine", None, Path()),
        here=here,
        policy=Policy(Launches.ALL),
        sglang_version=None,
        is_any_host=True,
        gpu_architecture="sm90",
    )
    assert decision.path is not None
    assert (decision.path.is_nccl is True) == (not any("NCCL" in w for w in decision.warnings))
    return decision.path.is_nccl


def of_verify(command: LaunchCommand, hardware: Hardware, patch: pytest.MonkeyPatch) -> bool | None:
    host = HostFacts(seen_by(command, hardware), "sm90")
    patch.setattr(seen, "host_of", lambda *_: (host, ""))
    patch.setattr(seen, "shape_of", lambda *_: None)
    facts = SimpleNamespace(command=command, environ={}, files=None, python=None, version=None)
    path = seen._path(facts, {})  # type: ignore[arg-type]
    assert path is not None
    return path.is_nccl


def of_search(command: LaunchCommand) -> bool | None:
    path = find_path(demand_of(command), use_gpus=True)
    assert path is not None
    return path.is_nccl


def of_doctor(
    command: LaunchCommand,
    nvml: FakeNvml,
    folder: Path,
    environ: Mapping[str, str] | None = None,
) -> bool | None:
    host = doctor_host(folder)
    host.environ = dict(environ or {})
    host.nvml = nvml
    checks = {each.id: each for each in check_launch(host.case(*command.argv))}
    words = checks["all_reduce_path"].message
    return None if "may not" in words else "do not reach" not in words


@pytest.mark.parametrize(
    ("size", "before", "flags", "is_nccl"),
    [
        (4, "", "--tp 4", False),
        (4, "", "--tp 4 --base-gpu-id 4", False),
        (4, "", "--tp 4 --base-gpu-id 2", True),
        (4, "", "--tp 4 --gpu-id-step 2", True),
        (4, "", "--tp 2", False),
        (4, "", "--tp 2 --gpu-id-step 2", False),
        (4, "", "--tp 2 --gpu-id-step 4", None),
        (4, "", "--tp 8", True),
        (4, "", "--tp 4 --dp-size 2", False),
        (4, "", "--tp 4 --pp-size 2", False),
        (4, "", "--tp 3 --dp-size 2", None),
        (4, f"env {VISIBLE}=4,5,6,7,0", "--tp 4", False),
        (4, f"env {VISIBLE}=0,4,1,5,2,6,3,7", "--tp 4", True),
        (4, f"env {VISIBLE}=0,4,1,5,2,6,3,7", "--tp 4 --gpu-id-step 2", False),
        (2, "", "--tp 2", False),
        (2, "", "--tp 2 --base-gpu-id 6", False),
        (2, "", "--tp 2 --base-gpu-id 1", None),
        (2, "", "--tp 2 --dp-size 4", False),
        (2, "", "--tp 4", True),
        (8, "", "--tp 8", False),
        (1, "", "--tp 8", True),
    ],
)
def test_path_is_that_of_the_launchs_own_groups_for_all_who_say_it(
    put_host: HostPutter,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    size: int,
    before: str,
    flags: str,
    is_nccl: bool | None,
) -> None:
    nvml = pcie_host(8) if size == 1 else island_host(8, size=size)
    for gpu in nvml.gpus:
        gpu.capability = (9, 0)
    hardware = put_host(nvml)

    command = launch(flags, before)

    assert of_run(command, hardware) is is_nccl
    assert of_verify(command, hardware, monkeypatch) is is_nccl
    assert of_search(command) is is_nccl
    assert of_doctor(command, nvml, tmp_path) is is_nccl


PCIE_IPC = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"


@pytest.mark.parametrize(
    ("before", "is_nccl"),
    [
        ("", False),
        ("env NCCL_DEBUG=INFO", False),
        (f"env -u {PCIE_IPC}", True),
        ("env -i PATH=/bin", True),
        (f"env {PCIE_IPC}=0", True),
        (f"env -i {PCIE_IPC}=1", False),
    ],
)
def test_path_follows_what_env_leaves_to_the_server_for_all_who_say_it(
    put_host: HostPutter,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: str,
    is_nccl: bool,
) -> None:
    nvml = pcie_host(8)
    hardware = put_host(nvml)
    monkeypatch.setenv(PCIE_IPC, "1")
    command = launch("--tp 8", before)

    # Without SGLang's release "may not" is all that can be said.
    assert (of_run(command, hardware, {PCIE_IPC: "1"}) is True) == is_nccl
    assert (of_search(command) is True) == is_nccl
    assert of_doctor(command, nvml, tmp_path, {PCIE_IPC: "1"}) is is_nccl


CHANNELS = "SGLANG_DETERMINISTIC_NCCL_NCHANNELS"


@pytest.mark.parametrize(
    ("before", "count"),
    [
        ("", "4"),
        (f"env -u {CHANNELS}", "8"),
        ("env -i PATH=/bin", "8"),
        (f"env {CHANNELS}=2", "2"),
    ],
)
def test_writes_follow_what_env_leaves_to_the_server_for_all_who_say_them(
    put_host: HostPutter, monkeypatch: pytest.MonkeyPatch, before: str, count: str
) -> None:
    here = seen_by(launch("--tp 8"), put_host(pcie_host(8)))
    monkeypatch.setenv(CHANNELS, "4")
    command = launch("--tp 8 --enable-deterministic-inference", before)
    settings = {"NCCL_MAX_NCHANNELS": "16", CHANNELS: "4"}

    _yielding, forced = launch_environment(demand_of(command))
    effects = {each.variable: each.message for each in effects_on(settings, command.argv)}

    assert forced["NCCL_MAX_NCHANNELS"] == count
    assert f"writes {count} over it" in effects["NCCL_MAX_NCHANNELS"]
    if "-i" in before:
        return  # no profile gets through
    decision = resolve(
        argv=command.argv,
        environ={CHANNELS: "4"},
        active=ActiveState(
            Profile("mine", {"NCCL_MAX_NCHANNELS": "16"}, source="gpus"), "mine", None, Path()
        ),
        here=here,
        policy=Policy(Launches.ALL),
        sglang_version=None,
        is_any_host=True,
    )
    assert [value for _name, value, _why in decision.overwritten_by_sglang] == [count]


def test_links_of_a_launch_that_sees_too_few_gpus_are_not_known() -> None:
    here = seen_by(launch("--tp 2"), read(nvswitch_host(4)))

    assert has_full_nvlink(here, launch("--tp 4")) is True
    assert has_full_nvlink(here, launch("--tp 8")) is None
    assert has_full_nvlink(here, launch("--tp 2 --dp-size 2000000000")) is None
    assert has_full_nvlink(None, launch("--tp 2")) is None
