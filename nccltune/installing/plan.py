"""What an installation, or its end, comes to on this host: worked out before anything is done."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nccltune.doctor.containers import has_systemd
from nccltune.errors import HostError
from nccltune.installing import hook, units, wrapped
from nccltune.installing.follow_up import (
    commands_after_install,
    commands_after_uninstall,
    unit_warnings,
    user_warnings,
)
from nccltune.installing.places import Places, find_program_dir, is_shipped_as, shipped_unit
from nccltune.installing.start_check import problem_for
from nccltune.installing.steps import (
    PROGRAM_MODE,
    Action,
    Plan,
    Step,
    digest,
    read_manifest,
    remove_step,
    write_step,
)

_LINK_FOLDERS = ("*.wants", "*.requires")


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
    wants_units = _wants_units(request, places)
    names = request.wrapped_units if wants_units else ()
    wraps = [wrapped.read_unit(name, places.unit_folders) for name in names]
    steps = [
        *(_unit_steps(wraps, places, installed) if wants_units else ()),
        *(step for each in interpreters for step in _hook_steps(each, places, installed)),
    ]
    warnings = [
        f"{each.path} has no SGLang installed: the hook does nothing there until it has"
        for each in interpreters
        if each.sglang is None
    ]
    if request.wants_units is None and not wants_units:
        cause = "no systemd runs here" if os.geteuid() == 0 else "this user is not root"
        warnings.append(f"no units are installed: {cause}; --units installs them all the same")
    written = {str(s.path): digest(s.text) for s in steps if s.action in _WRITTEN}
    gone = {str(step.path) for step in steps if step.action is Action.REMOVE}
    return Plan(
        steps=tuple(steps),
        manifest_path=places.manifest_path,
        commands=tuple(commands_after_install(steps, places)),
        compiled=tuple((each.path, each.packages / hook.PACKAGE) for each in interpreters),
        warnings=(*warnings, *user_warnings(wraps, places), *unit_warnings(steps, places)),
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
        commands=tuple(commands_after_uninstall(steps, places)),
        warnings=tuple(unit_warnings(steps, places)),
        manifest={path: known for path, known in installed.items() if path in kept},
    )


def _wants_units(request: Request, places: Places) -> bool:
    if request.wants_units is not None:
        return request.wants_units
    return bool(request.wrapped_units) or (os.geteuid() == 0 and has_systemd(places.proc_root))


def _unit_steps(
    wraps: Sequence[wrapped.WrappedUnit], places: Places, installed: dict[str, str]
) -> Iterator[Step]:
    """Yield what units come to; the script that they all start with comes first."""
    if problem := problem_for("", places.python):
        raise HostError(
            f"servers could not be started under nccltune: {problem}; install nccltune with pip, "
            "as root, outside of home folders",
            code="no_programs",
        )
    paths = units.UnitPaths(
        find_program_dir(places), places.state_dir, places.start_path, places.python
    )

    def step(path: Path, text: str, shipped: str, **options: int) -> Step:
        return write_step(path, text, installed, is_ours=is_shipped_as(path, shipped), **options)

    shipped = shipped_unit(units.START_NAME, places)
    yield step(places.start_path, shipped, shipped, mode=PROGRAM_MODE)
    for name in units.UNIT_NAMES:
        shipped = shipped_unit(name, places)
        yield step(places.unit_dir / name, units.render_unit(shipped, paths), shipped)
    shipped = shipped_unit(wrapped.DROPIN_SOURCE, places)
    for unit in wraps:
        path = places.unit_dir / f"{unit.name}.d" / wrapped.DROPIN_NAME
        yield step(path, wrapped.dropin_text(unit, shipped, paths), shipped)


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
            str(path) in installed or is_shipped_as(path, shipped_unit(name, places))
        ):
            yield path
    shipped = shipped_unit(wrapped.DROPIN_SOURCE, places)
    for path in sorted(places.unit_dir.glob(f"*.d/{wrapped.DROPIN_NAME}")):
        if str(path) in installed or is_shipped_as(path, shipped):
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
