from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.doctor import Check, Status, examine
from nccltune.doctor.server import NcclLibrary
from nccltune.inject.marker import MARKER, format_marker
from nccltune.profile import Profile
from nccltune.store import activate, save_candidate
from tests.support.doctor_hosts import (
    SERVER,
    DoctorHost,
    assert_status,
    doctor_host,
    launch_words,
)
from tests.support.fake_nvml import pcie_host


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    return doctor_host(tmp_path / "root")


@pytest.fixture
def pcie(host: DoctorHost) -> DoctorHost:
    host.nvml = pcie_host()
    return host


def warnings(host: DoctorHost) -> list[Check]:
    found = [check for check in examine(host.case()) if check.id == "environment"]
    return [check for check in found if check.status is Status.WARN]


# NCCL's own files.


def test_no_conf_file_is_fine(host: DoctorHost) -> None:
    assert_status(host.look()["conf_files"], Status.OK, "no configuration file")


def test_conf_file_of_the_system_is_shown_with_its_keys(host: DoctorHost) -> None:
    host.put("etc/nccl.conf", "NCCL_GRAPH_FILE=/etc/four-gpus.xml\nNCCL_PROTO=LL # small\n")

    check = host.look()["conf_files"]

    words = ("NCCL_GRAPH_FILE=/etc/four-gpus.xml", "line 2", "comment", "order of precedence")
    assert_status(check, Status.WARN, *words)


def test_conf_file_that_the_environment_overrides_is_no_warning(host: DoctorHost) -> None:
    host.put("etc/nccl.conf", "NCCL_PROTO=Simple\n")
    host.environ["NCCL_PROTO"] = "allreduce:LL"

    assert_status(host.look()["conf_files"], Status.OK, "NCCL_PROTO=Simple", "environment sets all")


def test_conf_file_below_the_profile_is_told_apart(host: DoctorHost) -> None:
    save_candidate(Profile("mine", {"NCCL_PROTO": "allreduce:LL"}))
    activate("mine", reason="manual")
    host.put("etc/nccl.conf", "NCCL_PROTO=Simple\nNCCL_NTHREADS=64\n")

    check = host.look()["conf_files"]

    assert_status(check, Status.WARN, "the profile is stronger in NCCL_PROTO")


def test_named_conf_file_that_does_not_exist_is_told(host: DoctorHost) -> None:
    host.environ["NCCL_CONF_FILE"] = "/nowhere/nccl.conf"

    assert_status(host.look()["conf_files"], Status.WARN, "/nowhere/nccl.conf", "does not exist")


@pytest.mark.parametrize(("version", "expected"), [("2.28.9", "database"), ("2.30.7", "variable")])
def test_conf_file_of_the_home_is_that_of_this_nccl(
    host: DoctorHost, version: str, expected: str
) -> None:
    host.server = replace(SERVER, torch_nccl=NcclLibrary("/l", version))
    host.user_home = host.put("database/.nccl.conf", "NCCL_NTHREADS=64\n").parent
    host.environ["HOME"] = str(host.put("variable/.nccl.conf", "NCCL_NTHREADS=128\n").parent)

    assert f"/{expected}/.nccl.conf" in host.look()["conf_files"].message


# The environment.


def test_environment_without_variables_is_fine(host: DoctorHost) -> None:
    assert_status(host.look()["environment"], Status.OK, "no NCCL variable is set")


def test_environment_of_harmless_variables_is_fine(host: DoctorHost) -> None:
    host.environ |= {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "NCCL_P2P_LEVEL": "NVL"}

    assert_status(host.look()["environment"], Status.OK, "3 NCCL variables are set")


def test_environment_of_one_variable_is_counted_as_one(host: DoctorHost) -> None:
    host.environ["NCCL_DEBUG"] = "WARN"

    assert_status(host.look()["environment"], Status.OK, "1 NCCL variable is set")


@pytest.mark.parametrize(
    ("variable", "value"), [("NCCL_P2P_LEVEL", "PXB"), ("NCCL_P2P_DISABLE", "1")]
)
def test_setting_that_keeps_nccl_from_nvlink_is_told(
    host: DoctorHost, variable: str, value: str
) -> None:
    host.environ[variable] = value

    (check,) = warnings(host)

    assert_status(check, Status.WARN, f"{variable}={value}", "NVLink joins every pair", "unset")


def test_setting_that_keeps_nccl_from_a_switch_is_told(pcie: DoctorHost) -> None:
    pcie.environ["NCCL_P2P_LEVEL"] = "NVL"

    (check,) = warnings(pcie)

    assert_status(check, Status.WARN, "NCCL_P2P_LEVEL=NVL", "PIX", "host memory")


@pytest.mark.parametrize("level", ["PIX", "PXB", "PHB", "SYS"])
def test_level_that_cuts_nothing_off_is_fine(pcie: DoctorHost, level: str) -> None:
    pcie.environ["NCCL_P2P_LEVEL"] = level

    assert warnings(pcie) == []


def test_shared_memory_off_between_sockets_is_told(pcie: DoctorHost) -> None:
    pcie.environ["NCCL_SHM_DISABLE"] = "1"

    (check,) = warnings(pcie)

    assert_status(check, Status.WARN, "NCCL_SHM_DISABLE=1", "network sockets")


@pytest.mark.parametrize(
    ("variable", "value", "message", "fix"),
    [
        ("NCCL_BUFFSIZE", "4M", "takes 4 bytes", "write 4194304"),
        ("NCCL_P2P_LEVEL", "nvl", "wants capitals", "write NVL"),
        ("NCCL_PROTO", "^LL", "LL128", "write allreduce:"),
        ("NCCL_PROTOS", "LL", "no variable that is known", "did you mean NCCL_PROTO?"),
        ("NCCL_CHUNK_SIZE", "1048576", "wrong results", "unset NCCL_CHUNK_SIZE"),
        ("NCCL_GRAPH_FILE", "/x.xml", "stale", "unset NCCL_GRAPH_FILE"),
        ("NCCL_ENV_PLUGIN", "x", "load other code", "unset NCCL_ENV_PLUGIN"),
    ],
)
def test_variable_that_does_not_do_what_was_meant_is_told(
    host: DoctorHost, variable: str, value: str, message: str, fix: str
) -> None:
    host.environ[variable] = value

    (check,) = warnings(host)

    assert message in check.message
    assert fix in check.fix


def test_what_an_earlier_route_set_is_not_the_operators(host: DoctorHost) -> None:
    save_candidate(Profile("mine", {"NCCL_PROTO": "allreduce:LL"}))
    activate("mine", reason="manual")
    host.environ |= {
        "NCCL_PROTO": "allreduce:Simple",
        MARKER: format_marker("0123456789abcdef", ["NCCL_PROTO"]),
    }

    assert warnings(host) == []


def test_environment_of_the_launch_command_itself_counts(host: DoctorHost, tmp_path: Path) -> None:
    launch = launch_words(tmp_path)

    check = host.look("env", "NCCL_P2P_DISABLE=1", *launch)["environment"]

    assert_status(check, Status.WARN, "NCCL_P2P_DISABLE=1")
