"""Programs in front of a server, and who of them writes its log.

``timeout 600 sglang serve ...`` and ``nccltune launch -- sglang serve ...`` are given the server's
words. One that passes output on writes the log, and its last words are of the server's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.live.procfs import read_process
from nccltune.live.scanner import find_servers
from nccltuned.logs import LogEnds, LogFiles, open_logs
from nccltuned.pending import tokens_of

if TYPE_CHECKING:
    from nccltune.live.procfs import Process
    from nccltuned.pending import Pending

MAX_FRONTS = 8


def fronts_of(process: Process, root: Path) -> tuple[Process, ...]:
    """Return programs in front of a server that are given its words, the nearest first."""
    words, fronts = tokens_of(process.argv), []
    parent = read_process(process.parent_pid, root)
    while parent is not None and words and tokens_of(parent.argv) == words:
        fronts.append(parent)
        parent = read_process(parent.parent_pid, root)
        if len(fronts) == MAX_FRONTS:
            break
    return tuple(fronts)


def open_first_log(
    writers: Sequence[Process], *, is_new: bool, root: Path, ends: LogEnds
) -> tuple[LogFiles, Process | None]:
    """Open a server's log, be it that of a program in front of it, which is returned then.

    Args:
        writers: the server, and the programs in front of it.
        is_new: see ``open_logs``, and the rest.
    """
    for each in writers:
        logs = open_logs(each.pid, is_new=is_new, root=root, ends=ends)
        if logs.files:
            return logs, None if each is writers[0] else each
    return LogFiles(), None


def has_successor(pending: Pending, root: Path) -> bool:
    """Whether a later server writes into the same file already.

    Scripts start servers again and again into one file, and what the next one writes must not be
    held against this one.
    """
    roots = [server.root for server in find_servers(root) if server.root is not None]
    return any(
        pending.logs.are_written_by(pid, root)
        for process in roots
        if process.started_ticks > pending.process.started_ticks
        for pid in (process.pid, *(front.pid for front in fronts_of(process, root)))
    )
