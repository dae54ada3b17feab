"""What a starting server writes where systemd keeps the log: the journal, asked once it is dead."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from nccltune.live.procfs import PROC_ROOT
from nccltuned.log_file import TAIL_BYTES, Inode, LogText
from nccltuned.outputs import OUTPUTS

JOURNAL_LINES = 20_000
JOURNAL_TIMEOUT_S = 20.0
SYNC_TIMEOUT_S = 5.0
SETTLE_S = 1.0
"""What passes through a program in front, or a busy journal, comes a moment after the death."""

MAX_JOURNAL_S = JOURNAL_TIMEOUT_S + SYNC_TIMEOUT_S + SETTLE_S + 5.0
"""``read_journal`` takes no longer."""

_INVOCATION = re.compile(r"[0-9a-f]{32}")


def is_invocation(text: str) -> bool:
    """Tell whether this is the id of a systemd unit's run."""
    return _INVOCATION.fullmatch(text) is not None


def find_journal(pid: int, environ: Mapping[str, str], root: Path = PROC_ROOT) -> Inode | None:
    """Return the stream by which a process's output goes to the journal; None where none does.

    It is the one that ``JOURNAL_STREAM`` names. A terminal multiplexer may run in a unit too, and
    hand its id to everything typed into it.
    """
    stream = environ.get("JOURNAL_STREAM", "")
    for number in OUTPUTS:
        with suppress(OSError):
            status = os.stat(f"{root}/{pid}/fd/{number}")  # noqa: PTH116 - Path would not follow it
            if stream == f"{status.st_dev}:{status.st_ino}":
                return status.st_dev, status.st_ino
    return None


def read_journal(invocation_id: str, since: str, until: str = "") -> LogText:
    """Read what one run of a systemd unit has logged; empty where the journal does not tell.

    It is whole where the journal has confirmed that it has taken in all that was written, and
    none of that was too much to be read. Blocks: call it in a child.

    Args:
        invocation_id: names the run.
        since: ISO 8601 with its time zone; what was before it belongs to an earlier server.
        until: as ``since``; what is after it belongs to the next. Empty where there is none yet.
    """
    import subprocess

    is_synced = _sync()
    # Journal entries may be stamped a moment before the process that is their cause.
    since_s = datetime.fromisoformat(since).timestamp() - 1.0
    words = ["journalctl", "--quiet", "--no-pager", "--output=cat", "--all"]
    words += [f"--lines={JOURNAL_LINES}", f"--since=@{since_s:.0f}"]
    if until:
        words.append(f"--until=@{datetime.fromisoformat(until).timestamp():.0f}")
    words.append(f"_SYSTEMD_INVOCATION_ID={invocation_id}")
    try:
        done = subprocess.run(words, capture_output=True, timeout=JOURNAL_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return LogText()
    is_cut = len(done.stdout) > TAIL_BYTES or done.stdout.count(b"\n") >= JOURNAL_LINES
    text = done.stdout[-TAIL_BYTES:].decode("utf-8", "replace")
    return LogText(text, is_whole=is_synced and done.returncode == 0 and not is_cut)


def _sync() -> bool:
    """Wait until the journal holds what was written; False where it does not say so.

    It says so to root alone.
    """
    import subprocess

    time.sleep(SETTLE_S)
    words = ["journalctl", "--quiet", "--sync"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=SYNC_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
