from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from nccltune.host.facts import nccl_version
from nccltune.host.server_python import (
    find_program,
    find_python,
    installed,
    installed_version,
    package_dirs,
)
from nccltune.inject.apart import end, receive, start

NOBODY = 65534
FLAGS = ("--model-path", "/m", "--tp", "2")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment: a link to this interpreter, packages, and an ``sglang`` script."""
    root = tmp_path / "venv"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    (root / "bin" / "python3").symlink_to("python")
    (root / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (site(root) / "torch").mkdir(parents=True)
    (site(root) / "sglang-0.5.15.post1.dist-info").mkdir()
    write_script(root / "bin" / "sglang", f"#!{root}/bin/python\nprint()\n")
    return root


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def site(venv: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return venv / "lib" / version / "site-packages"


def test_find_python_of_a_module_launch_is_the_interpreter_named(venv: Path) -> None:
    python = str(venv / "bin" / "python")

    assert find_python((python, "-m", "sglang.launch_server", *FLAGS), {}) == python
    assert find_python(("env", "A=1", python, "-u", "-m", "sglang.launch_server"), {}) == python
    assert find_python(("numactl", "-N", "0", python, "-msglang.launch_server"), {}) == python


def test_find_python_of_a_bare_name_looks_into_path(venv: Path) -> None:
    environ = {"PATH": f"/nowhere:{venv}/bin"}

    found = find_python(("python3", "-m", "sglang.launch_server"), environ)

    assert found == f"{venv}/bin/python3"


def test_find_python_of_sglang_serve_reads_the_scripts_first_line(venv: Path) -> None:
    environ = {"PATH": f"{venv}/bin"}

    assert find_python(("sglang", "serve", "/m"), environ) == f"{venv}/bin/python"
    assert find_python((f"{venv}/bin/sglang", "serve", "/m"), {}) == f"{venv}/bin/python"


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("#!/opt/py/bin/python3.11\n", "/opt/py/bin/python3.11"),
        ("#!/opt/py/bin/python3 -I\n", "/opt/py/bin/python3"),
        ("#!/bin/sh\n'''exec' \"/a b/bin/python\" \"$0\" \"$@\"\n' '''\n", "/a b/bin/python"),
        ("#!/bin/sh\n'''exec' /x/bin/python \"$0\" \"$@\"\n' '''\n", "/x/bin/python"),
        ("#!/bin/sh\n'''exec' \"${PY:-python3}\" \"$0\"\n", None),
        ("#!/bin/sh\n'''exec' \"unclosed\n", None),
        ("#!/bin/bash\npython -m sglang.launch_server\n", None),
        ("#!/usr/bin/env -S no-such-python3\n", None),
        ("\x7fELF\x00\x00", None),
        ("", None),
    ],
    ids=["plain", "flag", "blank", "long", "expansion", "torn", "bash", "env", "elf", "empty"],
)
def test_find_python_of_a_script_knows_the_forms_of_installers(
    tmp_path: Path, head: str, found: str | None
) -> None:
    script = write_script(tmp_path / "sglang", head)

    assert find_python((str(script), "serve", "/m"), {"PATH": ""}) == found


def test_find_python_by_env_looks_into_path(venv: Path) -> None:
    script = write_script(venv / "x" / "sglang", "#!/usr/bin/env python3\n")

    found = find_python((str(script), "serve"), {"PATH": f"{venv}/bin"})

    assert found == f"{venv}/bin/python3"


@pytest.mark.parametrize("argv", [(), ("echo",), ("sglang", "serve"), ("bash", "-c", "sglang")])
def test_find_python_of_what_cannot_be_told_is_none(argv: tuple[str, ...]) -> None:
    assert find_python(argv, {"PATH": "/nowhere"}) is None


def test_find_program_wants_a_file_that_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "notes").write_text("")

    assert find_program("sglang", {"PATH": str(tmp_path)}) is None
    assert find_program("notes", {"PATH": str(tmp_path)}) is None
    assert find_program("sh", {}) is not None


def test_package_dirs_of_a_virtual_environment_are_its_own(venv: Path) -> None:
    folders = package_dirs(f"{venv}/bin/python", {"HOME": "/nowhere"})

    assert folders == (site(venv),)
    assert installed_version(folders, "sglang") == "0.5.15.post1"


def test_package_dirs_begin_with_the_search_path(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "torch").mkdir(parents=True)
    second.mkdir()

    folders = package_dirs(sys.executable, {"PYTHONPATH": f"{first}:/nowhere::{second}"})

    assert folders[:2] == (first, second)


@pytest.mark.parametrize(
    ("environ", "home"),
    [({}, "of-user"), ({"HOME": "{root}/said"}, "said")],
    ids=["env -i", "HOME"],
)
def test_package_dirs_of_a_user_are_found_without_home_as_python_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], home: str
) -> None:
    python = tmp_path / "usr/bin/python3.12"
    write_script(python, "")
    for name in ("of-user", "said"):
        (tmp_path / name / ".local/lib/python3.12/site-packages/torch").mkdir(parents=True)
    entry = SimpleNamespace(pw_dir=str(tmp_path / "of-user"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: entry)
    filled = {name: value.format(root=tmp_path) for name, value in environ.items()}

    folders = package_dirs(str(python), filled)

    assert folders == (tmp_path / home / ".local/lib/python3.12/site-packages",)


def test_package_dirs_of_an_interpreter_of_another_layout_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    script = f"#!/bin/sh\necho {tmp_path}\necho relative\necho /nowhere\n"
    shim = write_script(tmp_path / "shims" / "python", script)

    assert package_dirs(str(shim), {}) == (tmp_path,)


def test_package_dirs_of_an_interpreter_that_fails_are_none(tmp_path: Path) -> None:
    shim = write_script(tmp_path / "shims" / "python", "#!/bin/sh\nexit 3\n")

    assert package_dirs(str(shim), {}) == ()
    assert package_dirs(str(tmp_path / "nothing"), {}) == ()


def test_installed_takes_every_spelling_and_no_other_name(tmp_path: Path) -> None:
    for name in (
        "nvidia_nccl_cu12-2.27.5.dist-info",
        "nvidia_nccl-0.dist-info",
        "xnvidia_nccl_cu12-1.dist-info",
        "NVIDIA-NCCL-CU13-2.28.9.dist-info",
        "nvidia_nccl_cu13-2.28.9.data",
    ):
        (tmp_path / name).mkdir()

    found = list(installed((tmp_path, tmp_path / "nowhere"), r"nvidia[_.-]nccl[_.-]cu\d+"))

    assert sorted(version for _, version in found) == ["2.27.5", "2.28.9"]


def test_installed_version_of_what_is_not_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "sglang_router-1.0.dist-info").mkdir()

    assert installed_version((tmp_path,), "sglang") is None


def ask_from_outside(closed: Path) -> Mapping[str, object]:
    """Look for everything that lies in a folder that may not be looked into, as its user or not."""
    if os.geteuid() == 0:  # root is let in everywhere
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    python = f"{closed}/venv/bin/python"
    environ = {
        "PATH": f"{closed}/venv/bin:/bin",
        "PYTHONPATH": f"{closed}/venv",
        "HOME": f"{closed}",
    }
    return {
        "by_path": find_program(python, environ),
        "by_name": find_program("python3.0", environ),
        "behind": find_program("sh", environ),
        "python": find_python(("sglang", "serve", "/m"), environ),
        "folders": [str(each) for each in package_dirs(python, environ)],
        "beside": [
            str(each) for each in package_dirs(sys.executable, environ) if closed in each.parents
        ],
        "nccl": nccl_version(python, environ),
        "library": nccl_version(python, {"SGLANG_NCCL_SO_PATH": f"{closed}/libnccl.so.2"}),
    }


def test_what_lies_in_a_closed_folder_is_absent_and_no_error(venv: Path) -> None:
    closed = venv.parent
    closed.chmod(0)
    try:
        errand = start(lambda: ask_from_outside(closed))
        found = receive(errand, timeout_s=30.0)
    finally:
        end([errand])
        closed.chmod(0o700)

    assert found == {
        "by_path": None,
        "by_name": None,
        "behind": "/bin/sh",
        "python": None,
        "folders": [],
        "beside": [],
        "nccl": None,
        "library": None,
    }
