"""Which launches are given the active profile: ``policy.json`` in the state folder.

Schema history of ``nccltune.policy``:
    1: first version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nccltune.jsontext import parse_json
from nccltune.paths import state_dir
from nccltune.store.reading import read_optional_text

SCHEMA = "nccltune.policy/1"
POLICY_NAME = "policy.json"


class Launches(StrEnum):
    """Which SGLang launches a policy covers."""

    EAGLE3 = "eagle3"
    SPECULATIVE = "speculative"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Policy:
    """What is given the active profile without being asked for each time."""

    launches: Launches = Launches.EAGLE3


def read_policy(folder: Path | None = None) -> Policy:
    """Read the policy; without a file EAGLE-3 launches get the profile.

    Args:
        folder: the state folder; this user's if None.

    Raises:
        FileError: the file is there and cannot be used.
    """
    path = (state_dir() if folder is None else folder) / POLICY_NAME
    text = read_optional_text(path)
    if text is None:
        return Policy()
    document = parse_json(text, path)
    data = document.data
    if not isinstance(data, dict):
        raise document.problem("a policy is an object in {}")
    if data.get("schema") != SCHEMA:
        found = json.dumps(data.get("schema"))[:80]
        reason = f'schema {found}, and this version reads "{SCHEMA}" only'
        raise document.problem(reason, "schema", code="unknown_schema")
    document.check_keys(data, ("schema", "launches"))
    launches = data.get("launches", Launches.EAGLE3)
    if launches not in list(Launches):
        known = ", ".join(f'"{each}"' for each in Launches)
        raise document.problem(f"launches is one of {known}", "launches")
    return Policy(Launches(launches))
