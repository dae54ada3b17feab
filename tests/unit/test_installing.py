from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.errors import FileError, HostError, UsageProblem
from nccltune.installing import (
    Action,
    Interpreter,
    Places,
    Plan,
    Request,
    carry_out,
    find_interpreters,
    hook,
    hook_files,
    plan_install,
    plan_uninstall,
    read_interpreter,
    wrapped,
)

ROOT = Path(__file__).parents[2]
UNIT_FILES = {"nccltuned.service", "nccltuned.socket", "sglang@.service"}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A host of its own: empty folders of units, and programs."""
    programs = tmp_path / "opt/bin"
    programs.mkdir(parents=True)
    for name in ("nccltune", "nccltuned"):
        (programs / name).touch(mode=0o755)
    for name in ("etc", "usr", "proc/1", "dev"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/1/comm").write_text("systemd\n")
    return Places(
        unit_folders=(tmp_path / "etc", tmp_path / "usr"),
        shipped_dir=ROOT,
        state_dir=tmp_path / "state",
        program_dir=programs,
        start_path=tmp_path / "sbin/nccltune-start",
        proc_root=tmp_path / "proc",
        dev_root=tmp_path / "dev",
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with packages of its own, and no pip."""
    folder = tmp_path_factory.mktemp("server")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin/python"


def listing(*folders: Path) -> set[str]:
    return {str(path) for folder in folders for path in folder.rglob("*")}


def actions(plan: Plan) -> list[str]:
    return sorted({str(step.action) for step in plan.steps})


def install(places: Places, *pythons: Path, units: tuple[str, ...] = ()) -> Plan:
    plan = plan_install(Request(pythons, units, True), places)
    carry_out(plan)
    return plan


def test_install_and_uninstall_leave_nothing_behind(places: Places, python: Path) -> None:
    packages = read_interpreter(python).packages
    (places.unit_dir / "mine.service").write_text("[Service]\nExecStart=/usr/bin/server\n")
    folders = (places.unit_dir, places.state_dir, packages)
    before = listing(*folders)

    install(places, python, units=("mine",))
    added = listing(*folders) - before
    carry_out(plan_uninstall(Request(), places))

    assert {Path(path).name for path in added} >= UNIT_FILES | {"50-nccltune.conf", "RECORD"}
    assert listing(*folders) == before
    assert not places.state_dir.exists()


def test_plan_changes_nothing_by_itself(places: Places, python: Path) -> None:
    before = listing(places.unit_dir, read_interpreter(python).packages)

    plan = plan_install(Request((python,), (), True), places)

    assert actions(plan) == ["create"]
    assert listing(places.unit_dir, read_interpreter(python).packages) == before


def test_install_twice_finds_everything_there(places: Places, python: Path) -> None:
    install(places, python)

    plan = plan_install(Request((python,), (), True), places)

    assert actions(plan) == ["unchanged"]
    assert plan.commands == ()
    carry_out(plan_uninstall(Request(), places))


def test_upgrade_replaces_what_is_as_it_was_left(places: Places) -> None:
    install(places)
    path = places.unit_dir / "nccltuned.service"
    text = path.read_text()
    old = text.replace("WatchdogSec=60", "WatchdogSec=6")
    carry_out(plan_uninstall(Request(), places))
    path.write_text(old)  # of an older release, whose list is lost

    plan = install(places)

    assert {step.path: step.action for step in plan.steps}[path] is Action.REPLACE
    assert path.read_text() == text
    assert plan.commands[0] == "systemctl daemon-reload"


@pytest.mark.parametrize("is_uninstall", [False, True], ids=["install", "uninstall"])
def test_file_that_somebody_changed_is_kept_and_named(
    places: Places, *, is_uninstall: bool
) -> None:
    install(places)
    path = places.unit_dir / "sglang@.service"
    changed = path.read_text() + "# mine\n"
    path.write_text(changed)

    plan_it = plan_uninstall if is_uninstall else plan_install
    plan = plan_it(Request((), (), True), places)
    carry_out(plan)

    assert path.read_text() == changed
    assert [step.path for step in plan.steps if step.action is Action.KEEP] == [path]
    assert any(str(path) in warning for warning in plan.warnings)


