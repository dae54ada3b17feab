"""Records of launches: who was started under which profile, one line of JSON each.

Many processes write at once and any may die in the middle of a line: each record is one write to
the end of the file, after a line break where the last line lacks one. Two files bound the size.

Launches of users who may not write here are put down by the service, in a file a user, so that
nobody pushes out what belongs to others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from nccltune.errors import BusyError, FileError, NccltuneError
from nccltune.paths import reading_dir
from nccltune.store.lock import state_lock
from nccltune.store.reading import read_bytes, unreadable
from nccltune.store.state import read_state

LAUNCHES_NAME = "launches.jsonl"
OLDER_NAME = "launches.1.jsonl"
HANDED_OVER_NAME = "launches.d"
MAX_OF_USER = 20
"""Records of one user that the service keeps."""

MAX_USERS = 64
MAX_FILE_BYTES = 512 * 1024
"""The newer file becomes the older one, in the place of that, when it is larger than this."""

_MAX_READ_BYTES = 16 * MAX_FILE_BYTES
_MAX_LINE_BYTES = 16 * 1024
_ROTATE_WAIT_S = 0.2
"""A launch waits for it."""


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch, as the route that started it saw it.

    Process id, its start and the boot name one process for ever: ``run`` replaces itself with the
    server, so they are the server's own.

    Attributes:
        route: ``run``, ``launch``, ``hook`` or ``verify``.
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
        generation: of the store's state when it was put down; 0 if unknown.
        uid: whose launch it is, where the service has put it down; None for one that was written
            by whoever may write the store.
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
    generation: int = 0
    uid: int | None = None


def append_launch_record(record: LaunchRecord, folder: Path | None = None) -> None:
    """Write one record and have it on disk before returning.

    Args:
        record: the launch.
        folder: the state folder; the one that launches of this user read if None.

    Raises:
        FileError: the folder cannot be written, or the disk is full.
    """
    base = reading_dir() if folder is None else folder
    path = base / LAUNCHES_NAME
    try:
        if not base.is_dir():
            # Loaded here, for it is hardly ever needed.
            from nccltune.atomic import make_dir

            make_dir(base)
        _append(path, _format(_stamped(record, base)))
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise FileError(path, f"cannot be written ({cause})", code="cannot_write") from None


def make_room(folder: Path) -> None:
    """Begin a new file of records where the one there is full: the hook only appends."""
    path = folder / LAUNCHES_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
            _make_room(path, descriptor)
    except OSError:
        return  # a folder that cannot be written now; what is there is read all the same
    finally:
        os.close(descriptor)


def keep_handed_over(record: LaunchRecord, uid: int, folder: Path) -> None:
    """Put down the launch of a user who may not write here; only his own older ones make room.

    Args:
        record: the launch.
        uid: of the user.
        folder: the state folder.

    Raises:
        FileError: the folder cannot be written.
        BusyError: another process changes the store, or too many users have launches here.
    """
    # Loaded here, for a launch never does this.
    from nccltune.atomic import make_dir, write_atomic

    path = folder / HANDED_OVER_NAME / f"{uid}.jsonl"
    make_dir(path.parent)
    with state_lock(folder):
        if not path.exists() and len(os.listdir(path.parent)) >= MAX_USERS:  # noqa: PTH208
            raise BusyError(
                f"{path.parent}: launches of {MAX_USERS} users are on record; delete old files",
                code="too_many_users",
            )
        others = [each for each in _records(path, uid) if _key(each) != _key(record)]
        lines = [_format(each) for each in (*others, _stamped(record, folder))]
        write_atomic(path, b"".join(lines[-MAX_OF_USER:]).decode())


def read_launch_records(folder: Path | None = None) -> tuple[LaunchRecord, ...]:
    """Read the records that are there, the oldest first; lines that make no sense are left out.

    Raises:
        FileError: a file is there and cannot be read.
    """
    base = reading_dir() if folder is None else folder
    own = (*_records(base / OLDER_NAME), *_records(base / LAUNCHES_NAME))
    handed_over = tuple(_handed_over(base / HANDED_OVER_NAME))
    if not handed_over:
        return own
    return tuple(sorted((*own, *handed_over), key=lambda record: record.launched_at))


def _handed_over(folder: Path) -> Iterator[LaunchRecord]:
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is needed
    except OSError:
        return
    for name in names:
        uid, _, suffix = name.partition(".")
        if uid.isascii() and uid.isdecimal() and suffix == "jsonl":
            yield from _records(folder / name, int(uid))


def _stamped(record: LaunchRecord, folder: Path) -> LaunchRecord:
    """Note which state the launch met, for the time of day may be set back."""
    try:
        return replace(record, generation=read_state(folder)["generation"])
    except NccltuneError:
        return record


def _append(path: Path, line: bytes) -> None:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_FILE_BYTES:
            _make_room(path, descriptor)
            os.close(descriptor)
            descriptor = os.open(path, flags, 0o644)
            size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if is_torn else line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_room(path: Path, descriptor: int) -> None:
    """Let a full file become the older one, unless another launch has done so just now.

    Whoever holds it open goes on writing into the older file, which is read too.
    """
    try:
        with state_lock(path.parent, wait_s=_ROTATE_WAIT_S):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                path.replace(path.with_name(OLDER_NAME))
    except NccltuneError:
        return  # the next launch may be luckier, and the file a little larger


def _format(record: LaunchRecord) -> bytes:
    data = {name: value for name, value in asdict(record).items() if name != "uid"}
    line = _line(data)
    if len(line) > _MAX_LINE_BYTES:
        # An operator's value may be as long as the kernel allows; its name is what matters.
        short = {name: value[:60] for name, value in record.kept.items()}
        line = _line(data | {"kept": short, "reason": record.reason[:500]})
    return line


def _line(data: Mapping[str, object]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _key(record: LaunchRecord) -> tuple[str, int, int]:
    return record.boot_id, record.pid, record.started_ticks


def _records(path: Path, uid: int | None = None) -> Iterator[LaunchRecord]:
    try:
        content = read_bytes(path, check_owner=False, max_bytes=_MAX_READ_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from None
    for line in content.split(b"\n"):
        record = _parse(line)
        if record is not None:
            yield record if uid is None else replace(record, uid=uid)


def _parse(line: bytes) -> LaunchRecord | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not _REQUIRED.items() <= _types(data).items():
        return None
    known = {name: data[name] for name in _NAMES if name in data}
    if type(known.get("generation")) is not int:
        known.pop("generation", None)
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


_NAMES = tuple(each.name for each in fields(LaunchRecord) if each.name != "uid")
_REQUIRED: Mapping[str, type] = {
    "route": str,
    "pid": int,
    "started_ticks": int,
    "boot_id": str,
    "launched_at": str,
    "command_digest": str,
}
