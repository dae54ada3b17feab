"""Puts a launch on record, through ``nccltuned`` where the store belongs to somebody else.

A server often runs as a user of its own, and the store is root's. What the service is told this
way it checks against the process that it is about, which has to be there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from nccltune.errors import FileError
from nccltune.store import LaunchRecord, append_launch_record

INBOX_NAME = "launches.sock"
MAX_MESSAGE_BYTES = 2048
_SEND_TIMEOUT_S = 0.2
"""A launch waits for it."""

_SHORT_CHARS = 200
_TEXTS = ("route", "boot_id", "launched_at", "command_digest")
_OPTIONAL_TEXTS = ("profile_name", "digest")
_NUMBERS = ("pid", "started_ticks")
_MAPPINGS = ("settings", "kept")


def put_on_record(record: LaunchRecord, environ: Mapping[str, str]) -> None:
    """Write a launch into the store, or hand it to the service that can.

    Args:
        record: the launch.
        environ: of this process, for where the service listens.

    Raises:
        FileError: neither worked; the error is that of the store.
    """
    try:
        append_launch_record(record)
    except FileError:
        if not _send(record, environ):
            raise


def _send(record: LaunchRecord, environ: Mapping[str, str]) -> bool:
    # Loaded here, for a launch hardly ever needs them and waits for them.
    import socket

    from nccltune.live.published import RUN_DIR_VARIABLE, SYSTEM_RUN_DIR

    given = environ.get(RUN_DIR_VARIABLE, "")
    folder = Path(given) if given.startswith("/") else SYSTEM_RUN_DIR
    message = format_message(record)
    if message is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(_SEND_TIMEOUT_S)
        try:
            # Unconnected, a wait for room in a full queue would spin.
            sender.connect(str(folder / INBOX_NAME))
            sender.send(message)
        except OSError:
            return False
    return True


def format_message(record: LaunchRecord) -> bytes | None:
    """Return a record as one datagram; None where it is larger than one may be.

    The operator's own values are left out: they may be anything, and their names are enough. Words
    for people are left out where there is no room for them.
    """
    data = asdict(record) | {"kept": dict.fromkeys(record.kept, "")}
    for left_out in ({}, {"reason": record.reason[:_SHORT_CHARS]}, {"reason": "", "kept": {}}):
        message = json.dumps(data | left_out, separators=(",", ":")).encode()
        if len(message) <= MAX_MESSAGE_BYTES:
            return message
    return None


def parse_message(message: bytes) -> LaunchRecord | None:
    """Read a datagram that anybody may have sent; None where it is no record."""
    try:
        data = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not _is_well_formed(data):
        return None
    # Whose launch it is, and what the store was then, is not the sender's to say.
    names = {each.name for each in fields(LaunchRecord)} - {"uid", "generation"}
    return LaunchRecord(**{name: value for name, value in data.items() if name in names})


def _is_well_formed(data: Mapping[str, object]) -> bool:
    texts = [data.get(name) for name in _TEXTS]
    texts += [data[name] for name in _OPTIONAL_TEXTS if data.get(name) is not None]
    texts += [data.get(name, "") for name in ("reason", "invocation_id")]
    numbers = [data.get(name) for name in _NUMBERS]
    mappings = [data.get(name, {}) for name in _MAPPINGS]
    return (
        all(isinstance(text, str) for text in texts)
        and all(name in data for name in _OPTIONAL_TEXTS)
        and all(type(number) is int and number >= 0 for number in numbers)
        and all(_is_text_mapping(mapping) for mapping in mappings)
        and type(data.get("is_degraded", False)) is bool
    )


def _is_text_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
