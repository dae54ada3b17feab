from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.doctor import Status
from nccltune.doctor.interpreter import find_interpreter, own_interpreter
from nccltune.doctor.server import NcclLibrary, ProbedServer, ProbeError, probe_server
from nccltune.errors import UsageProblem
from tests.support.doctor_hosts import PYTHON, SERVER, DoctorHost, assert_status, doctor_host
from tests.support.launch_host import make_site

COMPILER = shutil.which("cc")
NCCL_SOURCE = "int ncclGetVersion(int *version) { *version = VERSION; return 0; }\n"


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    return doctor_host(tmp_path / "root")


# Which interpreter it is.


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_interpreter_of_a_python_launch_is_found_on_the_commands_path(tmp_path: Path) -> None:
    python = program(tmp_path / "bin" / "python3")
    argv = ["numactl", "-N", "0", "python3", "-u", "-m", "sglang.launch_server", "--tp", "8"]

    assert find_interpreter(argv, {"PATH": str(tmp_path / "bin")}).path == python


def test_interpreter_of_a_script_is_that_of_its_first_line(tmp_path: Path) -> None:
    python = program(tmp_path / "venv" / "bin" / "python3.12")
    script = program(tmp_path / "bin" / "sglang", f"#!{python}\nimport sys\n")

    assert find_interpreter([str(script), "serve", "m"], {}).path == python


@pytest.mark.parametrize(
    ("argv", "word", "fix"),
    [
        (["docker", "run", "i", "python3", "-m", "sglang.launch_server"], "docker", "there"),
        (["kubectl", "exec", "p", "--", "sglang", "serve"], "kubectl", "there"),
        (["uv", "run", "sglang", "serve", "m"], "uv", "--python"),
        (["conda", "run", "-n", "s", "python", "-m", "sglang.launch_server"], "conda", "--python"),
        (["/no/such/python3", "-m", "sglang.launch_server"], "leads to no Python", "--python"),
    ],
)
def test_interpreter_that_cannot_be_told_says_why(argv: list[str], word: str, fix: str) -> None:
    found = find_interpreter(argv, {"PATH": "/nowhere"})

    assert found.path is None
    assert word in found.problem
    assert fix in found.fix


def test_interpreter_of_no_launch_is_refused() -> None:
    with pytest.raises(UsageProblem, match="not an SGLang launch"):
        find_interpreter(["vllm", "serve"], {})


def test_own_interpreter_counts_only_with_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_interpreter().path is None
    metadata = tmp_path / "sglang-0.5.23.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert own_interpreter().path == Path(sys.executable)


# Asking it.


def site(folder: Path, *, library: Path | None = None, torch: str = "") -> dict[str, str]:
    """Lay out packages, with an NCCL that can be loaded if there is one; return the environment."""
    make_site(folder, nccl="2.27.3", library=library.read_bytes() if library else b"not a library")
    for name in ("sglang-0.5.15.post1", "nvidia_nccl_cu13-2.27.3", "torch-2.11.0"):
        metadata = folder / f"{name}.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        package, version = name.replace("_", "-").rsplit("-", 1)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (folder / "torch" / "__init__.py").write_text(torch)
    points = folder / "sglang-0.5.15.post1.dist-info" / "entry_points.txt"
    points.write_text("[sglang.srt.plugins]\nnccltune = nccltune_hook:activate\n")
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}


