from __future__ import annotations

import json
import venv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from nccltune.cli import install as install_module
from nccltune.cli.envelope import Answer
from nccltune.cli.install import install_command, uninstall_command
from nccltune.errors import UsageProblem
from nccltune.installing import Places

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).parents[2]
Invoke = Callable[..., Answer]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of its own, for both commands."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("nccltune", "nccltuned"):
        (programs / name).touch(mode=0o755)
    for name in ("units", "proc/1", "dev"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/1/comm").write_text("systemd\n")
    places = Places(
        unit_folders=(tmp_path / "units",),
        shipped_dir=ROOT,
        state_dir=tmp_path / "state",
        program_dir=programs,
        start_path=tmp_path / "sbin/nccltune-start",
        proc_root=tmp_path / "proc",
        dev_root=tmp_path / "dev",
    )
    monkeypatch.setattr(install_module, "Places", lambda: places)
    monkeypatch.setattr(install_module, "find_interpreters", lambda _: ())
    return tmp_path


def call(command: click.Command, *arguments: str) -> Answer:
    with command.make_context("x", list(arguments)) as context:
        answer = command.invoke(context)
    assert isinstance(answer, Answer)
    return answer


def test_dry_run_shows_every_file_and_writes_none(host: Path) -> None:
    answer = call(install_command, "--units", "--dry-run")

    steps = answer.data["steps"]
    assert isinstance(steps, list)
    assert {Path(step["path"]).name for step in steps} == {
        "nccltune-start",
        "nccltuned.service",
        "nccltuned.socket",
        "sglang@.service",
    }
    assert list((host / "units").iterdir()) == []
    assert not (host / "state").exists()
    assert answer.data["is_dry_run"] is True


def test_install_then_uninstall_leaves_what_systemd_may_still_start(host: Path) -> None:
    venv.create(host / "server", with_pip=False, symlinks=True)
    python = str(host / "server/bin/python")
    before = {path for path in host.rglob("*") if path.is_file()}

    installed = call(install_command, "--units", "--python", python)
    removed = call(uninstall_command)

    start = host / "sbin/nccltune-start"
    assert {path for path in host.rglob("*") if path.is_file()} == before | {start}
    assert json.dumps(installed.data)
    assert removed.data["commands"] == [
        "systemctl stop nccltuned.service",
        "systemctl daemon-reload",
        f"rm {start}",
    ]


def test_install_reloads_nothing_by_itself(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "systemctl").write_text(f"#!/bin/sh\ntouch {host}/called\n")
    (host / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{host}:/usr/bin:/bin")

    call(install_command, "--units")
    call(uninstall_command)

    assert not (host / "called").exists()


def test_install_without_sglang_anywhere_says_what_is_missing(host: Path) -> None:
    answer = call(install_command, "--no-units")

    assert answer.warnings == (install_module.NO_SGLANG,)
    assert answer.data["steps"] == []


def test_python_that_is_none_is_refused(host: Path) -> None:
    with pytest.raises(UsageProblem, match="no such program"):
        call(install_command, "--python", str(host / "nothing"))


@pytest.mark.parametrize("command", [install_command, uninstall_command])
def test_report_reads_as_text(command: click.Command, host: Path) -> None:
    answer = call(command)

    assert list(answer.show())


@pytest.mark.parametrize("command", [install_command, uninstall_command])
def test_help_says_what_it_does(command: click.Command) -> None:
    done = CliRunner().invoke(command, ["--help"])

    assert done.exit_code == 0
    assert "--dry-run" in done.output
