"""Which profiles are verified: evidence beside the profile, worth something for its settings alone.

Schema history of ``nccltune.verified``:
    1: first version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import NccltuneError, UsageProblem
from nccltune.inject.marker import settings_digest
from nccltune.jsontext import parse_json
from nccltune.paths import state_dir
from nccltune.profile import Profile, check_name
from nccltune.store.files import SUFFIX, Where, find_profile
from nccltune.store.reading import read_optional_text

if TYPE_CHECKING:
    from nccltune.store.state import ActiveState

SCHEMA = "nccltune.verified/1"


class Standing(StrEnum):
    """How far a profile has come."""

    FILE = "file"
    SHIPPED = "shipped"
    CANDIDATE = "candidate"
    VERIFIED = "verified"
    ACTIVE = "active"


def mark_verified(name: str, evidence: Mapping[str, object]) -> Path:
    """Keep the evidence that a profile of the state folder does good.

    Args:
        name: of the profile.
        evidence: what was measured, as JSON can hold it.

    Raises:
        UsageProblem: no such profile in the state folder.
        FileError: the profile cannot be used, or the evidence cannot be written.
    """
    check_name(name)
    found = find_profile(name, is_own=True)
    if found.where is not Where.STATE:
        raise UsageProblem(
            f"{name!r} is shipped, and evidence belongs to a profile of this host; import it under "
            "a name of your own",
            code="not_of_this_host",
        )
    document = {
        "schema": SCHEMA,
        "digest": settings_digest(found.profile.settings),
        "verified_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "evidence": dict(evidence),
    }
    path = _path(name)
    make_dir(path.parent)
    write_atomic(path, json.dumps(document, indent=2, allow_nan=False) + "\n")
    return path


def read_evidence(profile: Profile) -> Mapping[str, object] | None:
    """Return what verified these settings; None where nothing did, or it cannot be read."""
    path = _path(profile.name)
    try:
        text = read_optional_text(path)
        data = None if text is None else parse_json(text, path).data
    except NccltuneError:
        return None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return None
    evidence = data.get("evidence")
    is_same = data.get("digest") == settings_digest(profile.settings)
    return evidence if is_same and isinstance(evidence, dict) else None


def standing_of(profile: Profile, where: Where, active: ActiveState) -> Standing:
    """Say how far a profile has come, from the files alone."""
    if where is Where.FILE:
        return Standing.FILE
    if where is Where.SHIPPED:
        return Standing.SHIPPED
    if profile.name == active.name:
        return Standing.ACTIVE
    is_verified = read_evidence(profile) is not None
    return Standing.VERIFIED if is_verified else Standing.CANDIDATE


def _path(name: str) -> Path:
    return state_dir() / "verified" / f"{name}{SUFFIX}"
