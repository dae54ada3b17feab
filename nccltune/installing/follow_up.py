"""What the operator is told beside the steps: commands to run, and what to know before."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from nccltune.doctor.containers import find_gpu_containers, has_device_links
from nccltune.errors import FileError, HostError
from nccltune.installing import units, wrapped
from nccltune.installing.places import (
    UNIT_FOLDERS,
    Places,
    find_program_dir,
    is_shipped_as,
    shipped_unit,
)
from nccltune.installing.start_check import problem_for
from nccltune.installing.steps import Action, Step

SERVICE = "nccltuned.service"


def _changed_units(steps: list[Step], places: Places) -> list[Step]:
    return [s for s in steps if s.is_change and s.path.is_relative_to(places.unit_dir)]


def _needs_reload(steps: list[Step], places: Places) -> bool:
    """Whether systemd may know another version: a unit that is new it reads by itself."""
    return any(
        step.action is not Action.CREATE or step.path.name == wrapped.DROPIN_NAME
        for step in _changed_units(steps, places)
    )


def commands_after_install(steps: list[Step], places: Places) -> Iterator[str]:
    """Yield what puts installed units into effect."""
    if not _changed_units(steps, places):
        return
    if _needs_reload(steps, places):
        yield "systemctl daemon-reload"
    # Plain "enable" would reload systemd behind the operator's back.
    yield f"systemctl enable --no-reload {SERVICE}"
    yield f"systemctl restart {SERVICE}"


def commands_after_uninstall(steps: list[Step], places: Places) -> Iterator[str]:
    """Yield what is left to do when units are gone."""
    changed = [step.path.name for step in _changed_units(steps, places)]
    if SERVICE in changed:
        yield f"systemctl stop {SERVICE}"
    if changed:
        yield "systemctl daemon-reload"
    # Until then systemd starts servers by it, so that it is no step of ours.
    if _is_start_ours(places) and not any(step.action is Action.KEEP for step in steps):
        yield f"rm {shlex.quote(str(places.start_path))}"


def unit_warnings(steps: list[Step], places: Places) -> Iterator[str]:
    """Warn of what a change of units may cost."""
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
        owner = find_program_dir(places).stat().st_uid
    except (HostError, FileError, OSError):
        return
    if owner != 0 and places.unit_dir == UNIT_FOLDERS[0]:
        yield f"the units start programs of user {owner} as root; install nccltune as root instead"


def user_warnings(wraps: Sequence[wrapped.WrappedUnit], places: Places) -> Iterator[str]:
    """Warn of servers that will start without nccltune, because their user cannot run it."""
    for unit in wraps:
        if unit.user and (problem := problem_for(unit.user, places.python)):
            yield (
                f"{unit.name} runs as {unit.user}, who cannot run nccltune ({problem}): it will "
                "start WITHOUT the profile; install nccltune where every user may read it, such as "
                "/opt/nccltune"
            )


def _is_start_ours(places: Places) -> bool:
    return is_shipped_as(places.start_path, shipped_unit(units.START_NAME, places))
