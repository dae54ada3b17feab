"""Every step from one active profile to the next, and what is written for it.

A launch reads the state at any moment, and the machine may die at any moment: each step is one
rename, of a file that is on disk, to a name whose folder is then written to disk.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import BusyError, FileError, NccltuneError, UsageProblem
from nccltune.inject.marker import settings_digest
from nccltune.paths import STATE_NAME, state_dir
from nccltune.profile import Profile, check_name, format_profile, parse_profile, source_doubt
from nccltune.store.files import (
    SUFFIX,
    Where,
    find_profile,
    is_shipped,
    is_there,
    load_named,
    profiles_dir,
)
from nccltune.store.lock import state_lock
from nccltune.store.reading import unreadable
from nccltune.store.state import (
    ActiveState,
    StateFile,
    empty_state,
    format_state,
    read_checked_state,
    read_state,
)

Reason = Literal["manual", "daemon", "search"]
Action = Literal["activate", "off", "rollback"]

_KEPT_NAME_CHARS = 55
_NEW_FOLDERS = 3  # profiles, the state folder, and the one that holds it


@dataclass(frozen=True, slots=True)
class Activation:
    """One step that was taken.

    Attributes:
        name: of the profile that is active now; None for none.
        previous: name of the one that a roll-back returns to.
        replaced: name of the one that was active before this step.
        path: the active profile's file; the state file where none is active.
        problem: what was wrong with what was there before, in one line; None if nothing was.
    """

    name: str | None
    previous: str | None
    replaced: str | None
    how: Reason
    action: Action
    activated_at: str
    path: Path
    problem: str | None = None


def activate(
    name: str, *, reason: Reason, is_any_host: bool = False, gpu_uuids: Collection[str] = ()
) -> Activation:
    """Make a profile the active one; a shipped one is copied into the state folder.

    Args:
        name: of a profile, never a file.
        reason: who does it.
        is_any_host: a person takes it whatever it was found on.
        gpu_uuids: of this host, whose launches are to get it for that reason.

    Raises:
        UsageProblem: no such name, or a profile that needs ``is_any_host``.
        FileError: the profile cannot be used, or the state folder cannot be written.
        BusyError: another step is being taken right now.
    """
    check_name(name)
    found = find_profile(name, is_own=True)
    doubt = source_doubt(found.profile.source)
    if doubt is not None and not is_any_host:
        raise UsageProblem(
            f"{name!r} was {doubt.words}; add --any-host to activate it all the same",
            code=doubt.code,
        )
    folder = state_dir()
    make_dir(profiles_dir(folder))
    with state_lock(folder):
        path = profiles_dir(folder) / f"{name}{SUFFIX}"
        if found.where is Where.SHIPPED:
            write_atomic(path, format_profile(found.profile))
        _sync(path)
        old, problem = _old_state(folder)
        previous = old["previous"] if old["active"] == name else old["active"]
        if is_any_host:
            # Others may share this folder, and have said the same of theirs.
            gpus = {*old["any_host"].get(name, ()), *gpu_uuids}
            old["any_host"][name] = sorted(gpus)
        return _write(folder, old, "activate", reason, (found.profile, previous), problem)


def deactivate(*, reason: Reason = "manual", expected: ActiveState | None = None) -> Activation:
    """Let launches start on SGLang's own defaults; a roll-back returns to what was active.

    Args:
        reason: who does it.
        expected: what has to be active still; None for whatever is.

    Raises:
        FileError: the state folder cannot be written.
        BusyError: another step is being taken right now, or was taken since ``expected``.
    """
    folder = state_dir()
    make_dir(folder)
    with state_lock(folder):
        old, problem = _old_state(folder)
        _check_unchanged(folder, old, expected)
        previous = old["previous"] if old["active"] is None else old["active"]
        return _write(folder, old, "off", reason, (None, previous), problem)


def rollback(*, reason: Reason = "manual", expected: ActiveState | None = None) -> Activation:
    """Return to what was active before, which may be nothing; a second roll-back undoes the first.

    Where the previous profile cannot be used any more, nothing is active after it: a profile that
    is rolled back must not stay.

    Args:
        reason: who does it.
        expected: what has to be active still; None for whatever is.

    Raises:
        UsageProblem: nothing is active and nothing was.
        FileError: the state cannot be read, or the state folder cannot be written.
        BusyError: another step is being taken right now, or was taken since ``expected``.
    """
    folder = state_dir()
    make_dir(folder)
    with state_lock(folder):
        old, warning = read_checked_state(folder)
        _check_unchanged(folder, old, expected)
        active, previous = old["active"], old["previous"]
        if active is None and previous is None:
            raise UsageProblem(
                "nothing to roll back: no profile is active, and none was before",
                code="nothing_to_roll_back",
            )
        profile, problem = None, warning or None
        if previous is not None:
            path = profiles_dir(folder) / f"{previous}{SUFFIX}"
            try:
                profile = load_named(path, Where.STATE)
                _sync(path)
            except NccltuneError as error:
                if active is None:
                    raise
                problem = str(error)
        return _write(folder, old, "rollback", reason, (profile, active), problem)


def save_candidate(profile: Profile) -> Path:
    """Keep a profile under its name in the state folder, in place of an older one of that name.

    An older one that is active, or that a roll-back returns to, is kept under another name and
    stays so: what launches get changes by ``activate`` alone.

    Raises:
        UsageProblem: the name is not one, or belongs to a shipped profile.
        FileError: the folder cannot be written, or the profile could not be read back.
        BusyError: another step is being taken right now.
    """
    check_name(profile.name)
    if is_shipped(profile.name):
        raise UsageProblem(
            f"{profile.name!r} is the name of a shipped profile; choose another", code="name_taken"
        )
    folder = state_dir()
    path = profiles_dir(folder) / f"{profile.name}{SUFFIX}"
    text = format_profile(profile)
    # What a later launch would refuse must not be kept.
    parse_profile(text, path)
    make_dir(path.parent)
    if not is_there(path):
        write_atomic(path, text)
        return path
    with state_lock(folder):
        _set_aside(folder, path, profile)
        write_atomic(path, text)
    return path


def _set_aside(folder: Path, path: Path, successor: Profile) -> None:
    """Give a profile that launches rely on another name before its own is taken over."""
    try:
        state = read_state(folder)
        old = load_named(path, Where.STATE)
    except NccltuneError:
        return  # nothing that a launch could use
    if old.name not in (state["active"], state["previous"]) or old.settings == successor.settings:
        return
    name = f"{old.name[:_KEPT_NAME_CHARS]}.{settings_digest(old.settings)[:8]}"
    kept = replace(old, name=name)
    write_atomic(profiles_dir(folder) / f"{name}{SUFFIX}", format_profile(kept))
    moved: StateFile = {
        **state,
        "any_host": {name if n == old.name else n: g for n, g in state["any_host"].items()},
        "active": name if state["active"] == old.name else state["active"],
        "previous": name if state["previous"] == old.name else state["previous"],
    }
    write_atomic(folder / STATE_NAME, format_state(moved))


def _check_unchanged(folder: Path, state: StateFile, expected: ActiveState | None) -> None:
    """Refuse a step for a reason that is none any more; asked under the lock.

    Raises:
        BusyError: another step was taken since.
    """
    if expected is None:
        return
    now = (state["active"], state["generation"], state["activated_at"])
    if now != (expected.name, expected.generation, expected.activated_at):
        raise BusyError(
            f"{folder}: another step was taken meanwhile, {state['active'] or 'no profile'} is "
            "active now; nothing was changed",
            code="store_changed",
        )


def _old_state(folder: Path) -> tuple[StateFile, str | None]:
    """Return the state before a step; what of it cannot be read ends with it, and is told."""
    try:
        state, warning = read_checked_state(folder)
    except FileError as error:
        return empty_state(), str(error)
    return state, warning or None


def _write(
    folder: Path,
    old: StateFile,
    action: Action,
    reason: Reason,
    profiles: tuple[Profile | None, str | None],
    problem: str | None,
) -> Activation:
    """Write the state: the profile that is active from now on, and the name of the one before."""
    profile, previous = profiles
    name = None if profile is None else profile.name
    path = folder / STATE_NAME
    state = StateFile(
        schema=old["schema"],
        active=name,
        previous=previous,
        activated_at=datetime.now(UTC).isoformat(timespec="seconds"),
        how=reason,
        action=action,
        any_host={n: gpus for n, gpus in old["any_host"].items() if n in (name, previous)},
        digest=None if profile is None else settings_digest(profile.settings),
        generation=old["generation"] + 1,
    )
    write_atomic(path, format_state(state))
    return Activation(
        name=name,
        previous=previous,
        replaced=old["active"],
        how=reason,
        action=action,
        activated_at=state["activated_at"],
        path=path if name is None else profiles_dir(folder) / f"{name}{SUFFIX}",
        problem=problem,
    )


def _sync(path: Path) -> None:
    """Force a profile to disk, and the folders that lead to it, before the state names it.

    Somebody may have copied it into place, and the folders may be new.
    """
    try:
        for place in (path, *path.parents[:_NEW_FOLDERS]):
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Some network and FUSE file systems cannot sync a folder.
                with suppress(OSError):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise unreadable(path, error) from None
