from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nccltune.sglang.command import parse_launch
from nccltune.supervise import DEFAULT_READY_TIMEOUT_S

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "examples/container"
SYSTEMD = ROOT / "systemd"
Require = Callable[[object, str], None]


def lint(require: Require, *command: str) -> str:
    found = shutil.which(command[0]) or shutil.which(command[0], path=str(SCRIPTS))
    require(found, f"{command[0]} is not installed")
    assert found
    done = subprocess.run(
        [found, *command[1:]], cwd=CONTAINER, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


SCRIPTS = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "Dockerfile.fragment"),
        ("kubernetes-validate", "--strict", "--quiet", "kubernetes.yaml"),
    ],
    ids=lambda command: str(command[0]),
)
@pytest.mark.system
def test_linter_has_no_finding(command: tuple[str, ...], require: Require) -> None:
    assert lint(require, *command) == ""


@pytest.fixture
def entry_point() -> list[str]:
    """The image's entry point, with the places of this installation for those in the image."""
    text = (CONTAINER / "Dockerfile.fragment").read_text()
    words: list[str] = json.loads(text.rpartition("\nENTRYPOINT ")[2])
    places = {
        "/usr/local/sbin/nccltune-start": str(SYSTEMD / "nccltune-start"),
        "/opt/nccltune/bin/python": sys.executable,
    }
    assert set(places) <= set(words)
    return [places.get(word, word) for word in words]


def test_entry_point_becomes_the_command_under_nccltune(entry_point: list[str]) -> None:
    command = ["/bin/sh", "-c", 'echo "$$ $1"; exit 7', "sh", "a  b"]
    with subprocess.Popen(
        [*entry_point, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        stdout, stderr = process.communicate()

    assert (process.returncode, stdout) == (7, f"{process.pid} a  b\n")
    assert "nccltune: no profile" in stderr


def test_image_has_what_its_entry_point_names() -> None:
    text = (CONTAINER / "Dockerfile.fragment").read_text()

    shipped = "/opt/nccltune/share/nccltune/systemd/nccltune-start"
    assert f"install -m 755 {shipped} /usr/local/sbin/" in text
    assert "python3 -m venv /opt/nccltune" in text
    assert "NCCLTUNE_HOME=/var/lib/nccltune" in text


@pytest.fixture
def pod() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((CONTAINER / "kubernetes.yaml").read_text()))
    spec: dict[str, Any] = documents[0]["spec"]["template"]["spec"]
    return spec


def test_pod_keeps_the_profile_on_a_volume(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    home = {each["name"]: each["value"] for each in container["env"]}["NCCLTUNE_HOME"]
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == home]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]

    assert "hostPath" in volume
    assert not mount.get("readOnly")


def test_pod_leaves_the_entry_point_in_place(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]

    assert "command" not in container


def test_pods_command_is_a_launch_that_gets_a_profile(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]

    launch = parse_launch(container["args"])

    assert launch.is_eagle3_launch
    assert launch.tp_size == container["resources"]["limits"]["nvidia.com/gpu"]


def test_probes_outwait_a_healthy_answer_and_a_long_start(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    startup = container["startupProbe"]

    assert startup["timeoutSeconds"] > 1  # a healthy answer of /health takes a second
    start_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert start_s > DEFAULT_READY_TIMEOUT_S
    assert (
        f"has\n          # {start_s // 60} minutes" in (CONTAINER / "kubernetes.yaml").read_text()
    )
