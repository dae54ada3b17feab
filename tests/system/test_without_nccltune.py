"""Servers under a real systemd whose nccltune is gone, broken, or closed to their user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.tuned_machine import (
    PROGRAM,
    SERVER,
    SERVER_COMMAND,
    SERVER_PYTHON,
    SERVER_USER,
    SERVICE,
    SETTINGS,
    STATE,
    TARGET_PYTHON,
    VENV,
    from_profile,
    is_active,
    properties,
    rank_environs,
    rank_pids,
    restart,
    wait_for,
    write_unit,
)

if TYPE_CHECKING:
    from tests.support.nspawn import Machine

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGE = f"{VENV}/lib/python{TARGET_PYTHON}/site-packages/nccltune"
OTHER_STATE = "/srv/state of 100%"
MINE = "mine.service"
MINE_COMMAND = " ".join(SERVER_COMMAND).replace("30000", "30003")


def remove(machine: Machine) -> None:
    machine.run("mv", VENV, f"{VENV}.away")


def lose_interpreter(machine: Machine) -> None:
    """As an upgrade of Python does."""
    machine.run("mv", f"{VENV}/bin/python3", f"{VENV}/bin/python3.away")
    machine.run("ln", "-s", "/usr/bin/python3.99", f"{VENV}/bin/python3")


def break_modules(machine: Machine) -> None:
    """Break what 'run' and 'launch' alone need."""
    for name in ("inject/running.py", "cli/launch.py"):
        machine.run("sh", "-c", f"cp -p {PACKAGE}/{name} {PACKAGE}/{name}.away")
        (machine.root / PACKAGE.lstrip("/") / name).write_text("raise ImportError('half of it')\n")


def close(machine: Machine) -> None:
    machine.run("chmod", "0700", VENV)


FAULTS: dict[str, tuple[Callable[[Machine], None], str, str]] = {
    "gone": (remove, "", "it lacks a library"),
    "no-interpreter": (lose_interpreter, "", "it lacks a library"),
    "broken": (break_modules, "", "status 1"),
    "closed": (close, SERVER_USER, f"user {SERVER_USER} may not run {VENV}/bin/python"),
}
MEND = f"""
[ -d {VENV}.away ] && mv {VENV}.away {VENV}
chmod 0755 {VENV}
find {VENV} -name '*.away' | while read -r path; do mv "$path" "${{path%.away}}"; done
"""


@pytest.fixture
def mended(machine: Machine) -> Iterator[Machine]:
    """The machine with a server's unit of the operator beside ours; nccltune is put back after."""
    text = f"[Service]\nExecStart={MINE_COMMAND}\n"
    (machine.root / "etc/systemd/system" / MINE).write_text(text)
    yield machine
    machine.run("sh", "-c", MEND)
    machine.run("systemctl", "stop", MINE)
    machine.run("sh", "-c", f"rm -r /etc/systemd/system/{MINE}*; systemctl daemon-reload")


@pytest.mark.parametrize("fault", FAULTS)
def test_server_starts_on_defaults_and_says_so(fault: str, mended: Machine) -> None:
    break_it, user, reason = FAULTS[fault]
    mended.run(PROGRAM, "install", "--units", "--unit", MINE)
    for unit in (SERVER, MINE):
        write_unit(mended, f"{unit}.d/user.conf", f"[Service]\nUser={user}\nWatchdogSec=2\n")
    mended.run("systemctl", "stop", SERVER)
    break_it(mended)

    restart(mended)
    mended.run("systemctl", "start", MINE)

    wait_for(lambda: len(rank_pids(mended)) == 4, mended, "ranks of both servers")
    assert [from_profile(each) for each in rank_environs(mended)] == [{}] * 4
    assert all("NOTIFY_SOCKET" not in each for each in rank_environs(mended))
    for unit in (SERVER, MINE):
        assert is_active(mended, unit)
        pid, invocation = properties(mended, unit, "MainPID", "InvocationID")
        log = mended.journal(f"_SYSTEMD_INVOCATION_ID={invocation}").splitlines()
        (told,) = [line for line in log if line.startswith("nccltune-start: ")]
        assert reason in told
        assert "the command starts WITHOUT it" in told
        assert mended.run("cat", f"/proc/{pid}/cmdline").stdout.startswith(SERVER_PYTHON)
    assert "does not work here" in properties(mended, SERVER, "StatusText")[0]
    # Nobody sends signs of life, and none is waited for.
    assert properties(mended, SERVER, "WatchdogUSec") == ["0"]


