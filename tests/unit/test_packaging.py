from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import nccltune

ROOT = Path(__file__).parents[2]
MODULE_LINE_LIMIT = 400
HEAVY_MODULES = ("torch", "optuna", "numpy", "pynvml", "sqlalchemy", "yaml", "httpx")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", ["daemon", "systemd", "profiles", "tests", "benchmarks"])
def test_top_level_folder_is_no_package_of_its_own(folder: str) -> None:
    # An editable install puts the checkout on the path: a package here would hide a real one.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("module", ["nccltune", "nccltune.cli", "nccltuned.__main__"])
def test_import_of_entry_point_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY_MODULES!r}) & set(sys.modules)))"

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_modules_stay_under_the_line_limit() -> None:
    modules = [path for name in ("nccltune", "daemon") for path in (ROOT / name).rglob("*.py")]
    too_long = {
        str(path.relative_to(ROOT)): count
        for path in modules
        if (count := len(path.read_text().splitlines())) >= MODULE_LINE_LIMIT
    }

    assert len(modules) > 10
    assert too_long == {}


def test_version_is_a_release_number_and_in_the_changelog() -> None:
    assert f"## [{nccltune.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_core_dependencies_leave_torch_and_sglang_out(project: dict[str, Any]) -> None:
    core = project["project"]["dependencies"]

    assert not [line for line in core if line.startswith(("torch", "sglang", "nvidia-nccl"))]


def test_torch_has_a_lower_bound_only(project: dict[str, Any]) -> None:
    # An upper bound would let pip replace the torch of an SGLang environment.
    (torch,) = project["project"]["optional-dependencies"]["bench"]

    assert torch.startswith("torch>=")
    assert "<" not in torch
    assert "==" not in torch


def test_every_dependency_has_a_lower_bound(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"].values()
    lines = [*project["project"]["dependencies"], *(line for extra in extras for line in extra)]

    assert [line for line in lines if ">=" not in line] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()

    assert "\n./scripts/check\n" in readme
    assert ci.rstrip().endswith("exec ./scripts/check")
