"""A tracker of starts on made-up processes, and what such servers write."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.live.scanner import find_servers
from nccltune.store import LaunchRecord
from nccltuned.log_file import LogText
from nccltuned.starts import StartTracker
from tests.support.fake_proc import BOOT_ID, FakeProc

if TYPE_CHECKING:
    from nccltune.live.failed_starts import Start

ARGV = ("python3", "-m", "sglang.launch_server", "--model-path", "/m", "--port", "30123")
INVOCATION = "0123456789abcdef" * 2
DIED_IN_NCCL = "Scheduler hit an exception: Traceback\nRuntimeError: NCCL error: invalid usage\n"
STRANGER, OWNER = 54321, 12345
ARGS = "[2026-11-29 12:00:09] server_args=ServerArgs(port=30123)\n"
BEGUN = "[2026-11-29 12:00:12 TP0] Init torch distributed begin.\n"
READY = "The server is fired up and ready to roll!\n"


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


@dataclass
class Host:
    """A tracker on made-up processes, with a clock of its own."""

    proc: FakeProc
    folder: Path
    ended: list[Start] = field(default_factory=list)
    journal: dict[str, str | None] = field(default_factory=dict)
    now_s: float = 1000.0
    is_journal_whole: bool = True

    def __post_init__(self) -> None:
        self.tracker = StartTracker(
            is_known=self._is_known,
            on_end=self.ended.append,
            defer=self._defer,
            root=self.proc.root,
            clock=lambda: self.now_s,
        )
        # "Just now" for the age of processes.
        self.ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def _defer(self, function: Callable[[], object], done: Callable[[object], None]) -> None:
        # A port is read from a file; the journal and systemd are not there.
        is_port = "take_port" in done.__qualname__
        text = self.journal.get(INVOCATION)
        said = None if text is None else LogText(text, self.is_journal_whole)
        # As it comes out of a child.
        done(json.loads(json.dumps(function() if is_port else said)))

    def _is_known(self, key: tuple[str, int, int]) -> bool:
        return any(key in (each.key, each.record_key) for each in self.ended)

    def start(
        self, pid: int = 100, *, environ: dict[str, str] | None = None, age_s: int = 0
    ) -> None:
        ticks = self.ticks - age_s * os.sysconf("SC_CLK_TCK")
        self.proc.add(pid, ARGV, environ=environ, ticks=ticks)
        self.look()

    def log(self, text: str, pid: int = 100) -> None:
        path = self.folder / f"{pid}.log"
        if not path.exists():
            path.touch()
            self.proc.write_to(pid, path)
        append(path, text)

    def look(self) -> None:
        self.tracker.take_servers(find_servers(self.proc.root))
        self.tracker.step()

    def take_records(self, records: Sequence[LaunchRecord]) -> None:
        self.tracker.take_records(records)
        self.tracker.step()

    def record(self, pid: int = 100, **changes: object) -> LaunchRecord:
        facts: dict[str, object] = {
            "route": "run",
            "pid": pid,
            "started_ticks": self.ticks,
            "boot_id": BOOT_ID,
            "launched_at": "2026-11-29T12:00:00.000+00:00",
            "command_digest": "recorded",
            "profile_name": "mine",
            "digest": "a" * 16,
            "settings": {"NCCL_ALGO": "allreduce:ring"},
        }
        return LaunchRecord(**{**facts, **changes})  # type: ignore[arg-type]

    def only(self) -> Start:
        [start] = self.ended
        return start
