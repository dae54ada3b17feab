"""What an installation, or its end, comes to on this host: worked out before anything is done."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nccltune.doctor.containers import find_gpu_containers, has_device_links, has_systemd
from nccltune.errors import FileError, HostError
from nccltune.installing import hook, units
from nccltune.installing.steps import (
    MANIFEST_NAME,
    Action,
    Plan,
    Step,
    digest,
    read_manifest,
    remove_step,
    write_step,
)
from nccltune.paths import shipped_profiles_dir, state_dir

SERVICE = "nccltuned.service"
UNIT_FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/etc/systemd/system",
        "/run/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
        "/lib/systemd/system",
    )
)
_LINK_FOLDERS = ("*.wants", "*.requires")


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on this host; other ones in tests.

    Attributes:
        unit_folders: where systemd looks for units; ours go into the first.
        program_dir: where ``nccltune`` and ``nccltuned`` are.
    """

    unit_folders: tuple[Path, ...] = UNIT_FOLDERS
    shipped_dir: Path = field(default_factory=lambda: shipped_profiles_dir().parent)
    state_dir: Path = field(default_factory=state_dir)
    program_dir: Path | None = None
    proc_root: Path = Path("/proc")
    dev_root: Path = Path("/dev")

    @property
    def unit_dir(self) -> Path:
        """Where units are put."""
        return self.unit_folders[0]

    @property
    def manifest_path(self) -> Path:
        """The list of what is installed."""
        return self.state_dir / MANIFEST_NAME


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        pythons: interpreters that get, or lose, the hook.
        wrapped_units: units of the operator that get a drop-in.
        wants_units: None for where systemd runs and this user is root.
    """

    pythons: tuple[Path, ...] = ()
    wrapped_units: tuple[str, ...] = ()
    wants_units: bool | None = None


def plan_install(request: Request, places: Places) -> Plan:
    """Work out an installation.

    Raises:
        UsageProblem: an interpreter or a unit that is none.
        FileError: a file of somebody else's is in the way, or a folder cannot be written.
        HostError: programs or data files of nccltune are not where they should be.
    """
    installed = read_manifest(places.manifest_path)
    interpreters = [hook.read_interpreter(path) for path in request.pythons]
    steps = [
        *(_unit_steps(request, places, installed) if _wants_units(request, places) else ()),
        *(step for each in interpreters for step in _hook_steps(each, places, installed)),
    ]
    warnings = [
        f"{each.path} has no SGLang installed: the hook does nothing there until it has"
        for each in interpreters
        if each.sglang is None
    ]
    written = {str(s.path): digest(s.text) for s in steps if s.action in _WRITTEN}
    gone = {str(step.path) for step in steps if step.action is Action.REMOVE}
    return Plan(
        steps=tuple(steps),
        manifest_path=places.manifest_path,
        commands=tuple(_commands_after_install(steps, places)),
        compiled=tuple((each.path, each.packages / hook.PACKAGE) for each in interpreters),
        warnings=(*warnings, *_unit_warnings(steps, places)),
        manifest={
            path: known
            for path, known in {**installed, **written}.items()
            if not _is_below(path, gone)
        },
    )


_WRITTEN = (Action.CREATE, Action.REPLACE, Action.UNCHANGED)


def plan_uninstall(request: Request, places: Places) -> Plan:
    """Work out how everything that was installed goes; profiles and records stay.

    Raises:
        UsageProblem: an interpreter that is none.
        FileError: the list of what was installed cannot be used.
    """
    installed = read_manifest(places.manifest_path)
    packages = {Path(path).parent.parent for path in installed if _is_entry_point(Path(path))}
    packages |= {hook.read_interpreter(path).packages for path in request.pythons}
    steps = [remove_step(path, installed) for path in _our_units(places, installed)]
    removed = {step.path for step in steps if step.action is Action.REMOVE}
    steps += [Step(Action.REMOVE, link) for link in _links_to(removed, places)]
    for folder in sorted(packages):
        steps += [Step(Action.REMOVE, path) for path in hook.installed_dirs(folder)]
    kept = {str(step.path) for step in steps if step.action is Action.KEEP}
    return Plan(
        steps=tuple(steps),
        manifest_path=places.manifest_path,
        commands=tuple(_commands_after_uninstall(steps, places)),
        warnings=tuple(_unit_warnings(steps, places)),
        manifest={path: known for path, known in installed.items() if path in kept},
    )


def _wants_units(request: Request, places: Places) -> bool:
    if request.wants_units is not None:
        return request.wants_units
    return bool(request.wrapped_units) or (os.geteuid() == 0 and has_systemd(places.proc_root))


def _unit_steps(request: Request, places: Places, installed: dict[str, str]) -> Iterator[Step]:
    programs = _program_dir(places)
    for name in units.UNIT_NAMES:
        yield _unit_step(places.unit_dir / name, name, programs, places, installed)
    for given in request.wrapped_units:
        name = units.unit_name(given)
        shipped = _shipped_unit(units.DROPIN_SOURCE, places)
        text = units.dropin_text(name, places.unit_folders, shipped, programs)
        path = places.unit_dir / f"{name}.d" / units.DROPIN_NAME
        yield write_step(path, text, installed, is_ours=_is_shipped_as(path, shipped))


def _unit_step(
    path: Path, name: str, programs: Path, places: Places, installed: dict[str, str]
) -> Step:
    shipped = _shipped_unit(name, places)
    text = units.render_unit(shipped, programs)
    return write_step(path, text, installed, is_ours=_is_shipped_as(path, shipped))


def _shipped_unit(name: str, places: Places) -> str:
    path = places.shipped_dir / "systemd" / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise HostError(
            f"{path}: a unit that nccltune ships is not there ({error.strerror}); "
            "install nccltune anew",
            code="no_units",
        ) from None


def _is_shipped_as(path: Path, shipped: str) -> bool:
    try:
        return units.is_of_ours(path.read_text(encoding="utf-8", errors="replace"), shipped)
    except OSError:
        return False


def _program_dir(places: Places) -> Path:
    """Return the folder of both programs.

    Raises:
        HostError: they are not together, so that no unit could start them.
    """
    found = shutil.which("nccltune")
    candidates = [places.program_dir, Path(sysconfig.get_path("scripts"))]
    candidates += [Path(found).parent] if found else []
    for folder in filter(None, candidates):
        if all((folder / name).is_file() for name in ("nccltune", "nccltuned")):
            return folder.absolute()
    raise HostError(
        "the programs nccltune and nccltuned are not in one folder, and units need both: install "
        "nccltune with pip, as root",
        code="no_programs",
    )


def _hook_steps(
    interpreter: hook.Interpreter, places: Places, installed: dict[str, str]
) -> Iterator[Step]:
    files = hook.hook_files(places.shipped_dir / "hook")
    current = {interpreter.packages / Path(name).parts[0] for name in files}
    for path in hook.installed_dirs(interpreter.packages):
        if path not in current:
            yield Step(Action.REMOVE, path)  # metadata of another version
    for name, text in files.items():
        # The names are the distribution's own, as for every installer.
        yield write_step(interpreter.packages / name, text, {}, is_ours=True)


def _our_units(places: Places, installed: dict[str, str]) -> Iterator[Path]:
    """Yield unit files and drop-ins of ours that are there, by the list or by their first line."""
    for name in units.UNIT_NAMES:
        path = places.unit_dir / name
        if path.is_file() and (
            str(path) in installed or _is_shipped_as(path, _shipped_unit(name, places))
        ):
            yield path
    shipped = _shipped_unit(units.DROPIN_SOURCE, places)
    for path in sorted(places.unit_dir.glob(f"*.d/{units.DROPIN_NAME}")):
        if str(path) in installed or _is_shipped_as(path, shipped):
            yield path


def _links_to(removed: set[Path], places: Places) -> Iterator[Path]:
    """Yield what 'systemctl enable' has left behind for units that go."""
    for folder in _LINK_FOLDERS:
        for link in sorted(places.unit_dir.glob(f"{folder}/*.service")):
            if (
                link.is_symlink()
                and Path(os.path.normpath(link.parent / link.readlink())) in removed
            ):
                yield link


def _is_entry_point(path: Path) -> bool:
    return path.name == "entry_points.txt" and path.parent.name.startswith(f"{hook.PACKAGE}-")


def _is_below(path: str, gone: set[str]) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in gone)


def _changed_units(steps: list[Step], places: Places) -> list[Step]:
    return [s for s in steps if s.is_change and s.path.is_relative_to(places.unit_dir)]


def _needs_reload(steps: list[Step], places: Places) -> bool:
    """Whether systemd may know another version: a unit that is new it reads by itself."""
    return any(
        step.action is not Action.CREATE or step.path.name == units.DROPIN_NAME
        for step in _changed_units(steps, places)
    )


def _commands_after_install(steps: list[Step], places: Places) -> Iterator[str]:
    if not _changed_units(steps, places):
        return
    if _needs_reload(steps, places):
        yield "systemctl daemon-reload"
    # Plain "enable" would reload systemd behind the operator's back.
    yield f"systemctl enable --no-reload {SERVICE}"
    yield f"systemctl restart {SERVICE}"


def _commands_after_uninstall(steps: list[Step], places: Places) -> Iterator[str]:
    changed = [step.path.name for step in _changed_units(steps, places)]
    if SERVICE in changed:
        yield f"systemctl stop {SERVICE}"
    if changed:
        yield "systemctl daemon-reload"


def _unit_warnings(steps: list[Step], places: Places) -> Iterator[str]:
    for step in steps:
        if step.action is Action.KEEP:
            yield (
                f"{step.path} was changed since it was installed, and stays as it is; "
                "for changes there is 'systemctl edit'"
            )
    if not _changed_units(steps, places) or has_device_links(places.dev_root):
        return
    is_reloading = _needs_reload(steps, places)
    containers = find_gpu_containers(places.proc_root) if is_reloading else ()
    if containers:
        shown = ", ".join(f"{each.engine} {each.id}" for each in containers[:4])
        yield (
            f"GPU containers run under systemd's control ({shown}): 'systemctl daemon-reload' "
            "takes their GPUs away until they are restarted; reload when they are stopped, or "
            "first run nvidia-ctk system create-dev-char-symlinks --create-all"
        )
    try:
        owner = _program_dir(places).stat().st_uid
    except (HostError, FileError, OSError):
        return
    if owner != 0 and places.unit_dir == UNIT_FOLDERS[0]:
        yield f"the units start programs of user {owner} as root; install nccltune as root instead"
