"""Records of launches: who was started under which profile, one line of JSON each.

Many processes write at once and any may die in the middle of a line: each record is one write to
the end of the file, after a line break where the last line lacks one. Two files bound the size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from nccltune.errors import FileError
from nccltune.paths import state_dir
from nccltune.store.reading import read_bytes, unreadable

LAUNCHES_NAME = "launches.jsonl"
OLDER_NAME = "launches.1.jsonl"
MAX_FILE_BYTES = 512 * 1024
"""The newer file becomes the older one, in the place of that, when it is larger than this."""

_MAX_READ_BYTES = 16 * MAX_FILE_BYTES
_MAX_LINE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch, as the route that started it saw it.

    Process id, its start and the boot name one process for ever: ``run`` replaces itself with the
    server, so they are the server's own.

    Attributes:
        route: ``run``, ``launch`` or ``hook``.
        started_ticks: field 22 of ``/proc/PID/stat``, clock ticks since boot.
        boot_id: of ``/proc/sys/kernel/random/boot_id``.
        launched_at: ISO 8601, UTC.
        command_digest: equal for equal SGLang arguments, whatever stands before them.
        profile_name: of the profile that was applied; None for none.
        digest: of that profile's settings; None for none.
        settings: what was set from it.
        kept: variables of the profile that the operator had set otherwise, with the operator's
            values.
        reason: why the profile was applied, or why none was.
        is_degraded: a profile was meant for this launch and could not be used.
        invocation_id: of the systemd unit's run; empty outside one.
    """

    route: str
    pid: int
    started_ticks: int
    boot_id: str
    launched_at: str
    command_digest: str
    profile_name: str | None
    digest: str | None
    settings: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    is_degraded: bool = False
    invocation_id: str = ""


def append_launch_record(record: LaunchRecord, folder: Path | None = None) -> None:
    """Write one record and have it on disk before returning.

    Args:
        record: the launch.
        folder: the state folder; this user's if None.

    Raises:
        FileError: the folder cannot be written, or the disk is full.
    """
    base = state_dir() if folder is None else folder
    path = base / LAUNCHES_NAME
    try:
        base.mkdir(parents=True, exist_ok=True)
        _append(path, _format(record))
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise FileError(path, f"cannot be written ({cause})", code="cannot_write") from None


def read_launch_records(folder: Path | None = None) -> tuple[LaunchRecord, ...]:
    """Read the records that are there, the oldest first; lines that make no sense are left out.

    Raises:
        FileError: a file is there and cannot be read.
    """
    base = state_dir() if folder is None else folder
    return tuple(_records(base / OLDER_NAME)) + tuple(_records(base / LAUNCHES_NAME))


def _append(path: Path, line: bytes) -> None:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_FILE_BYTES:
            # Whoever holds it open goes on writing into the older file, which is read too.
            path.replace(path.with_name(OLDER_NAME))
            os.close(descriptor)
            descriptor = os.open(path, flags, 0o644)
            size = 0
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if is_torn else line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _format(record: LaunchRecord) -> bytes:
    line = _line(asdict(record))
    if len(line) > _MAX_LINE_BYTES:
        # An operator's value may be as long as the kernel allows; its name is what matters.
        short = {name: value[:60] for name, value in record.kept.items()}
        line = _line(asdict(record) | {"kept": short, "reason": record.reason[:500]})
    return line


def _line(data: Mapping[str, object]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _records(path: Path) -> Iterator[LaunchRecord]:
    try:
        content = read_bytes(path, check_owner=False, max_bytes=_MAX_READ_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from None
    for line in content.split(b"\n"):
        record = _parse(line)
        if record is not None:
            yield record


def _parse(line: bytes) -> LaunchRecord | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not _REQUIRED.items() <= _types(data).items():
        return None
    known = {name: data[name] for name in _NAMES if name in data}
    for name in ("profile_name", "digest"):
        if not isinstance(known.get(name), str | None):
            return None
        known.setdefault(name, None)
    for name in ("settings", "kept"):
        if not _is_text_mapping(known.get(name, {})):
            return None
    return LaunchRecord(**known)


def _types(data: Mapping[str, object]) -> dict[str, type]:
    return {name: type(data[name]) for name in _REQUIRED if name in data}


def _is_text_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_NAMES = tuple(each.name for each in fields(LaunchRecord))
_REQUIRED: Mapping[str, type] = {
    "route": str,
    "pid": int,
    "started_ticks": int,
    "boot_id": str,
    "launched_at": str,
    "command_digest": str,
}
