"""The shipped units under a real systemd: installed, stopped, broken, taken away again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.tuned_machine import (
    CONF,
    PROGRAM,
    SERVER,
    SERVER_COMMAND,
    SERVER_PYTHON,
    SERVER_USER,
    SERVICE,
    SETTINGS,
    STATE,
    from_profile,
    is_active,
    properties,
    rank_environs,
    rank_pids,
    read_metrics,
    restart,
    server_conf,
    show_driver,
    wait_for,
    wait_for_server,
    write_unit,
)

if TYPE_CHECKING:
    from tests.support.nspawn import Machine

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]


def test_service_is_as_confined_as_promised(shared: Machine) -> None:
    answer = shared.run("systemd-analyze", "security", "--no-pager", SERVICE).stdout

    assert float(answer.rpartition("level for ")[2].split()[1]) <= 2.0


def test_units_have_no_finding_of_systemd(shared: Machine) -> None:
    paths = [f"/etc/systemd/system/{name}" for name in (SERVICE, "nccltuned.socket", SERVER)]

    done = shared.run("systemd-analyze", "verify", *paths, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_service_reads_ranks_of_another_user_and_serves_metrics(machine: Machine) -> None:
    command = " ".join(SERVER_COMMAND).replace("30000", "30001")
    write_unit(
        machine,
        "other.service",
        f"[Service]\nUser={SERVER_USER}\nEnvironment=NCCLTUNE_HOME={STATE}\n"
        f"ExecStart={PROGRAM} run -- {command}\n",
    )
    machine.run("systemctl", "start", "other.service")
    try:
        (pid,) = properties(machine, "other.service", "MainPID")
        count = 2 * len(SETTINGS)
        wanted = f'nccltune_rank_variables{{pid="{pid}",state="in_effect"}} {count}\n'
        wait_for(lambda: wanted in read_metrics(machine), machine, wanted)
        owner = Path(f"/proc/{rank_pids(machine)[-1]}").stat().st_uid
    finally:
        machine.run("systemctl", "stop", "other.service")

    assert owner != 0


def test_server_unit_of_another_user_gets_the_profile(machine: Machine) -> None:
    write_unit(machine, f"{SERVER}.d/user.conf", f"[Service]\nUser={SERVER_USER}\n")

    restart(machine)

    assert [from_profile(each) for each in rank_environs(machine)] == [SETTINGS] * 2
    assert {Path(f"/proc/{pid}").stat().st_uid for pid in rank_pids(machine)} != {0}


def test_server_that_is_stopped_has_not_failed(machine: Machine) -> None:
    machine.run("systemctl", "stop", SERVER)

    assert properties(machine, SERVER, "ActiveState", "Result") == ["inactive", "success"]
    assert rank_pids(machine) == []


def test_server_that_breaks_is_started_again_under_the_profile(machine: Machine) -> None:
    write_unit(machine, f"{SERVER}.d/soon.conf", "[Service]\nRestartSec=0.2\n")
    before = rank_pids(machine)

    os.kill(before[0], signal.SIGKILL)

    wait_for(lambda: len({*rank_pids(machine)} - {*before}) == 2, machine, "new ranks")
    wait_for_server(machine)
    assert [from_profile(each) for each in rank_environs(machine)] == [SETTINGS] * 2


def test_start_that_outlasts_the_time_out_goes_on_while_there_is_progress(
    machine: Machine,
) -> None:
    write_unit(machine, f"{SERVER}.d/short.conf", "[Service]\nTimeoutStartSec=2\n")
    slow = {"STANDIN_SGLANG_STAGE_S": "1", "STANDIN_SGLANG_SHARDS": "4"}
    (machine.root / CONF).write_text(server_conf(**slow))

    restart(machine)

    began, ended = properties(
        machine, SERVER, "InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic"
    )
    assert (int(ended) - int(began)) / 1e6 > 2.0


@pytest.mark.parametrize("user", ["root", SERVER_USER])
def test_profile_under_which_servers_die_in_nccl_is_rolled_back(
    machine: Machine, user: str
) -> None:
    lines = f"[Service]\nRestartSec=0.5\nUser={user}\n"
    write_unit(machine, f"{SERVER}.d/soon.conf", lines)
    fault = {"STANDIN_SGLANG_FAIL": "nccl_init", "STANDIN_SGLANG_FAIL_IF": "NCCL_PROTO"}
    (machine.root / CONF).write_text(server_conf(**fault))
    # With no history of this user's servers his starts count by systemd's word alone.
    machine.run("systemctl", "stop", SERVICE)
    machine.run("rm", "-f", f"{STATE}/starts.json")
    machine.run("systemctl", "start", SERVICE)

    machine.run("systemctl", "restart", SERVER, check=False)

    wait_for_server(machine)
    assert [from_profile(each) for each in rank_environs(machine)] == [{}, {}]
    assert "ROLLED BACK after 3 failed starts" in machine.journal("--unit", SERVICE)


@pytest.mark.parametrize("change", ["missing", "empty"])
def test_server_without_its_file_says_so(change: str, machine: Machine) -> None:
    path = machine.root / CONF
    path.unlink() if change == "missing" else path.write_text(f"SGLANG_PYTHON={SERVER_PYTHON}\n")

    done = machine.run("systemctl", "restart", SERVER, check=False)

    assert done.returncode != 0
    log = machine.journal("--unit", SERVER, "--lines=40")
    assert ("Assertion failed" in done.stderr) == (change == "missing")
    assert ("--model-path" in log.rpartition("Starting sglang@")[2]) == (change == "empty")


def test_operators_variables_in_the_servers_file_win_over_the_profile(machine: Machine) -> None:
    text = "# a remark\n\nno assignment\n" + server_conf(NCCL_NTHREADS='"256"')
    (machine.root / CONF).write_text(text)

    restart(machine)

    wanted = {**SETTINGS, "NCCL_NTHREADS": "256"}
    assert [from_profile(each) for each in rank_environs(machine)] == [wanted] * 2


def test_launch_typed_by_hand_gets_the_profile_from_the_hook(machine: Machine) -> None:
    show_driver(machine)
    machine.run("systemctl", "stop", SERVER)
    try:
        home = f"--setenv=NCCLTUNE_HOME={STATE}"
        machine.run("systemd-run", "--unit=by-hand", home, *SERVER_COMMAND)
        wait_for(lambda: len(rank_pids(machine)) == 2, machine, "two ranks")

        assert [from_profile(each) for each in rank_environs(machine)] == [SETTINGS] * 2
        log = machine.journal("--unit=by-hand")
        assert log.count("nccltune: ") == 1
        assert "nccltune: profile tuned is applied (identical host)" in log
    finally:
        machine.run("systemctl", "stop", "by-hand", check=False)
        machine.run("umount", "/proc/driver")


def test_units_come_and_go_without_a_reload(machine: Machine) -> None:
    """On hosts with GPU containers a reload costs the containers their GPUs."""
    reloads = count_reloads(machine)
    command = " ".join(SERVER_COMMAND).replace("30000", "30003")
    etc = machine.root / "etc/systemd/system"
    (etc / "mine.service").write_text(f"[Service]\nExecStart={command}\n")
    python = ["--python", SERVER_PYTHON]
    try:
        machine.run("systemctl", "stop", SERVER, SERVICE)
        machine.run(PROGRAM, "uninstall")
        gone = listing(machine)
        machine.run(PROGRAM, "install", "--units", "--unit", "mine", *python)
        machine.run("systemctl", "enable", "--no-reload", SERVICE)
        machine.run("systemctl", "restart", SERVICE)
        machine.run("systemctl", "start", SERVER, "mine.service")

        assert is_active(machine, SERVICE)
        wait_for(lambda: len(rank_pids(machine)) == 4, machine, "four ranks")
        assert [from_profile(each) for each in rank_environs(machine)] == [SETTINGS] * 4
        assert count_reloads(machine) == reloads

        machine.run("systemctl", "stop", "mine.service", SERVER, SERVICE)
        machine.run(PROGRAM, "uninstall")
        assert listing(machine) == gone
        assert {path for path in gone if "nccltune" in path} == {"etc/nccltune", CONF}
    finally:
        (etc / "mine.service").unlink()
        machine.run(PROGRAM, "install", "--units", *python)
        machine.run("systemctl", "enable", SERVICE, SERVER)
        machine.run("systemctl", "restart", SERVICE)


def count_reloads(machine: Machine) -> int:
    return machine.journal("_PID=1").count("Reloading.")


def listing(machine: Machine) -> set[str]:
    """List everything in the folders that an installation writes to."""
    folders = (machine.root / "etc", machine.root / "opt/sglang")
    return {
        str(path.relative_to(machine.root))
        for folder in folders
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }
