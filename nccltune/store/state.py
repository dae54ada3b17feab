"""Which profile is active: the state file, read by every launch.

Schema history of ``nccltune.state``:
    1: first version. Came later, and may be missing: ``any_host``, by profile the GPUs of the host
        where a person has said that launches get it whatever it was made on; ``digest``, of the
        active profile's settings as they were checked then, for readers that check less;
        ``generation``, which counts the steps, whatever the clock does.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from nccltune.errors import FileError, NccltuneError, UsageProblem
from nccltune.jsontext import JsonText, parse_json
from nccltune.paths import STATE_NAME, reading_dir
from nccltune.profile import Profile, check_name
from nccltune.store.files import SUFFIX, Where, load_named, profiles_dir
from nccltune.store.reading import read_optional_text

SCHEMA = "nccltune.state/1"


class StateFile(TypedDict):
    """The document on disk, keys in this order."""

    schema: str
    active: str | None
    previous: str | None
    activated_at: str
    how: str
    action: str
    any_host: dict[str, list[str]]
    digest: str | None
    generation: int


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
        generation: number of the step that made it active; 0 if unknown.
        any_host_gpus: UUIDs of the GPUs for which a person has activated it with ``--any-host``.
        warning: what else is wrong with the store, and costs no launch its profile; often empty.
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
    generation: int = 0
    any_host_gpus: tuple[str, ...] = ()
    warning: str = ""

    def is_insisted_on(self, gpu_uuids: Collection[str]) -> bool:
        """Tell whether a person has said, here, that these GPUs' launches get it all the same."""
        return bool(gpu_uuids) and set(gpu_uuids) <= set(self.any_host_gpus)


def read_active(folder: Path | None = None) -> ActiveState:
    """Read which profile is active, and the profile.

    Args:
        folder: the state folder; the one that launches of this user read if None.
    """
    path = Path(STATE_NAME)
    try:
        base = reading_dir() if folder is None else folder
        path = base / STATE_NAME
        state, warning = read_checked_state(base)
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
        generation=state["generation"],
        any_host_gpus=tuple(state["any_host"].get(name or "", ())),
        warning=warning,
    )


def read_state(folder: Path) -> StateFile:
    """Read the state file; without one nothing is active.

    Raises:
        FileError: it is there and cannot be used.
    """
    return read_checked_state(folder)[0]


def read_checked_state(folder: Path) -> tuple[StateFile, str]:
    """Read the state file, and what is wrong with parts of it that no launch needs.

    Raises:
        FileError: as for ``read_state``.
    """
    path = folder / STATE_NAME
    text = read_optional_text(path)
    if text is None:
        return empty_state(), ""
    document = parse_json(text, path)
    data = document.as_object(SCHEMA, "the state")
    try:
        previous, warning = _name(document, data, "previous"), ""
    except FileError as error:
        previous, warning = None, f"there is no profile to roll back to: {error}"
    # Keys of a later version are left alone: a launch should not lose its profile over one.
    state = StateFile(
        schema=SCHEMA,
        active=_name(document, data, "active"),
        previous=previous,
        activated_at=_text(data, "activated_at"),
        how=_text(data, "how"),
        action=_text(data, "action"),
        any_host=_gpus_by_profile(data.get("any_host")),
        digest=_text(data, "digest") or None,
        generation=_count(data, "generation"),
    )
    return state, warning


def empty_state() -> StateFile:
    """Return the state of a host where nothing was ever activated."""
    return StateFile(
        schema=SCHEMA,
        active=None,
        previous=None,
        activated_at="",
        how="",
        action="",
        any_host={},
        digest=None,
        generation=0,
    )


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


def _count(data: dict[str, object], key: str) -> int:
    value = data.get(key)
    return value if type(value) is int and value >= 0 else 0


def _gpus_by_profile(value: object) -> dict[str, list[str]]:
    """Read what costs no launch its profile where it makes no sense: nobody has insisted then."""
    if not isinstance(value, dict):
        return {}
    return {
        name: [each for each in gpus if isinstance(each, str)]
        for name, gpus in value.items()
        if isinstance(gpus, list)
    }
