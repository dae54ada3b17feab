"""The profile file: named settings, where they come from and where they hold.

Pure: text in, ``Profile`` out, and back. Files are read and written by ``store``.

Schema history of ``nccltune.profile``:
    1: first version. ``bands`` is there for byte ranges of a tuner plugin, and must be empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, NoReturn, TypedDict

from nccltune.envvars import check_setting, find_conflict
from nccltune.errors import UsageProblem
from nccltune.jsontext import JsonText, parse_json

SCHEMA = "nccltune.profile/1"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NAME_RULE = (
    "a name has 1 to 64 of a-z, 0-9, dot, underscore and hyphen, begins with a letter or digit, "
    "and does not end in .json"
)
_KEYS = (
    "schema",
    "name",
    "note",
    "source",
    "created_at",
    "settings",
    "fingerprint",
    "measured",
    "bands",
)


SHARED_SOURCE = "shared-gpu"
"""``source`` of what was found with all ranks on one GPU."""

_RECORDING_SOURCE = "recording"
_MAX_SHOWN_CHARS = 60


class Doubt(NamedTuple):
    """Why settings were never seen to help a real launch.

    Attributes:
        code: for scripts.
        words: go on after "it was".
    """

    code: str
    words: str


def source_doubt(source: str) -> Doubt | None:
    """Tell whether settings of this source may only be activated by a person who insists.

    >>> source_doubt("recording:h200-2x-shm").words
    'found in the recording h200-2x-shm of other GPUs, not measured on this host'
    >>> source_doubt("gpus")
    """
    if source == SHARED_SOURCE:
        return Doubt("shared_source", "found with all ranks on one GPU, where times mean nothing")
    kind, _, name = source.partition(":")
    if kind == _RECORDING_SOURCE:
        where = f"found in the recording {harmless(name)} of other GPUs"
        return Doubt("recorded_source", f"{where}, not measured on this host")
    return None


def harmless(text: str) -> str:
    """Keep what can do no harm in a line of any file: no line break, nothing that joins lines."""
    return re.sub(r"[^A-Za-z0-9 ._:/+-]+", "?", text[:_MAX_SHOWN_CHARS]).strip() or "?"


class ProfileFile(TypedDict):
    """The document on disk, keys in this order."""

    schema: str
    name: str
    note: str
    source: str
    created_at: str | None
    settings: dict[str, str]
    fingerprint: dict[str, object] | None
    measured: dict[str, object]
    bands: list[object]


@dataclass(frozen=True, slots=True)
class Profile:
    """Named settings.

    Attributes:
        name: also the name of its file.
        settings: NCCL variable -> value; empty for SGLang's own defaults.
        note: for people: origin, and what to expect of it.
        source: where the settings were found: ``gpus``, ``shared-gpu``, ``recording:NAME``,
            ``shipped``; empty if nobody said.
        created_at: moment of the finding, with its time zone; None if unknown.
        fingerprint: facts of the host that it holds for; None for no particular host.
        measured: what was measured, as the search reported it.
        bands: byte ranges for a tuner plugin; always empty so far.
    """

    name: str
    settings: Mapping[str, str]
    note: str = ""
    source: str = ""
    created_at: datetime | None = None
    fingerprint: Mapping[str, object] | None = None
    measured: Mapping[str, object] = field(default_factory=dict)
    bands: tuple[()] = ()

    def __post_init__(self) -> None:
        if self.created_at is not None and self.created_at.tzinfo is None:
            raise ValueError(f"created_at={self.created_at}: needs a time zone")


def check_name(name: str) -> None:
    """Refuse a name that could be taken for a path or a file.

    Raises:
        UsageProblem: ``bad_name``.
    """
    if not _NAME.fullmatch(name) or name.endswith(".json"):
        shown = name if len(name) <= 80 else f"{name[:80]}..."
        raise UsageProblem(f"{shown!r} is no profile name: {_NAME_RULE}", code="bad_name")


def format_profile(profile: Profile) -> str:
    """Return the text of the file: the same profile always gives the same text."""
    created_at = profile.created_at
    document: ProfileFile = {
        "schema": SCHEMA,
        "name": profile.name,
        "note": profile.note,
        "source": profile.source,
        "created_at": created_at.astimezone(UTC).isoformat() if created_at else None,
        "settings": dict(sorted(profile.settings.items())),
        "fingerprint": None if profile.fingerprint is None else dict(profile.fingerprint),
        "measured": dict(profile.measured),
        "bands": list(profile.bands),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def parse_profile(text: str, path: Path) -> Profile:
    """Read a profile, strictly; only schema, name and settings have to be there.

    Raises:
        FileError: with the line and its text: not JSON or cut short, another schema, a key twice
            or unknown, a value that is no string, a variable that is not ours to set, a value
            that NCCL would change or misread.
    """
    document = parse_json(text, path)
    data = document.as_object(SCHEMA, "a profile")
    document.check_keys(data, _KEYS)
    name = _text(document, data, "name", is_required=True)
    try:
        check_name(name)
    except UsageProblem as problem:
        raise document.problem(str(problem), "name", code=problem.code) from None
    _check_bands(document, data)
    return Profile(
        name=name,
        settings=_settings(document, data),
        note=_text(document, data, "note"),
        source=_text(document, data, "source"),
        created_at=_moment(document, data),
        fingerprint=_mapping(document, data, "fingerprint"),
        measured=_mapping(document, data, "measured") or {},
    )


def _text(
    document: JsonText, data: Mapping[str, object], key: str, *, is_required: bool = False
) -> str:
    value = data.get(key)
    if value is None and key not in data and not is_required:
        return ""
    if not isinstance(value, str):
        reason = f"{key} has to be text in quotes" if key in data else f"{key} is missing"
        raise document.problem(reason, key)
    return value


def _moment(document: JsonText, data: Mapping[str, object]) -> datetime | None:
    value = data.get("created_at")
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        reason = "created_at has to be a moment such as 2026-11-29T12:00:00+00:00, or null"
        raise document.problem(reason, "created_at")
    return moment.astimezone(UTC)


def _mapping(document: JsonText, data: Mapping[str, object], key: str) -> dict[str, object] | None:
    value = data.get(key)
    if value is not None and not isinstance(value, dict):
        raise document.problem(f"{key} has to be an object in {{}}", key)
    return value


def _check_bands(document: JsonText, data: Mapping[str, object]) -> None:
    bands = data.get("bands", [])
    if bands == []:
        return
    if not isinstance(bands, list):
        raise document.problem("bands has to be a list in []", "bands")
    raise document.problem(
        "bands need a tuner plugin, which this version does not have; leave the list empty",
        "bands",
        code="bands_unsupported",
    )


def _settings(document: JsonText, data: Mapping[str, object]) -> dict[str, str]:
    entries = data.get("settings")
    if not isinstance(entries, dict):
        reason = (
            "settings has to be an object in {}" if "settings" in data else "settings is missing"
        )
        raise document.problem(reason, "settings")
    settings: dict[str, str] = {}
    for name, value in entries.items():
        if not isinstance(value, str):
            _refuse_value(document, name, value)
        try:
            check_setting(name, value)
        except UsageProblem as problem:
            raise document.problem(str(problem), "settings", name, code=problem.code) from None
        settings[name] = value
    conflict = find_conflict(settings)
    if conflict is not None:
        name, reason = conflict
        raise document.problem(f"{name}: {reason}", "settings", name, code="conflict")
    return settings


def _refuse_value(document: JsonText, name: str, value: object) -> NoReturn:
    shown = json.dumps(value)[:60]
    if isinstance(value, bool):
        advice = f'write "{int(value)}" if the variable is a switch'
    elif isinstance(value, int | float):
        advice = f'write "{shown}"'
    elif value is None:
        advice = "leave the variable out for NCCL's default"
    else:
        advice = "write one text in quotes"
    reason = f"{name}: {shown} is not in quotes, and environment values are text; {advice}"
    raise document.problem(reason, "settings", name, code="bad_value")
