from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nccltune.sglang.command import parse_launch

CONTAINER = Path(__file__).parents[2] / "examples/container"
Require = Callable[[object, str], None]

STANDIN = """#!/bin/sh
[ "$1" = --version ] && exit {status}
echo "tuned: $*"
shift 2
exec "$@"
"""


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
        ("shellcheck", "entrypoint.sh"),
        ("hadolint", "Dockerfile.fragment"),
        ("kubernetes-validate", "--strict", "--quiet", "kubernetes.yaml"),
    ],
    ids=lambda command: str(command[0]),
)
@pytest.mark.system
def test_linter_has_no_finding(command: tuple[str, ...], require: Require) -> None:
    assert lint(require, *command) == ""


def run_entrypoint(
    folder: Path, *command: str, status: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run the entry point with a stand-in for nccltune that ends ``--version`` with a status."""
    if status is not None:
        (folder / "nccltune").write_text(STANDIN.format(status=status))
        (folder / "nccltune").chmod(0o755)
    return subprocess.run(
        [str(CONTAINER / "entrypoint.sh"), *command],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_entrypoint_becomes_the_command_under_the_profile(tmp_path: Path) -> None:
    done = run_entrypoint(tmp_path, "sh", "-c", 'echo "$1"; exit 7', "sh", "a  b")

    assert done.returncode == 7
    assert done.stdout.splitlines()[1:] == ["a  b"]
    assert done.stdout.startswith("tuned: run -- sh -c ")


@pytest.mark.parametrize("status", [None, 1], ids=["missing", "broken"])
def test_entrypoint_starts_the_server_where_nccltune_does_not_run(
    status: int | None, tmp_path: Path
) -> None:
    done = run_entrypoint(tmp_path, "echo", "up", status=status)

    assert (done.returncode, done.stdout) == (0, "up\n")
    assert "starting on NCCL's defaults" in done.stderr


def test_entrypoint_without_a_command_says_so(tmp_path: Path) -> None:
    done = run_entrypoint(tmp_path)

    assert done.returncode == 125
    assert "no command" in done.stderr


def test_entrypoint_passes_signals_for_it_is_the_command(tmp_path: Path) -> None:
    done = run_entrypoint(tmp_path, "sh", "-c", "kill -TERM $$; echo still")

    assert (done.returncode, done.stdout.splitlines()[1:]) == (-15, [])


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
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_dockerfile_and_entry_point_speak_of_the_same_files() -> None:
    text = (CONTAINER / "Dockerfile.fragment").read_text()

    assert "COPY --chmod=755 entrypoint.sh /usr/local/bin/nccltune-entrypoint" in text
    assert 'ENTRYPOINT ["/usr/local/bin/nccltune-entrypoint"]' in text
    assert "NCCLTUNE_HOME=/var/lib/nccltune" in text
