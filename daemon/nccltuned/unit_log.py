"""What a starting server writes where systemd keeps the log: the journal, asked once it is dead."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from nccltune.live.procfs import PROC_ROOT
from nccltuned.log_file import TAIL_BYTES
from nccltuned.outputs import OUTPUTS

JOURNAL_LINES = 2000
JOURNAL_TIMEOUT_S = 20.0
_INVOCATION = re.compile(r"[0-9a-f]{32}")


def is_invocation(text: str) -> bool:
    """Tell whether this is the id of a systemd unit's run."""
    return _INVOCATION.fullmatch(text) is not None


def is_journal(pid: int, environ: Mapping[str, str], root: Path = PROC_ROOT) -> bool:
    """Tell whether a process's output goes to the journal, as ``JOURNAL_STREAM`` says it does.

    A terminal multiplexer may run in a unit too, and hand its id to everything typed into it.
    """
    stream = environ.get("JOURNAL_STREAM", "")
    for number in OUTPUTS:
        with suppress(OSError):
            status = os.stat(f"{root}/{pid}/fd/{number}")  # noqa: PTH116 - Path would not follow it
            if stream == f"{status.st_dev}:{status.st_ino}":
                return True
    return False


def read_journal(invocation_id: str, since: str, until: str = "") -> str:
    """Read what one run of a systemd unit has logged; empty where the journal does not tell.

    Blocks: call it in a child.

    Args:
        invocation_id: names the run.
        since: ISO 8601 with its time zone; what was before it belongs to an earlier server.
        until: as ``since``; what is after it belongs to the next. Empty where there is none yet.
    """
    import subprocess

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
        return ""
    return done.stdout[-TAIL_BYTES:].decode("utf-8", "replace")
