"""Containers with a systemd of their own, for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import nspawn
from tests.support.nspawn import Layers, Machine
from tests.support.tuned_machine import (
    CONF,
    PROGRAM,
    STATE,
    build,
    make_active,
    restart,
    server_conf,
    wait_for_server,
)


@pytest.fixture(scope="session")
def built_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...] | str:
    """The layers of a machine with everything installed and no profile, or what is missing."""
    missing = nspawn.missing_condition() or ("" if shutil.which("gcc") else "gcc not found")
    return missing or build(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def layers(
    built_layers: tuple[Path, ...] | str, tmp_path: Path, require: Callable[[object, str], None]
) -> Layers:
    """A machine of the test's own."""
    require(not isinstance(built_layers, str), str(built_layers))
    assert not isinstance(built_layers, str)
    return Layers(tmp_path / "own", built_layers)


@pytest.fixture(scope="module")
def shared(
    built_layers: tuple[Path, ...] | str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    """A machine that is up, with an active profile, for tests that put back what they change."""
    if isinstance(built_layers, str):
        pytest.skip(built_layers)
    own = Layers(tmp_path_factory.mktemp("shared"), built_layers)
    make_active(own)
    with nspawn.start(own) as machine:
        machine.wait_until_up()
        wait_for_server(machine)
        yield machine


@pytest.fixture
def machine(shared: Machine) -> Iterator[Machine]:
    """The shared machine, with its server's file and drop-ins as they were afterwards."""
    yield shared
    shared.run("sh", "-c", "rm -rf /run/systemd/system/*; systemctl daemon-reload")
    # It may have been rolled back.
    shared.run(PROGRAM, "profile", "activate", "tuned", environ={"NCCLTUNE_HOME": STATE})
    (shared.root / CONF).write_text(server_conf())
    restart(shared)
