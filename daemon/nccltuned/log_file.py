"""One file that a starting server writes to, and what in it is of this start."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from nccltune.sglang.log_stages import BANNER

TAIL_BYTES = 512 * 1024
"""What is read of a log's end: a failing start of 8 ranks fills some ten KiB."""

OWN_WORDS = b"nccltune: "
BANNER_BYTES = re.compile(BANNER.encode(), re.MULTILINE)
_TIME = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_GUARD_BYTES = 1024
_OVERLAP_BYTES = 128
"""Read again in the next look, for words may be half written now; longer than any of them."""

Inode = tuple[int, int]
"""Device and number, which name a file."""


class Glance(NamedTuple):
    """What a look at a log says.

    Attributes:
        has_words: the words that were looked for are new in it.
        has_moved: somebody else than ``nccltune launch`` wrote into it, which goes on saying that
            nothing moves.
    """

    has_words: bool = False
    has_moved: bool = False


class LogText(NamedTuple):
    """What a start has written.

    Attributes:
        text: its end where it is long; empty where it is lost, and where nothing was written.
        is_whole: this is all of it, so that what is not told here was not said.
    """

    text: str = ""
    is_whole: bool = False


@dataclass(slots=True)
class LogFile:
    """One file that a process writes to, and that the next start may write to as well.

    Attributes:
        begin_bytes: where this start begins in it, as far as is known: its size when it was first
            seen, the end of the start before, and in the end the place of this one's arguments.
        is_shared: an earlier server may have written on after ``begin_bytes``, so that only what
            follows this one's arguments counts.
        is_early: this start was new when the file was first seen, so that none of its failures can
            stand before ``begin_bytes``.
        has_args: this one's arguments were seen while it lived.
        is_seen: something was read while it lived.
    """

    descriptor: int
    begin_bytes: int
    inode: Inode
    is_shared: bool = False
    is_early: bool = False
    has_args: bool = False
    is_seen: bool = False
    is_lost: bool = False
    _guard_at: int = 0
    _guard: bytes = b""
    _looked_at: int = 0
    _end: int = 0

    def __post_init__(self) -> None:
        """Remember what stands around the beginning.

        When that is something else, the file was cut and written anew, which scripts that start a
        server again and again do: it tells nothing of this start any more.
        """
        self._guard_at = max(0, self.begin_bytes - _GUARD_BYTES // 2)
        self._content(self.begin_bytes)  # a cut before the first look shows, too

    def look(self, words: bytes) -> Glance:
        """Tell what was written since the last look; cheap to do often."""
        content = self._content(max(self.begin_bytes, self._looked_at))
        if content is None:
            return Glance()
        begin, text = content
        new = text[max(0, self._end - begin) :]
        self._end = begin + len(text)
        self._looked_at = max(begin, self._end - _OVERLAP_BYTES)
        self.is_seen = self.is_seen or bool(text)
        if not self.has_args:
            self._look_for_args(begin, text)
        has_moved = any(line and not line.startswith(OWN_WORDS) for line in new.split(b"\n"))
        own = text[max(0, self.begin_bytes - begin) :]
        return Glance(words in own and self._is_own, has_moved)

    def read(self) -> LogText:
        """Return what this start has written; nothing where that is lost."""
        content = self._content(self.begin_bytes)
        if content is None:
            return LogText()
        begin, text = content
        if not self._is_own:
            # They may stand in what was written since the last look.
            found = BANNER_BYTES.search(text)
            return LogText() if found is None else LogText(_decoded(text[found.start() :]))
        is_whole = begin == self.begin_bytes and (self.has_args or self.is_early)
        return LogText(_decoded(text), is_whole)

    @property
    def _is_own(self) -> bool:
        """Whether what follows ``begin_bytes`` is of this start alone."""
        return self.has_args or not self.is_shared

    def _look_for_args(self, begin: int, text: bytes) -> None:
        """Find the first arguments: as long as this start lives, no later one can have others."""
        found = BANNER_BYTES.search(text)
        # In the middle of a line that was read in part it would be found as if that began there.
        if found is not None and (found.start() > 0 or begin == self.begin_bytes):
            self.has_args = True
            self.begin_bytes = self._guard_at = begin + found.start()
            # No other start has the same time in it.
            self._guard = text[found.start() :][:_GUARD_BYTES]

    def _content(self, begin_bytes: int) -> tuple[int, bytes] | None:
        """Return the end of the file and where that begins; None where it is another file now."""
        try:
            guard = os.pread(self.descriptor, _GUARD_BYTES, self._guard_at)
            size = os.fstat(self.descriptor).st_size
            begin = max(begin_bytes, size - TAIL_BYTES)
            text = os.pread(self.descriptor, TAIL_BYTES, begin)
        except OSError:
            return None
        is_cut = size < max(self.begin_bytes, self._looked_at)
        if self.is_lost or is_cut or not guard.startswith(self._guard):
            self.is_lost = True
            return None
        self._guard = guard
        return begin, text


def find_args(descriptor: int, started_s: float) -> int | None:
    """Return where a start's own arguments stand in a file, if that can be told by their time.

    Args:
        descriptor: of the file.
        started_s: when it was started, in seconds since 1970. Its arguments have a later one, for
            it loads for some seconds before. A server in a container may have another time zone
            than this process: they are not found then.
    """
    begin = max(0, os.fstat(descriptor).st_size - TAIL_BYTES)
    found = list(BANNER_BYTES.finditer(os.pread(descriptor, TAIL_BYTES, begin)))
    for each in reversed(found):
        moment = _TIME.match(each[0])
        if moment and int(started_s) < _local_s(moment[1].decode()) <= time.time():
            return begin + each.start()
    return None


def _local_s(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")