def test_unit_of_somebody_else_stops_everything_before_it_begins(places: Places) -> None:
    (places.unit_dir / "sglang@.service").write_text("[Service]\nExecStart=/usr/bin/server\n")

    with pytest.raises(FileError, match="not of nccltune; move it away"):
        install(places)

    assert [path.name for path in places.unit_dir.iterdir()] == ["sglang@.service"]


def test_install_that_was_cut_short_is_finished_by_the_next(places: Places) -> None:
    plan = plan_install(Request((), (), True), places)
    carry_out(plan)
    plan.steps[-1].path.unlink()

    again = install(places)

    assert sorted(str(step.action) for step in again.steps) == ["create", *["unchanged"] * 3]


def test_units_start_the_programs_of_this_installation(places: Places) -> None:
    install(places)

    service = (places.unit_dir / "nccltuned.service").read_text()
    server = (places.unit_dir / "sglang@.service").read_text()
    assert f"ExecStart={places.program_dir}/nccltuned" in service
    assert f"ExecStart={places.start_path} {sys.executable} launch -- " in server
    assert "/usr/" not in service + server


def test_start_script_is_a_program_before_units_name_it(places: Places) -> None:
    plan = install(places)

    assert plan.steps[0].path == places.start_path
    assert places.start_path.stat().st_mode & 0o777 == 0o755

    places.start_path.chmod(0o644)
    assert [step.path for step in install(places).steps if step.is_change] == [places.start_path]
    assert os.access(places.start_path, os.X_OK)


def test_start_script_stays_until_systemd_no_longer_starts_servers_by_it(places: Places) -> None:
    install(places)

    plan = plan_uninstall(Request(), places)
    carry_out(plan)

    assert places.start_path.is_file()
    assert plan.commands[-2:] == ("systemctl daemon-reload", f"rm {places.start_path}")
    install(places)
    unit = places.unit_dir / "sglang@.service"
    unit.write_text(unit.read_text() + "# mine\n")
    assert "rm" not in " ".join(plan_uninstall(Request(), places).commands)


def test_script_of_somebody_else_is_not_overwritten(places: Places) -> None:
    places.start_path.parent.mkdir()
    places.start_path.write_text("#!/bin/sh\nexec other\n")

    with pytest.raises(FileError, match="not of nccltune"):
        install(places)


def test_interpreter_without_nccltune_starts_no_server(places: Places, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named nccltune >&2; exit 1\n")
    python.chmod(0o755)

    with pytest.raises(HostError, match="No module named nccltune"):
        install(replace(places, python=python))

    assert list(places.unit_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "home", "writable"),
    [
        ("/srv/nccltune", "NCCLTUNE_HOME=/srv/nccltune", "/srv/nccltune"),
        ("/var/lib/nccltune-b", "NCCLTUNE_HOME=/var/lib/nccltune-b", "/var/lib/nccltune-b"),
        ("/srv/a 100%", '"NCCLTUNE_HOME=/srv/a 100%%"', '"/srv/a 100%%"'),
    ],
)
def test_units_name_the_state_folder_in_force(
    folder: str, home: str, writable: str, places: Places
) -> None:
    (places.unit_dir / "mine.service").write_text("[Service]\nExecStart=/usr/bin/server\n")
    there = replace(places, state_dir=Path(folder))

    steps = plan_install(Request((), ("mine",), True), there).steps
    texts = {step.path.name: step.text for step in steps}

    for name in ("nccltuned.service", "sglang@.service", wrapped.DROPIN_NAME):
        assert texts[name].splitlines().count(f"Environment={home}") == 1
    assert f"\nReadWritePaths={writable}\n" in texts["nccltuned.service"]
    assert "StateDirectory=" not in texts["nccltuned.service"]
    assert not re.search(r"/var/lib/nccltune\b(?!-b)", "".join(texts.values()))