def nccl(folder: Path, version: int) -> Path:
    """Build a library that says it is this version of NCCL."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "nccl.c"
    source.write_text(NCCL_SOURCE)
    library = folder / "libnccl.so.2"
    options = ["-shared", "-fPIC", f"-DVERSION={version}", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([COMPILER or "cc", *options, "-o", str(library), str(source)], check=True)
    return library


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")


@needs_compiler
def test_probe_asks_the_library_that_torch_has_loaded(tmp_path: Path) -> None:
    library = nccl(tmp_path / "wheel", 22809)
    torch = (
        "import ctypes\nfrom pathlib import Path\nprint('noise')\n"
        "ctypes.CDLL(str(Path(__file__).parents[1] / 'nvidia/nccl/lib/libnccl.so.2'))\n"
    )
    environ = site(tmp_path / "site", library=library, torch=torch)

    server = probe_server(Path(sys.executable), environ)

    loaded = tmp_path / "site/nvidia/nccl/lib/libnccl.so.2"
    assert server.torch_nccl == NcclLibrary(str(loaded), "2.28.9")
    assert server.nccl_version == "2.28.9"
    assert server.wheels == {"nvidia-nccl-cu13": "2.27.3"}
    assert (server.sglang_version, server.torch_version) == ("0.5.15.post1", "2.11.0")
    assert server.plugins == {"nccltune": "nccltune_hook:activate"}
    assert server.torch_problem == ""


@needs_compiler
def test_probe_tells_both_libraries_apart(tmp_path: Path) -> None:
    environ = site(tmp_path / "site", library=nccl(tmp_path / "wheel", 22809))
    other = nccl(tmp_path / "other", 23007)

    server = probe_server(Path(sys.executable), {**environ, "SGLANG_NCCL_SO_PATH": str(other)})

    assert server.chosen_nccl == NcclLibrary(str(other), "2.30.7")
    assert server.torch_nccl is not None
    assert server.torch_nccl.version == "2.28.9"
    assert server.nccl_version == "2.30.7"


def test_probe_of_a_broken_torch_and_library_says_what_is_wrong(tmp_path: Path) -> None:
    environ = site(tmp_path / "site", torch="raise ImportError('libcudart.so.13 is missing')\n")

    server = probe_server(Path(sys.executable), environ)

    assert server.torch_problem == "ImportError: libcudart.so.13 is missing"
    assert server.torch_nccl is not None
    assert server.torch_nccl.version is None
    assert server.torch_nccl.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("#!/bin/sh\nexit 3\n", "ended with 3"),
        ("#!/bin/sh\necho 'no such option' >&2; exit 1\n", "failed: no such option"),
        ("#!/bin/sh\necho '[1]' > /proc/self/fd/$3\n", "makes no sense"),
        ("no program", "cannot be started"),
    ],
)
def test_probe_of_no_interpreter_says_so(tmp_path: Path, text: str, problem: str) -> None:
    python = program(tmp_path / "python", text)

    with pytest.raises(ProbeError, match=problem):
        probe_server(python, {"PATH": os.environ["PATH"]}, timeout_s=20)


def test_probe_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    text = f"#!/bin/sh\nsleep 60 &\necho $! > {mark}\nsleep 60\n"
    python = program(tmp_path / "python", text)

    with pytest.raises(ProbeError, match="did not answer within"):
        probe_server(python, {"PATH": os.environ["PATH"]}, timeout_s=0.5)

    child = int(mark.read_text())
    deadline_s = time.monotonic() + 5
    while _is_alive(child) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _is_alive(child)


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


# What is made of the answer.


def test_server_of_a_healthy_interpreter_is_fine(host: DoctorHost) -> None:
    checks = host.look()

    assert_status(checks["server_python"], Status.OK, "SGLang 0.5.23", "torch 2.11.0")
    assert_status(checks["nccl_version"], Status.OK, "NCCL 2.28.9", "libnccl.so.2")
    assert_status(checks["nccl_two_versions"], Status.OK)
    assert_status(checks["plugin_hook"], Status.OK)


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({"sglang_version": None}, Status.WARN, "no SGLang"),
        ({"torch_version": None}, Status.FAIL, "no torch"),
        ({"torch_problem": "ImportError: x"}, Status.FAIL, "ImportError: x"),
    ],
)
def test_server_python_that_cannot_serve_is_told(
    host: DoctorHost, changes: dict[str, object], status: Status, word: str
) -> None:
    host.server = replace(SERVER, **changes)  # type: ignore[arg-type]

    assert_status(host.look()["server_python"], status, word)


def test_server_python_that_gives_no_answer_is_a_failure(host: DoctorHost) -> None:
    host.server = f"{PYTHON} did not answer within 90 s"

    checks = host.look()

    assert_status(checks["server_python"], Status.FAIL, "did not answer", "--python")
    skipped = ("nccl_version", "nccl_two_versions", "plugin_hook")
    assert {checks[name].status for name in skipped} == {Status.SKIP}


def test_server_python_that_nobody_names_is_skipped(host: DoctorHost) -> None:
    case = host.case(has_python=False)

    assert case.server is None
    assert "no interpreter of a server is named" in case.server_problem


def loaded(version: str, **changes: object) -> ProbedServer:
    return replace(SERVER, torch_nccl=NcclLibrary("/l", version), **changes)  # type: ignore[arg-type]


def test_nccl_label_of_an_image_is_not_taken_for_the_version(host: DoctorHost) -> None:
    host.environ["NCCL_VERSION"] = "2.15.5-1"

    assert_status(host.look()["nccl_version"], Status.OK, "NCCL 2.28.9", "2.15.5-1 is a label")


def test_nccl_that_is_not_what_the_package_says_is_told(host: DoctorHost) -> None:
    host.server = loaded("2.28.9", wheels={"nvidia-nccl-cu13": "2.30.4"})

    assert_status(host.look()["nccl_version"], Status.WARN, "2.28.9", "says 2.30.4")


def test_two_nccl_packages_in_one_folder_are_told(host: DoctorHost) -> None:
    wheels = {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.28.9"}
    host.server = loaded("2.28.9", wheels=wheels)

    assert_status(host.look()["nccl_version"], Status.WARN, "both installed", "remove")


def test_nccl_that_launches_take_for_another_is_a_failure(host: DoctorHost, tmp_path: Path) -> None:
    make_site(tmp_path / "site", nccl="2.30.4")
    host.environ["PYTHONPATH"] = str(tmp_path / "site")

    assert_status(host.look()["nccl_version"], Status.FAIL, "2.28.9", "take it for 2.30.4")


def test_nccl_that_cannot_be_loaded_is_a_failure(host: DoctorHost) -> None:
    host.server = replace(SERVER, torch_nccl=NcclLibrary("/l", None, "no such file"))

    assert_status(host.look()["nccl_version"], Status.FAIL, "cannot load NCCL", "no such file")


def test_two_nccls_of_one_server_are_told(host: DoctorHost) -> None:
    host.server = replace(SERVER, chosen_nccl=NcclLibrary("/mine.so", "2.30.7"))

    checks = host.look()

    words = ("2.30.7 from /mine.so", "2.28.9", "SGLANG_NCCL_SO_PATH")
    assert_status(checks["nccl_two_versions"], Status.WARN, *words)


def test_two_nccls_of_one_version_are_fine(host: DoctorHost) -> None:
    host.server = replace(SERVER, chosen_nccl=NcclLibrary("/mine.so", "2.28.9"))

    assert host.look()["nccl_two_versions"].status is Status.OK


def test_hook_that_is_missing_is_told_with_the_command(host: DoctorHost) -> None:
    host.server = replace(SERVER, plugins={"other": "other:go"})

    check = host.look()["plugin_hook"]

    assert_status(check, Status.WARN, "typed by hand", f"nccltune install --python {PYTHON}")


def test_hook_that_the_whitelist_leaves_out_is_told(host: DoctorHost) -> None:
    host.environ["SGLANG_PLUGINS"] = "other, another"

    assert_status(host.look()["plugin_hook"], Status.WARN, "leaves the hook out", "nccltune")


def test_hook_that_the_whitelist_names_is_fine(host: DoctorHost) -> None:
    host.environ["SGLANG_PLUGINS"] = "other, nccltune"

    assert host.look()["plugin_hook"].status is Status.OK


def test_hook_of_an_sglang_without_plugins_is_told(host: DoctorHost) -> None:
    host.server = replace(SERVER, sglang_version="0.5.10.post1")

    assert_status(host.look()["plugin_hook"], Status.WARN, "has no plugins", "nccltune run")
