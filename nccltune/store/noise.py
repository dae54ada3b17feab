"""How much this host varies from one launch to the next, kept so that later decisions know it.

A few launches say little of their own spread. What earlier ones said of the same thing on the same
host is the least spread that a later decision assumes.

Schema history of ``nccltune.noise``:
    1: first version.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import NccltuneError
from nccltune.jsontext import parse_json
from nccltune.paths import state_dir
from nccltune.store.lock import state_lock
from nccltune.store.reading import read_optional_text

SCHEMA = "nccltune.noise/1"
NOISE_NAME = "noise.json"
MAX_ENTRIES_OF_ONE = 20
"""A host changes: only the newest findings of one kind count."""
MAX_ENTRIES = 400
_KEY_CHARS = 16


class Sample(StrEnum):
    """What varies."""

    LAUNCH = "launch"
    """The score of a launch of all ranks, in log."""
    BOOT = "boot"
    """The time of a decode step over starts of one server, in log."""


def noise_key(sample: Sample, facts: Mapping[str, object]) -> str:
    """Name what was repeated: same facts, same noise.

    Args:
        sample: what an independent sample is.
        facts: what it depends on, as JSON can hold it: host, transport, payloads, flags.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{sample}:{hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARS]}"


def keep_noise(key: str, sd: float, df: int) -> None:
    """Keep what repeats of one thing said of its spread.

    Args:
        key: of ``noise_key``.
        sd: standard deviation of one sample, in log.
        df: degrees of freedom it rests on.

    Raises:
        NccltuneError: the state folder cannot be written.
        ValueError: there is no such spread.
    """
    if not (math.isfinite(sd) and sd >= 0.0 and df > 0):
        raise ValueError(f"no spread: sd {sd}, {df} degrees of freedom")
    folder = state_dir()
    make_dir(folder)
    entry = {
        "key": key,
        "sd": sd,
        "df": df,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with state_lock(folder):
        entries = [*_read(folder), entry][-MAX_ENTRIES:]
        text = json.dumps({"schema": SCHEMA, "entries": entries}, indent=1, allow_nan=False)
        write_atomic(folder / NOISE_NAME, text + "\n")


def kept_noise(key: str) -> float | None:
    """Return the usual spread of earlier decisions; None where nothing is known.

    The median, weighted by degrees of freedom: one of them on a disturbed host must not stand in
    the way of those that follow. A file that cannot be used is one that says nothing: a decision
    goes on without it.
    """
    found = [each for each in _read(state_dir()) if each["key"] == key][-MAX_ENTRIES_OF_ONE:]
    spreads = sorted((float(str(each["sd"])), int(str(each["df"]))) for each in found)
    weight = sum(df for _sd, df in spreads)
    below = 0
    for sd, df in spreads:
        below += df
        if 2 * below >= weight:
            return sd
    return None


def _read(folder: Path) -> Sequence[Mapping[str, object]]:
    path = folder / NOISE_NAME
    try:
        text = read_optional_text(path)
        data = None if text is None else parse_json(text, path).data
    except NccltuneError:
        return ()
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return ()
    entries = data.get("entries")
    return [each for each in entries if _is_entry(each)] if isinstance(entries, list) else ()


def _is_entry(each: object) -> bool:
    if not isinstance(each, dict) or not isinstance(each.get("key"), str):
        return False
    sd, df = each.get("sd"), each.get("df")
    if not isinstance(sd, int | float) or isinstance(sd, bool) or not isinstance(df, int):
        return False
    return math.isfinite(sd) and sd >= 0.0 and not isinstance(df, bool) and df > 0
