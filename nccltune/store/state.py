"""Which profile is active: the state file, read by every launch.

Schema history of ``nccltune.state``:
    1: first version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from nccltune.errors import NccltuneError, UsageProblem
from nccltune.jsontext import JsonText, parse_json
from nccltune.paths import state_dir
from nccltune.profile import Profile, check_name
from nccltune.store.files import SUFFIX, Where, load_named, profiles_dir
from nccltune.store.reading import read_optional_text

SCHEMA = "nccltune.state/1"
STATE_NAME = "state.json"


class StateFile(TypedDict):
    """The document on disk, keys in this order."""

    schema: str
    active: str | None
    previous: str | None
    activated_at: str
    how: str
    action: str


@dataclass(frozen=True, slots=True)
class ActiveState:
    """What the store says to a launch; a broken store says so in ``problem``, and never raises.

    Attributes:
        profile: the active profile; None where there is none, or where it cannot be used.
        name: of the active profile, also where its file cannot be used; None for none.
        problem: why there is no usable profile although there should be one, in one line.
        path: the profile's file; the state file where no profile is named.
        previous: name of the one that a roll-back returns to.
        how: who took the last step: ``manual``, ``daemon`` or ``search``; empty if unknown.
        action: what that step was: ``activate``, ``off`` or ``rollback``; empty if unknown.
        activated_at: ISO 8601, UTC; empty if unknown.
    """

    profile: Profile | None
    name: str | None
    problem: str | None
    path: Path
    previous: str | None = None
    source: str = "store"
    how: str = ""
    action: str = ""
    activated_at: str = ""


def read_active(folder: Path | None = None) -> ActiveState:
    """Read which profile is active, and the profile.

    Args:
        folder: the state folder; this user's if None.
    """
    path = Path(STATE_NAME)
    try:
        base = state_dir() if folder is None else folder
        path = base / STATE_NAME
        state = read_state(base)
    except (NccltuneError, OSError) as error:
        return ActiveState(None, None, str(error), path)
    name = state["active"]
    profile: Profile | None = None
    problem: str | None = None
    if name is not None:
        path = profiles_dir(base) / f"{name}{SUFFIX}"
        try:
            profile = load_named(path, Where.STATE)
        except (NccltuneError, OSError) as error:
            problem = str(error)
    return ActiveState(
        profile=profile,
        name=name,
        problem=problem,
        path=path,
        previous=state["previous"],
        how=state["how"],
        action=state["action"],
        activated_at=state["activated_at"],
    )


def read_state(folder: Path) -> StateFile:
    """Read the state file; without one nothing is active.

    Raises:
        FileError: it is there and cannot be used.
    """
    path = folder / STATE_NAME
    text = read_optional_text(path)
    if text is None:
        return empty_state()
    document = parse_json(text, path)
    data = document.data
    if not isinstance(data, dict):
        raise document.problem("the state is an object in {}")
    if data.get("schema") != SCHEMA:
        found = json.dumps(data.get("schema"))[:80]
        reason = f'schema {found}, and this version reads "{SCHEMA}" only'
        raise document.problem(reason, "schema", code="unknown_schema")
    # Keys of a later version are left alone: a launch should not lose its profile over one.
    return StateFile(
        schema=SCHEMA,
        active=_name(document, data, "active"),
        previous=_name(document, data, "previous"),
        activated_at=_text(data, "activated_at"),
        how=_text(data, "how"),
        action=_text(data, "action"),
    )


def empty_state() -> StateFile:
    """Return the state of a host where nothing was ever activated."""
    return StateFile(schema=SCHEMA, active=None, previous=None, activated_at="", how="", action="")


def format_state(state: StateFile) -> str:
    """Return the text of the state file."""
    return json.dumps(state, indent=2) + "\n"


def _name(document: JsonText, data: dict[str, object], key: str) -> str | None:
    value = data.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise document.problem(f"{key} has to be a profile name in quotes, or null", key)
    try:
        check_name(value)
    except UsageProblem as problem:
        raise document.problem(str(problem), key, code=problem.code) from None
    return value


def _text(data: dict[str, object], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""
