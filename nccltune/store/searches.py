"""Answers of searches that are over, one file each, whatever the answer was.

A winner is a profile too; "the defaults are best" leaves nothing but this.

Schema history of ``nccltune.search``:
    1: first version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import FileError, NccltuneError
from nccltune.jsontext import parse_json
from nccltune.paths import state_dir
from nccltune.store.reading import json_files, read_text

SCHEMA = "nccltune.search/1"


def keep_search(name: str, ended_at: datetime, answer: Mapping[str, object]) -> Path:
    """Keep the answer of one search.

    Args:
        name: of the profile that it was about.
        ended_at: with its time zone.
        answer: what ``nccltune search --json`` says, as JSON can hold it.

    Raises:
        FileError: it cannot be written.
    """
    document = {
        "schema": SCHEMA,
        "name": name,
        "ended_at": ended_at.isoformat(timespec="seconds"),
        "answer": dict(answer),
    }
    path = _folder() / f"{ended_at:%Y%m%dT%H%M%S.%f}-{name}.json"
    make_dir(path.parent)
    write_atomic(path, json.dumps(document, allow_nan=False) + "\n")
    return path


def count_searches() -> int:
    """Return how many answers are kept, unread."""
    with suppress(FileError):
        return len(json_files(_folder()))
    return 0


def read_searches(last: int | None = None) -> tuple[list[Mapping[str, object]], list[str]]:
    """Return what was kept, oldest first, and a line about each file that cannot be read.

    Args:
        last: so many of them, the newest; None for all.
    """
    found: list[Mapping[str, object]] = []
    problems: list[str] = []
    try:
        paths = json_files(_folder())
    except FileError as error:
        return [], [str(error)]
    for path in reversed(paths):
        if len(found) == last:
            break
        try:
            data = parse_json(read_text(path), path).data
        except NccltuneError as error:
            problems.append(str(error))
            continue
        if isinstance(data, dict) and data.get("schema") == SCHEMA:
            found.append(data)
        else:
            problems.append(f"{path}: is not of schema {SCHEMA}; left out")
    return found[::-1], problems[::-1]


def _folder() -> Path:
    return state_dir() / "searches"
