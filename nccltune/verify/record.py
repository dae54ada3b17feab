"""Verifies on disk: one file each, rewritten whole after every boot: a kill loses one boot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import FileError
from nccltune.jsontext import parse_json
from nccltune.paths import state_dir
from nccltune.store.reading import json_files, read_text
from nccltune.verify.boot_data import DAMAGE
from nccltune.verify.record_data import SCHEMA, record_from_json, record_to_json
from nccltune.verify.record_data import Problem as Problem
from nccltune.verify.record_data import VerifyRecord as VerifyRecord
from nccltune.verify.sameness import visible

_SUFFIX = ".json"
_MAX_BYTES = 256 << 20


def verifies_dir(folder: Path | None = None) -> Path:
    """Return the folder of the verifies.

    Args:
        folder: the state folder; this user's if None.
    """
    return (state_dir() if folder is None else folder) / "verifies"


def logs_dir(record_id: str, folder: Path | None = None) -> Path:
    """Return where the output of a verify's servers is kept, as long as they are of use."""
    return verifies_dir(folder) / f"{record_id}.logs"


def save(record: VerifyRecord, folder: Path | None = None) -> Path:
    """Write a verify, in the place of what was there of it.

    Raises:
        FileError: the folder cannot be written, or the disk is full.
    """
    path = verifies_dir(folder) / f"{record.id}{_SUFFIX}"
    make_dir(path.parent)
    data: object = record_to_json(record)
    try:
        text = _dump(data)
        text.encode("utf-8")
    except UnicodeEncodeError:  # of the server's answers or of the command line
        text = _dump(_visible(data))
    write_atomic(path, f"{text}\n")
    return path


def load(path: Path) -> VerifyRecord:
    """Read a verify.

    Raises:
        FileError: it is missing, cut short, of another version, or otherwise damaged.
    """
    document = parse_json(read_text(path, check_owner=False, max_bytes=_MAX_BYTES), path)
    data = document.data
    if not isinstance(data, dict):
        raise document.problem("a verify is an object in {}")
    if data.get("schema") != SCHEMA:
        found = json.dumps(data.get("schema"))[:80]
        reason = f'schema {found}, and this version reads "{SCHEMA}" only'
        raise document.problem(reason, "schema", code="unknown_schema")
    try:
        return record_from_json(data, path)
    except DAMAGE as error:
        reason = f"is damaged ({type(error).__name__}: {error}); move it away"
        raise FileError(path, reason, code="damaged_verify") from error


def record_paths(folder: Path | None = None) -> list[Path]:
    """Return the files of all verifies, the newest first; their names begin with the time.

    Raises:
        FileError: the folder, or the state folder, is none or cannot be read.
    """
    return json_files(verifies_dir(folder))[::-1]


def newest_records(
    folder: Path | None = None, *, limit: int | None = None
) -> Iterator[VerifyRecord]:
    """Read verifies one by one as they are asked for, the newest first; damaged are left out.

    Args:
        folder: the state folder; this user's if None.
        limit: files to look at, at most.

    Raises:
        FileError: as ``record_paths``.
    """
    return _readable(record_paths(folder)[:limit])


def _readable(paths: Iterable[Path]) -> Iterator[VerifyRecord]:
    for path in paths:
        with suppress(FileError):
            yield load(path)


def _dump(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _visible(data: object) -> object:
    """Copy JSON values, and escape what is no text in them."""
    if isinstance(data, str):
        return visible(data)
    if isinstance(data, Mapping):
        return {visible(str(key)): _visible(value) for key, value in data.items()}
    return [_visible(value) for value in data] if isinstance(data, list | tuple) else data