def test_units_of_the_usual_state_folder_are_as_shipped_but_for_programs(places: Places) -> None:
    usual = replace(places, state_dir=Path("/var/lib/nccltune"))

    text = plan_install(Request((), (), True), usual).steps[1].text

    assert text.replace(str(places.program_dir), "/usr/local/bin") == (
        (ROOT / "systemd/nccltuned.service").read_text()
    )


def test_state_folder_that_no_unit_can_name_is_refused(places: Places) -> None:
    with pytest.raises(UsageProblem, match="no unit can name"):
        install(replace(places, state_dir=Path("/srv/a\nExecStart=/bin/b")))


def test_new_units_need_no_reload_of_systemd(places: Places) -> None:
    plan = install(places)

    assert plan.commands == (
        "systemctl enable --no-reload nccltuned.service",
        "systemctl restart nccltuned.service",
    )


def make_gpu_container(places: Places) -> None:
    process = places.proc_root / "77"
    (process / "fd").mkdir(parents=True)
    (process / "cgroup").write_text(f"0::/system.slice/docker-{'ab' * 32}.scope\n")
    (process / "fd/3").symlink_to("/dev/nvidia0")
    (places.dev_root / "nvidia0").touch()


def test_reload_beside_gpu_containers_is_warned_of(places: Places) -> None:
    make_gpu_container(places)
    (places.unit_dir / "mine.service").write_text("[Service]\nExecStart=/usr/bin/server\n")

    with_new = plan_install(Request((), (), True), places)
    with_dropin = plan_install(Request((), ("mine",), True), places)

    assert not [warning for warning in with_new.warnings if "GPU containers" in warning]
    assert "docker abababababab" in " ".join(with_dropin.warnings)
    assert "systemctl daemon-reload" in with_dropin.commands


def test_no_units_where_no_systemd_runs(places: Places, python: Path) -> None:
    (places.proc_root / "1/comm").write_text("tini\n")

    plan = plan_install(Request((python,)), places)

    assert {step.path.parts[-2] for step in plan.steps} >= {"nccltune_hook"}
    assert not [step for step in plan.steps if step.path.is_relative_to(places.unit_dir)]
    assert "no systemd runs here; --units" in " ".join(plan.warnings)
    assert "no units" not in " ".join(plan_install(Request((python,), (), False), places).warnings)


