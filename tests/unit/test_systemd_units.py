from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nccltune.cli.launch_tuning import RECORD_TIMEOUT_S
from nccltune.inject.running import LOOK_UP_TIMEOUT_S
from nccltune.installing.units import UNIT_NAMES, UnitPaths, render_unit
from nccltune.installing.wrapped import DROPIN_NAME
from nccltune.supervise import DEFAULT_READY_TIMEOUT_S, DEFAULT_STALL_TIMEOUT_S
from nccltune.supervise.service import KILL_MARGIN_S

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "systemd"
MAX_EXPOSURE = 2.0

Require = Callable[[object, str], None]


def read(name: str) -> configparser.RawConfigParser:
    """Read a unit; where a name stands more than once, its values are joined by line breaks."""
    parser = configparser.RawConfigParser(
        strict=False, delimiters=("=",), comment_prefixes=("#",), interpolation=None
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


@pytest.fixture(params=[Path("/var/lib/nccltune"), Path("/srv/a 100%")], ids=["usual", "other"])
def rendered(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Every unit as it is installed, and a unit of an operator with the drop-in."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("nccltune-start", "nccltuned"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    folder = tmp_path / "units"
    (folder / "kimi.service.d").mkdir(parents=True)
    (folder / "kimi.service").write_text("[Service]\nExecStart=/bin/true\n")
    targets = {name: folder / name for name in UNIT_NAMES}
    targets["sglang-dropin.conf"] = folder / "kimi.service.d" / DROPIN_NAME
    paths = UnitPaths(programs, request.param, programs / "nccltune-start")
    for name, path in targets.items():
        path.write_text(render_unit((SYSTEMD / name).read_text(), paths))
    return folder


@pytest.mark.system
def test_units_have_no_finding_of_systemd(rendered: Path, require: Require) -> None:
    require(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
    names = ["nccltuned.service", "nccltuned.socket", "sglang@kimi.service", "kimi.service"]

    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(rendered / name) for name in names)],
        env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{rendered}:/lib/systemd/system"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.system
def test_service_is_as_confined_as_promised(rendered: Path, require: Require) -> None:
    require(shutil.which("systemd-analyze"), "systemd-analyze is not installed")

    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", "nccltuned.service"],
        cwd=rendered,
        env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{rendered}:/lib/systemd/system"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert float(done.stdout.rpartition("level for ")[2].split()[1]) <= MAX_EXPOSURE


def test_server_unit_gives_more_time_than_launch_does_and_says_so_truly() -> None:
    seconds = int(read("sglang@.service")["Service"]["TimeoutStartSec"])
    text = (SYSTEMD / "sglang@.service").read_text()

    limit = re.search(r"^limit_s=(\d+)$", (SYSTEMD / "nccltune-start").read_text(), re.MULTILINE)
    assert limit
    before_s = int(limit[1]) + LOOK_UP_TIMEOUT_S + RECORD_TIMEOUT_S
    assert seconds > before_s + DEFAULT_READY_TIMEOUT_S + KILL_MARGIN_S
    assert f"nowhere for {DEFAULT_STALL_TIMEOUT_S:g} s (--stall-timeout-s)" in text
    assert f"takes {DEFAULT_READY_TIMEOUT_S:g} s in all" in text


def test_no_server_needs_the_service() -> None:
    unit = read("sglang@.service")["Unit"]

    assert "nccltuned.service" in unit["After"]
    assert not {"Requires", "BindsTo", "Requisite", "PartOf"} & set(unit)


def test_units_name_each_setting_once() -> None:
    for name in (*UNIT_NAMES, "sglang-dropin.conf"):
        lines = (SYSTEMD / name).read_text().splitlines()
        names = [line.partition("=")[0] for line in lines if line[:1].isalpha()]
        repeated = {each for each in names if names.count(each) > 1}
        assert repeated <= {"Environment", "SystemCallFilter", "ExecStart"}, name


def test_service_may_use_no_capability_but_those_for_reading_other_users_ranks() -> None:
    service = read("nccltuned.service")["Service"]

    assert service["CapabilityBoundingSet"] == "CAP_SYS_PTRACE CAP_DAC_READ_SEARCH"
    assert "AmbientCapabilities" not in service


def test_service_is_bounded_and_goes_on_when_a_child_of_it_is_ended() -> None:
    service = read("nccltuned.service")["Service"]

    assert service["MemoryMax"] == "256M"
    assert service["OOMPolicy"] == "continue"


def test_metrics_are_for_this_host_alone() -> None:
    socket = read("nccltuned.socket")["Socket"]

    assert socket["ListenStream"].startswith("127.0.0.1:")
    assert (socket["IPAddressDeny"], socket["IPAddressAllow"]) == ("any", "localhost")
