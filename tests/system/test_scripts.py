from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "scripts/search",
    "scripts/check",
    "scripts/_venv.sh",
    ".ci/run",
    "systemd/nccltune-start",
)
OLD_PYTHON = "#!/bin/sh\nexit 1\n"  # what the version test of a 3.10 comes to
NEW_PYTHON = '#!/bin/sh\necho "$0"\n'  # passes every question, torch included
NO_TORCH = '#!/bin/sh\ncase "$*" in *find_spec*) exit 1 ;; esac\necho "$0"\n'


@pytest.fixture
def find_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the scripts' choice of interpreter among fake ones."""

    def run(fakes: dict[str, str], **environ: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in fakes.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        for tool in ("dirname", "sh"):
            found = shutil.which(tool)
            assert found
            (folder / tool).symlink_to(found)
        bash = shutil.which("bash")
        assert bash
        return subprocess.run(
            [
                bash,
                "-euo",
                "pipefail",
                "-c",
                'source "$0"; find_python; echo "${python##*/}"',
                str(ROOT / "scripts" / "_venv.sh"),
            ],
            env={"PATH": str(folder), **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    return run


@pytest.mark.system
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_has_no_shellcheck_finding(
    script: str, require: Callable[[object, str], None]
) -> None:
    require(shutil.which("shellcheck"), "the Debian package shellcheck is not installed")

    done = subprocess.run(
        ["shellcheck", "-x", script], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.stdout == ""


@pytest.mark.parametrize(
    ("fakes", "chosen"),
    [
        pytest.param({"python3": NO_TORCH}, "python3", id="only-one"),
        pytest.param({"python3.13": NO_TORCH, "python3": NO_TORCH}, "python3.13", id="newest"),
        pytest.param({"python3.12": OLD_PYTHON, "python3": NO_TORCH}, "python3", id="broken-shim"),
        pytest.param({"python3.13": NO_TORCH, "python3": NEW_PYTHON}, "python3", id="has-torch"),
    ],
)
def test_find_python_picks_torch_first_then_the_newest(
    fakes: dict[str, str],
    chosen: str,
    find_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = find_python(fakes)

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, chosen, "")


def test_find_python_with_only_an_old_one_says_what_to_do(
    find_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = find_python({"python3": OLD_PYTHON})

    assert done.returncode == 5
    assert "no Python 3.11 or newer on PATH; install one" in done.stderr


def test_find_python_with_an_old_one_named_refuses_it(
    find_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = find_python({"python3.10": OLD_PYTHON, "python3": NEW_PYTHON}, PYTHON="python3.10")

    assert done.returncode == 5
    assert "PYTHON=python3.10 is not a Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(
    ("wanted", "is_told"),
    [("one", False), ("link", False), ("other", True), ("broken", True), ("", False)],
)
def test_set_up_says_when_the_interpreter_named_is_not_that_of_the_environment(
    wanted: str, is_told: bool, tmp_path: Path
) -> None:
    scripts, venv = tmp_path / "scripts", tmp_path / ".venv" / "bin"
    for folder in (scripts, venv):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "_venv.sh", scripts)
    (tmp_path / "pyproject.toml").touch()
    for name, told in (("one", "one"), ("other", "other"), ("link", "link"), ("broken", "")):
        text = f'#!/bin/sh\necho "{tmp_path}/{told}"\n' if told else OLD_PYTHON
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("one")
    (venv / "python").symlink_to(tmp_path / "one")
    named = {"PYTHON": str(tmp_path / wanted)} if wanted else {}

    done = subprocess.run(
        [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            'source "$0"; pip_in() { :; }; set_up',
            str(scripts / "_venv.sh"),
        ],
        env={"PATH": os.environ["PATH"], **named},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert ("does nothing: .venv is there already" in done.stderr) is is_told
    assert "installing nccltune into .venv" in done.stderr


@pytest.mark.parametrize(
    ("promise", "outcome"), [("1", "2 failed"), ("0", "2 skipped")], ids=["ci", "anywhere"]
)
def test_skip_of_a_system_test_fails_only_where_it_was_promised_to_run(
    promise: str, outcome: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_asks(require):\n"
        "    require(False, 'nothing here')\n"
        "@pytest.mark.system\n"
        "def test_skips():\n"
        "    pytest.skip('nothing here')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    system: x\n    device: x\n")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={"PATH": os.environ["PATH"], "NCCLTUNE_REQUIRE_SYSTEM": promise},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert outcome in done.stdout.splitlines()[-1]