def test_programs_that_are_not_together_are_no_base_for_units(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert places.program_dir
    (places.program_dir / "nccltuned").unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")

    with pytest.raises(HostError, match="not in one folder"):
        install(places)


def test_links_of_enabled_units_go_with_them(places: Places) -> None:
    install(places)
    wants = places.unit_dir / "multi-user.target.wants"
    wants.mkdir()
    (wants / "nccltuned.service").symlink_to(places.unit_dir / "nccltuned.service")
    (wants / "sglang@kimi.service").symlink_to("../sglang@.service")
    (wants / "other.service").symlink_to("/usr/lib/systemd/system/other.service")

    carry_out(plan_uninstall(Request(), places))

    assert [path.name for path in wants.iterdir()] == ["other.service"]


@pytest.mark.parametrize(
    "text", ['{"schema": ', "[]", '{"schema": "nccltune.installed/9"}', "\xff"]
)
def test_broken_list_of_installed_files_is_refused_with_its_name(text: str, places: Places) -> None:
    places.state_dir.mkdir()
    places.manifest_path.write_bytes(text.encode("latin-1"))

    with pytest.raises(FileError, match=r"installed\.json"):
        plan_uninstall(Request(), places)


def test_uninstall_without_the_list_finds_units_by_their_first_line(places: Places) -> None:
    install(places)
    places.manifest_path.unlink()

    carry_out(plan_uninstall(Request(), places))

    assert listing(places.unit_dir) == set()


# The operator's own units


def dropin(places: Places, unit: str, name: str = "kimi.service", **dropins: str) -> str:
    (places.unit_folders[1] / name).write_text(unit)
    for each, text in dropins.items():
        path = places.unit_dir / f"{name}.d" / f"{each}.conf"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    install(places, units=(name,))
    return (places.unit_dir / f"{name}.d" / wrapped.DROPIN_NAME).read_text()


@pytest.mark.parametrize(
    ("line", "wrapped"),
    [
        ("/usr/bin/python3 -m sglang.launch_server --tp 8", None),
        ('sglang serve --model-path "/models/a b" $ARGS ${X} %i', None),
        ("-/opt/sglang/bin/sglang serve", "-{} /opt/sglang/bin/sglang serve"),
        ("+:/bin/server", "+:{} /bin/server"),
        ("/bin/server \\\n  # a remark\n  --tp 8", "{} /bin/server    --tp 8"),
    ],
)
def test_dropin_keeps_the_command_as_it_is_written(
    line: str, wrapped: str | None, places: Places
) -> None:
    text = dropin(places, f"[Unit]\nExecStart=/no\n[Service]\nType=exec\nExecStart={line}\n")

    run = f"{places.start_path} {sys.executable} run --"
    wanted = wrapped.format(run) if wrapped else f"{run} {line}"
    assert text.endswith(f"\nExecStart=\nExecStart={wanted}\n")


def test_dropin_wraps_what_earlier_dropins_have_made_of_the_command(places: Places) -> None:
    text = dropin(
        places,
        "[Service]\nExecStart=/bin/old\n",
        **{"10-other": "[Service]\nExecStart=\nExecStart=/bin/new --tp 8\n"},
    )

    assert text.endswith(" run -- /bin/new --tp 8\n")


def test_dropin_for_an_instance_reads_its_template(places: Places) -> None:
    (places.unit_dir / "kimi@.service").write_text("[Service]\nExecStart=/bin/server %i\n")

    install(places, units=("kimi@a",))

    text = (places.unit_dir / "kimi@a.service.d" / wrapped.DROPIN_NAME).read_text()
    assert text.endswith(" run -- /bin/server %i\n")


def test_dropin_is_written_anew_when_the_command_has_changed(places: Places) -> None:
    first = dropin(places, "[Service]\nExecStart=/bin/server --tp 4\n")
    second = dropin(places, "[Service]\nExecStart=/bin/server --tp 8\n")

    assert first.endswith("--tp 4\n")
    assert second.endswith(" run -- /bin/server --tp 8\n")


@pytest.mark.parametrize(
    ("unit", "reason"),
    [
        ("[Service]\nType=oneshot\nExecStart=/bin/a\nExecStart=/bin/b\n", "has 2 ExecStart lines"),
        ("[Service]\nExecStart=/bin/a\nExecStart=\n", "has no ExecStart lines"),
        ("[Service]\nExecStart=@/bin/a name\n", "another name"),
        ("[Service]\nExecStart=/usr/bin/nccltune run -- /bin/a\n", "under nccltune already"),
        ("[Service]\nExecStart=/a/nccltune-start /a/p run -- /bin/a\n", "under nccltune already"),
        ("[Service]\nRootDirectory=/r\nExecStart=/bin/a\n", "may keep nccltune's files"),
    ],
)
def test_command_that_cannot_be_wrapped_is_refused_with_its_line(
    unit: str, reason: str, places: Places
) -> None:
    with pytest.raises(FileError, match=reason):
        dropin(places, unit)


@pytest.mark.parametrize(
    "name", ["missing", "../etc/passwd", "sglang@kimi", "nccltuned", "a.socket", "", "a b"]
)
def test_name_that_is_no_unit_of_the_operator_is_refused(name: str, places: Places) -> None:
    with pytest.raises(UsageProblem):
        install(places, units=(name,))


def other_python(path: Path) -> Path:
    """Make an interpreter that has nccltune, at another place."""
    path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_dropin_for_an_uninterpreted_command_names_the_interpreter_as_it_is(
    places: Places, tmp_path: Path
) -> None:
    there = replace(places, python=other_python(tmp_path / "a$b"))

    texts = [dropin(there, f"[Service]\nExecStart={mark}/bin/a\n") for mark in (":", "")]

    assert [text.count("a$b run") for text in texts] == [1, 0]
    assert [text.count("a$$b run") for text in texts] == [0, 1]


@pytest.mark.parametrize(
    ("lines", "user"),
    [
        ("User=nobody\nExecStart=/bin/a", "nobody"),
        ("User=nobody\nUser=\nExecStart=/bin/a", ""),
        ("User=nobody\nExecStart=+/bin/a", ""),
        ("User=kimi\nDynamicUser=yes\nExecStart=/bin/a", "nobody"),
        ("ExecStart=/bin/a", ""),
    ],
)
def test_user_of_a_unit_is_read_as_systemd_does(lines: str, user: str, places: Places) -> None:
    (places.unit_dir / "kimi.service").write_text(f"[Service]\n{lines}\n")

    assert wrapped.read_unit("kimi", places.unit_folders).user == user


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_user_who_cannot_run_nccltune_is_warned_of(places: Places, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    closed = other_python(tmp_path / "python")
    unit = "[Service]\nUser={}\nExecStart=/bin/a\n"
    told = []
    for user in ("nobody", "root", "no-such-user"):
        (places.unit_dir / "kimi.service").write_text(unit.format(user))
        request = Request((), ("kimi",), True)
        told.append(" ".join(plan_install(request, replace(places, python=closed)).warnings))

    assert f"runs as nobody, who cannot run nccltune ({closed}: permission denied)" in told[0]
    assert "start WITHOUT the profile" in told[0]
    assert "who cannot run" not in told[1]
    assert "does not know that user" in told[2]


# The hook


def ask(python: Path, code: str) -> str:
    done = subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_hook_is_found_by_its_entry_point(places: Places, python: Path) -> None:
    install(places, python)

    code = (
        "from importlib.metadata import entry_points, distribution, version\n"
        "point, = [p for p in entry_points().select(group='sglang.srt.plugins')]\n"
        "files = [f for f in distribution('nccltune-hook').files]\n"
        "print(point.name, point.load().__module__, version('nccltune-hook'), "
        "all(f.locate().is_file() for f in files))"
    )
    answer = ask(python, code)
    carry_out(plan_uninstall(Request(), places))

    assert answer == f"nccltune nccltune_hook {hook_version()} True"


def hook_version() -> str:
    data = tomllib.loads((ROOT / "hook/pyproject.toml").read_text())
    return str(data["project"]["version"])


def test_hook_is_compiled_for_its_interpreter(places: Places, python: Path) -> None:
    plan = install(places, python)

    (package,) = [folder for _, folder in plan.compiled]
    assert list((package / "__pycache__").glob("launching.*.pyc"))
    carry_out(plan_uninstall(Request(), places))


def test_hook_of_another_version_is_replaced_whole(places: Places, python: Path) -> None:
    packages = read_interpreter(python).packages
    old = packages / "nccltune_hook-0.0.1.dist-info"
    old.mkdir()
    (old / "RECORD").touch()
    (packages / "nccltune_hook").mkdir()
    (packages / "nccltune_hook/__init__.py").write_text("def load(): raise RuntimeError\n")

    install(places, python)

    assert not old.exists()
    assert ask(python, "import nccltune_hook as h; print(h.__version__)") == hook_version()
    carry_out(plan_uninstall(Request(), places))


def test_record_tells_the_truth_about_every_file() -> None:
    files = hook_files(ROOT / "hook")

    rows = [line.split(",") for line in files[f"{hook.info_dir(hook_version())}/RECORD"].split()]

    assert {row[0] for row in rows} == set(files)
    assert all(int(row[2]) == len(files[row[0]].encode()) for row in rows if row[2])
    assert list(files)[-1].endswith("entry_points.txt")


def test_pip_knows_the_hook_and_can_take_it_away(places: Places, tmp_path: Path) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python has no ensurepip")
    venv.create(tmp_path / "server", with_pip=True, symlinks=True)
    python = tmp_path / "server/bin/python"
    before = listing(read_interpreter(python).packages)
    install(places, python)
    pip = [str(python), "-I", "-m", "pip", "--disable-pip-version-check"]

    listed = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout
    subprocess.run([*pip, "check"], capture_output=True, check=True)
    subprocess.run([*pip, "uninstall", "-y", "nccltune-hook"], capture_output=True, check=True)

    assert "nccltune-hook" in listed
    left = listing(read_interpreter(python).packages) - before
    assert not [path for path in left if "nccltune" in path]


def test_hook_runs_on_the_oldest_python_that_it_promises(tmp_path: Path) -> None:
    found = shutil.which("python3.9")
    if found is None or subprocess.run([found, "-c", ""], check=False).returncode:
        pytest.skip("no Python 3.9 here")
    for name, text in hook_files(ROOT / "hook").items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    code = (
        "import sys; sys.argv = ['/x/sglang/launch_server.py', '--tp', '2', "
        "'--speculative-algorithm', 'EAGLE3']\n"
        "import nccltune_hook; nccltune_hook.load()"
    )
    home = tmp_path / "home"
    (home / "profiles").mkdir(parents=True)
    profile = {"schema": "nccltune.profile/1", "name": "a", "settings": {"NCCL_MAX_CTAS": "8"}}
    (home / "profiles/a.json").write_text(json.dumps(profile))
    (home / "state.json").write_text('{"schema": "nccltune.state/1", "active": "a"}')

    done = subprocess.run(
        [found, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "NCCLTUNE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stderr == "nccltune: profile a is applied (it names no host); NCCL_MAX_CTAS=8\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no such program"),
        ("#!/bin/sh\nexit 3\n", "does not answer"),
        ("#!/bin/sh\necho '[[3, 8], \"/tmp\", null]'\n", r"is 3\.8, 3\.9 is needed"),
        ("#!/bin/sh\necho hello\n", "does not answer"),
    ],
    ids=["missing", "fails", "old", "not-python"],
)
def test_program_that_is_no_python_is_refused(
    script: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "python"
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)

    with pytest.raises(UsageProblem, match=reason):
        read_interpreter(path)


def test_packages_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho '[[3, 12], \"{tmp_path}\", null]'\n")
    path.chmod(0o755)
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)

    with pytest.raises(FileError, match="run this as the user who owns it"):
        read_interpreter(path)


def test_interpreter_without_sglang_gets_the_hook_with_a_warning(
    places: Places, python: Path
) -> None:
    plan = plan_install(Request((python,), (), False), places)

    assert any("no SGLang installed" in warning for warning in plan.warnings)


def test_interpreter_of_sglang_on_the_path_is_found(python: Path, tmp_path: Path) -> None:
    packages = read_interpreter(python).packages
    info = packages / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    script = tmp_path / "sglang"
    script.write_text(f"#!{python}\nimport sys\n")
    script.chmod(0o755)
    try:
        found = find_interpreters({"PATH": str(tmp_path)})
        asked = read_interpreter(python)
    finally:
        (info / "METADATA").unlink()
        info.rmdir()

    assert found == (python,)
    assert asked == Interpreter(python, packages, "0.5.23")


def test_missing_data_files_are_named(places: Places, python: Path, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="install nccltune anew"):
        hook_files(tmp_path)
    assert sys.version_info >= (3, 11)
