"""Which launches are given the active profile: ``policy.json`` in the state folder.

Schema history of ``nccltune.policy``:
    1: first version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nccltune.jsontext import parse_json
from nccltune.paths import reading_dir
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
        folder: the state folder; the one that launches of this user read if None.

    Raises:
        FileError: the file is there and cannot be used.
    """
    path = (reading_dir() if folder is None else folder) / POLICY_NAME
    text = read_optional_text(path)
    if text is None:
        return Policy()
    document = parse_json(text, path)
    data = document.as_object(SCHEMA, "a policy")
    document.check_keys(data, ("schema", "launches"))
    launches = data.get("launches", Launches.EAGLE3)
    if launches not in list(Launches):
        known = ", ".join(f'"{each}"' for each in Launches)
        raise document.problem(f"launches is one of {known}", "launches")
    return Policy(Launches(launches))
