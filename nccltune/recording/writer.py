"""Records launch after launch, so that nothing measured is lost when the work ends early."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nccltune.atomic import make_dir
from nccltune.errors import BusyError, FileError
from nccltune.jsontext import parse_json
from nccltune.recording.finding import load_recording, save_recording
from nccltune.recording.format import format_launch, head_document
from nccltune.recording.model import (
    Manifest,
    RecordedLaunch,
    Recording,
    candidate_key,
    find_gap,
)
from nccltune.recording.parse import check_schema, parse_head, parse_launch
from nccltune.recording.reading import ObjectReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nccltune.measurement import Launch, Settings

JOURNAL_SCHEMA = "nccltune.recording-journal/1"

_CONDITIONS = (
    "gpus",
    "driver",
    "nccl",
    "torch",
    "method",
    "base_environment",
    "world_size",
    "payloads",
)
"""Fields of the manifest that must be equal for launches to be compared."""


class RecordingWriter:
    """Appends launches to a journal beside the recording; `finish` writes the recording itself.

    The journal is JSON lines, flushed to the disk launch by launch. A last line that was torn by a
    kill is cut off when it is opened again. Both a journal and a finished recording can be gone on
    with, as long as they were made under the same conditions.

    Raises:
        FileError: the recording or its journal is damaged, or was made under other conditions, or
            the disk is full.
        BusyError: another process writes the same recording.
    """

    def __init__(self, path: Path, name: str, manifest: Manifest) -> None:
        self.path = path
        self.journal_path = path.with_name(path.name + ".journal")
        finished = load_recording(path) if path.exists() else None
        self.recording = finished or Recording(name, manifest, ())
        _check_same(path, self.recording, name, manifest)
        self._fd = _open_locked(self.journal_path)
        try:
            self._go_on(name, manifest)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def launches(self) -> tuple[RecordedLaunch, ...]:
        """Everything recorded so far, also by earlier processes."""
        return self.recording.launches

    def missing(self, candidates: Sequence[Settings]) -> list[Settings]:
        """Return the candidates without a launch in any spelling, so that a plan can go on."""
        held = {candidate_key(launch.settings) for launch in self.launches}
        return [settings for settings in candidates if candidate_key(settings) not in held]

    def append(self, launch: Launch, *, started_at: datetime | None = None) -> None:
        """Keep one launch, whatever its outcome; it is on the disk when this returns.

        Raises:
            ValueError: the launch was pruned, lacks a payload without having failed, or has a time
                that is none.
            FileError: the journal cannot be written; what it holds already stays good.
        """
        moment = started_at.isoformat(timespec="seconds") if started_at else None
        recorded = RecordedLaunch.from_launch(launch, started_at=moment)
        if gap := find_gap(recorded, self.recording.manifest):
            raise ValueError(f"the launch {gap}")
        self._write_line(format_launch(recorded))
        self._add(recorded)

    def finish(self) -> Recording:
        """Write the recording with all launches, then remove the journal.

        A kill in between loses nothing.

        Raises:
            FileError: usually a full disk; the journal is still there.
        """
        save_recording(self.recording, self.path)
        self.journal_path.unlink(missing_ok=True)
        self.close()
        return self.recording

    def close(self) -> None:
        """Let go of the journal and leave it for the next time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _go_on(self, name: str, manifest: Manifest) -> None:
        lines = _read_whole_lines(self._fd, self.journal_path)
        if not lines:
            head = head_document(name, self.recording.manifest)
            start = {"schema": JOURNAL_SCHEMA, "after_count": len(self.launches)}
            self._write_line(json.dumps(head | start, separators=(",", ":"), allow_nan=False))
            return
        journalled, after_count = _parse_journal(lines, self.journal_path)
        _check_same(self.journal_path, journalled, name, manifest)
        kept, merged = self.launches[:after_count], self.launches[after_count:]
        # More than after_count: merged by a finish() that was killed before it removed the journal.
        if len(kept) < after_count or merged != journalled.launches[: len(merged)]:
            reason = f"goes on from another recording than {self.path}: move one of the two away"
            raise FileError(self.journal_path, reason, line=1, code="foreign_journal")
        launches = kept + journalled.launches
        first_manifest = self.recording.manifest if kept else journalled.manifest
        self.recording = Recording(name, first_manifest, launches)

    def _add(self, recorded: RecordedLaunch) -> None:
        before = self.recording
        self.recording = Recording(before.name, before.manifest, (*before.launches, recorded))

    def _write_line(self, line: str) -> None:
        data = (line + "\n").encode()
        start = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, start)
            raise FileError(self.journal_path, f"cannot be written ({error.strerror})") from None


def _open_locked(path: Path) -> int:
    make_dir(path.parent)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise FileError(path, f"cannot be opened ({error.strerror})") from None
    if not _try_lock(fd):
        os.close(fd)
        message = f"{path}: another process is writing this recording: wait for it, or stop it"
        raise BusyError(message, code="recording_busy")
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # No name any more: its owner finished between our opening and locking it.
    return os.fstat(fd).st_nlink > 0


def _read_whole_lines(fd: int, path: Path) -> list[str]:
    """Read the journal and cut off a last line without an end: nobody was told that it was kept."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    os.ftruncate(fd, len(whole))
    try:
        return whole.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = whole.count(b"\n", 0, error.start) + 1
        raise FileError(path, "not UTF-8 text, so not a journal", line=line) from None


def _parse_journal(lines: list[str], path: Path) -> tuple[Recording, int]:
    # One array, an element a line, so that complaints name the journal's own lines.
    document = parse_json("[" + ",\n".join(lines) + "]", path)
    head, *raw_launches = document.data if isinstance(document.data, list) else [document.data]
    reader = ObjectReader(document, head, "the journal", 0)
    check_schema(reader, JOURNAL_SCHEMA)
    name, manifest = parse_head(reader, document, 0)
    after_count = reader.count("after_count", minimum=0)
    reader.finish()
    launches = [
        parse_launch(document, raw, manifest, idx) for idx, raw in enumerate(raw_launches, start=1)
    ]
    return Recording(name, manifest, tuple(launches)), after_count


def _check_same(path: Path, recorded: Recording, name: str, manifest: Manifest) -> None:
    if recorded.name != name:
        reason = f"holds recording {recorded.name!r}, not {name!r}: choose another file"
        raise FileError(path, reason, code="other_conditions")
    for field in _CONDITIONS:
        there, here = getattr(recorded.manifest, field), getattr(manifest, field)
        if there != here:
            was, now = _words(there), _words(here)
            reason = f"was recorded with {field} {was}, now it is {now}: choose another name"
            raise FileError(path, reason, code="other_conditions")


def _words(value: object) -> str:
    """Write a field of the manifest for people."""
    if isinstance(value, tuple):
        return ", ".join(f"{each.size_bytes} B x {each.graph_count}" for each in value)
    if isinstance(value, Mapping):
        return " ".join(f"{name}={text}" for name, text in value.items()) or "nothing"
    return repr(value)