def test_main_process_is_nccltune_itself_where_it_works(machine: Machine) -> None:
    restart(machine)

    pid, status = properties(machine, SERVER, "MainPID", "StatusText")
    words = machine.run("cat", f"/proc/{pid}/cmdline").stdout.split("\0")
    assert words[1:6] == ["-EP", "-m", "nccltune", "launch", "--"]
    assert "ready" in status
    assert [from_profile(each) for each in rank_environs(machine)] == [SETTINGS] * 2


def test_install_warns_where_a_units_user_cannot_run_nccltune(mended: Machine) -> None:
    text = f"[Service]\nUser={SERVER_USER}\nExecStart={MINE_COMMAND}\n"
    (mended.root / "etc/systemd/system" / MINE).write_text(text)
    install = (PROGRAM, "install", "--units", "--unit", MINE, "--dry-run")
    before = mended.run(*install)
    close(mended)

    after = mended.run(*install)

    said = [" ".join((done.stdout + done.stderr).split()) for done in (before, after)]
    warning = f"{MINE} runs as {SERVER_USER}, who cannot run nccltune"
    assert [warning in each for each in said] == [False, True]
    assert "permission denied" in said[1]


def test_units_work_with_the_state_folder_in_force(mended: Machine) -> None:
    environ = {"NCCLTUNE_HOME": OTHER_STATE}
    mended.run("mkdir", "-p", OTHER_STATE)
    try:
        mended.run("cp", "-a", f"{STATE}/profiles", f"{STATE}/state.json", OTHER_STATE)
        # Whoever writes into it while it is moved would leave a part of it behind.
        mended.run("systemctl", "stop", SERVICE, SERVER)
        mended.run("mv", STATE, f"{STATE}.away")
        mended.run(PROGRAM, "install", "--units", "--unit", MINE, environ=environ)
        mended.run("systemctl", "daemon-reload")
        mended.run("systemctl", "restart", SERVICE, SERVER, MINE)

        wait_for(lambda: len(rank_pids(mended)) == 4, mended, "ranks of both servers")
        assert [from_profile(each) for each in rank_environs(mended)] == [SETTINGS] * 4
        assert is_active(mended, SERVICE)
        (pid,) = properties(mended, SERVICE, "MainPID")
        as_service = ["nsenter", f"--target={pid}", "--mount", "--wd=/", "touch"]
        mended.run(*as_service, f"{OTHER_STATE}/new")
        assert mended.run(*as_service, "/srv/new", check=False).returncode != 0
        assert not (mended.root / STATE.lstrip("/")).exists()
        paths = [f"/etc/systemd/system/{name}" for name in (SERVICE, SERVER, MINE)]
        found = mended.run("systemd-analyze", "verify", *paths, check=False)
        assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    finally:
        mended.run("systemctl", "stop", SERVICE, SERVER, MINE, check=False)
        mended.run(PROGRAM, "uninstall", environ=environ)
        mended.run("sh", "-c", f"rm -rf {STATE} '{OTHER_STATE}'; mv {STATE}.away {STATE}")
        reinstall(mended)


def test_script_outlives_an_uninstall_until_systemd_has_been_told(mended: Machine) -> None:
    mended.run(PROGRAM, "install", "--units", "--unit", MINE)
    mended.run("systemctl", "daemon-reload")
    mended.run("systemctl", "start", MINE)
    try:
        done = mended.run(PROGRAM, "uninstall")
        remove(mended)

        mended.run("systemctl", "restart", MINE)

        assert is_active(mended, MINE)
        lines = [line.strip() for line in done.stdout.splitlines()]
        assert lines[-2:] == ["systemctl daemon-reload", "rm /usr/local/sbin/nccltune-start"]
    finally:
        mended.run("sh", "-c", MEND)
        reinstall(mended)


def reinstall(machine: Machine) -> None:
    machine.run(PROGRAM, "install", "--units", "--python", SERVER_PYTHON)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", SERVICE, SERVER)
    machine.run("systemctl", "restart", SERVICE)
