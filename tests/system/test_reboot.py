"""The profile after a reboot: a real systemd, real units, the environment of ranks from procfs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import nspawn
from tests.support.tuned_machine import (
    PROGRAM,
    SERVER,
    SERVER_COMMAND,
    SERVICE,
    SETTINGS,
    STATE,
    UP_TIMEOUT_S,
    VENV,
    from_profile,
    is_active,
    make_active,
    rank_environs,
    read_status,
    wait_for_server,
)

if TYPE_CHECKING:
    from tests.support.nspawn import Layers, Machine

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def state_folder(layers: Layers, tmp_path: Path) -> dict[Path, str]:
    """A state folder outside of the container, with an active profile, and where it is bound."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    binds = {folder: STATE}
    make_active(layers, binds)
    return binds


def test_profile_is_in_every_rank_after_a_reboot(layers: Layers) -> None:
    make_active(layers)

    found = []
    for _ in range(2):
        with nspawn.start(layers) as machine:
            machine.wait_until_up()
            wait_for_server(machine)
            found.append([from_profile(each) for each in rank_environs(machine)])
            answer = read_status(machine)
            machine.power_off()

    assert found == [[SETTINGS] * 2] * 2
    assert answer["exit_code"] == 0
    assert [server["verdict"] for server in answer["data"]["servers"]] == ["in_effect"]


def test_profile_survives_a_container_whose_own_layer_is_thrown_away(
    layers: Layers, state_folder: dict[Path, str]
) -> None:
    found = []
    for _ in range(2):
        with nspawn.start(layers, is_ephemeral=True, binds=state_folder) as machine:
            machine.wait_until_up()
            wait_for_server(machine)
            was_kept = (machine.root / "root/mark").exists()
            machine.run("touch", "/root/mark")
            found.append([from_profile(each) for each in rank_environs(machine)])
            machine.power_off()

    assert not was_kept
    assert found == [[SETTINGS] * 2] * 2


def test_profile_reaches_a_container_without_systemd_from_an_empty_environment(
    layers: Layers, state_folder: dict[Path, str]
) -> None:
    command = ["/usr/bin/env", "-i", PROGRAM, "run", "--", *SERVER_COMMAND]

    with nspawn.start(layers, *command, is_ephemeral=True, binds=state_folder) as machine:
        wait_until_printed(machine, "The server is fired up")
        found = [from_profile(each) for each in rank_environs(machine)]
        log = machine.console

    assert found == [SETTINGS] * 2
    assert "profile tuned is applied" in log


def wait_until_printed(machine: Machine, text: str) -> None:
    deadline = time.monotonic() + UP_TIMEOUT_S
    while text not in machine.console:
        if machine.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"{text!r} was never printed:\n{machine.console[-4000:]}")
        time.sleep(0.05)


# A profile that cannot be used


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_text(path.read_text()[:200])


def make_foreign(path: Path) -> None:
    path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA B200"))


def give_away(path: Path) -> None:
    shutil.chown(path, 65534, 65534)


FAULTS = {"deleted": delete, "truncated": truncate, "foreign": make_foreign, "owner": give_away}


@pytest.fixture
def broken(shared: Machine, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The machine under a profile with a fault, and its server started anew."""
    path = shared.root / STATE.lstrip("/") / "profiles/tuned.json"
    text = path.read_text()
    request.param(path)
    shared.run("systemctl", "restart", SERVER)
    yield shared
    path.unlink(missing_ok=True)
    path.write_text(text)
    shared.run("systemctl", "restart", SERVER)


@pytest.mark.parametrize("broken", FAULTS.values(), ids=FAULTS, indirect=True)
def test_server_starts_on_defaults_under_a_profile_that_cannot_be_used(broken: Machine) -> None:
    assert is_active(broken, SERVER)
    assert [from_profile(each) for each in rank_environs(broken)] == [{}, {}]
    answer = read_status(broken)
    assert answer["exit_code"] != 0
    active = answer["data"]["active"]
    assert (active["name"], active["is_degraded"]) == ("tuned", True)
    since_start = broken.journal("--unit", SERVER, "--lines=200").rpartition("Starting sglang@")[2]
    assert "profile tuned" in since_start
    assert "is applied" not in since_start


# The service


def stop(machine: Machine) -> None:
    machine.run("systemctl", "stop", SERVICE)


def break_program(machine: Machine) -> None:
    machine.run("systemctl", "stop", SERVICE)
    (machine.root / VENV.lstrip("/") / "bin/nccltuned").write_text("#!/bin/sh\nexit 70\n")
    machine.run("systemctl", "start", SERVICE, check=False)


@pytest.mark.parametrize("fault", [stop, break_program], ids=["stopped", "broken"])
def test_profile_is_applied_without_the_service(
    fault: Callable[[Machine], None], shared: Machine
) -> None:
    program = shared.root / VENV.lstrip("/") / "bin/nccltuned"
    text = program.read_text()
    try:
        fault(shared)
        shared.run("systemctl", "restart", SERVER)

        assert not is_active(shared, SERVICE)
        assert [from_profile(each) for each in rank_environs(shared)] == [SETTINGS] * 2
    finally:
        program.write_text(text)
        shared.run("systemctl", "reset-failed", check=False)
        shared.run("systemctl", "restart", SERVICE)
