"""What can be read of one running server: its environments, launch command, interpreter, record.

A server in a container is read through procfs, as far as its files can be seen from here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.host.conf_files import (
    CONF_FILE_VARIABLE,
    ETC_CONF_PATH,
    effective_settings,
    read_conf_files,
)
from nccltune.host.server_python import find_python, installed_version, package_dirs
from nccltune.inject.marker import MARKER, Marker, parse_marker
from nccltune.live.drift import ConfEntry
from nccltune.live.procfs import (
    PROC_ROOT,
    EnvironReading,
    Process,
    Server,
    read_environ,
    started_at_s,
)
from nccltune.sglang.command import LaunchCommand, parse_launch

if TYPE_CHECKING:
    from nccltune.store import LaunchRecord

HIDDEN = "***"
_SECRET_WORDS = frozenset({"key", "token", "password", "secret"})
_FILE_FLAGS = frozenset({"--config", "--model-path", "--model"})


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was read of one server.

    Attributes:
        launch_environ: what its own process was started with; None where that cannot be read.
        environs: of its ranks, by process id.
        markers: marks of a route of ours, by the process id of a rank; 0 is the server's own.
        record: of its launch; None where none of ours is there.
        argv: its launch command, files named so that they can be read from here; empty where its
            process is gone, or is another program that embeds SGLang.
        command: that command, read; None where it makes no sense.
        python: its interpreter; None where it cannot be told, or is a container's.
        version: of its SGLang.
    """

    server: Server
    launch_environ: Mapping[str, str] | None
    environs: Mapping[int, EnvironReading]
    markers: Mapping[int, Marker]
    record: LaunchRecord | None = None
    argv: tuple[str, ...] = ()
    command: LaunchCommand | None = None
    python: str | None = None
    version: str | None = None
    proc_root: Path = PROC_ROOT

    @property
    def marker(self) -> Marker | None:
        """The mark of a route of ours, wherever it was found."""
        return next(iter(self.markers.values()), None)

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment that its launch command is judged in."""
        words = self.command.environment if self.command else {}
        return {**(self.launch_environ or {}), **words}


def read_facts(
    server: Server, records: Sequence[LaunchRecord], root: Path = PROC_ROOT
) -> ServerFacts:
    """Read everything about one server.

    Args:
        server: as the scan found it.
        records: launches, the newest last.
        root: where procfs is mounted.
    """
    process = server.root
    own = None if process is None else read_environ(process, root).values
    environs = {rank.process.pid: read_environ(rank.process, root) for rank in server.ranks}
    argv = _visible(process, root) if process is not None and server.is_launch else ()
    command = _parsed(argv)
    python = version = None
    if process is not None and argv:
        variables = {**(own or {}), **(command.environment if command else {})}
        # Folders of another user's interpreter may be closed to this one.
        with suppress(OSError):
            python = _python_of(process, variables, root)
        if python is not None:
            with suppress(OSError):
                version = installed_version(package_dirs(python, variables), "sglang")
    return ServerFacts(
        server=server,
        launch_environ=own,
        environs=environs,
        markers=dict(_markers(own, environs)),
        record=None if process is None else find_record(process, records, root),
        argv=argv,
        command=command,
        python=python,
        version=version,
        proc_root=root,
    )


def find_record(
    process: Process, records: Sequence[LaunchRecord], root: Path = PROC_ROOT
) -> LaunchRecord | None:
    """Return the record of the launch that a process came from; None for none."""
    same = [record for record in records if record.started_ticks == process.started_ticks]
    if not same:
        return None
    boot_id = read_boot_id(root)
    numbers = {process.pid, *_numbers_in_containers(process.pid, root)}
    for record in reversed(same):
        if record.pid in numbers and record.boot_id == boot_id:
            return record
    return None


def read_boot_id(root: Path = PROC_ROOT) -> str:
    """Return what names this boot of the host; empty where it is hidden."""
    try:
        return (root / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_uid(pid: int, root: Path = PROC_ROOT) -> int | None:
    """Return whose process it is; None where it has ended."""
    try:
        return (root / str(pid)).stat().st_uid
    except OSError:
        return None


def read_started_at(process: Process) -> str:
    """Return when a process was started: ISO 8601, UTC."""
    boottime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    moment_s = started_at_s(process, now_s=time.time(), boottime_s=boottime_s)
    return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="seconds")


def conf_entries(facts: ServerFacts, pid: int) -> dict[str, ConfEntry]:
    """Return what NCCL's own configuration files set for one rank, as far as they can be seen."""
    environ = facts.environs[pid].values
    if environ is None:
        return {}
    # As the rank sees it: a container has files of its own.
    base = facts.proc_root / str(pid) / "root"
    seen = dict(environ)
    if named := environ.get(CONF_FILE_VARIABLE):
        seen[CONF_FILE_VARIABLE] = str(base / named.lstrip("/"))
    home = environ.get("HOME")
    files = read_conf_files(
        seen,
        base / home.lstrip("/") if home else None,
        base / str(ETC_CONF_PATH).lstrip("/"),
    )
    return {
        name: ConfEntry(value, f"/{path.relative_to(base)}")
        for name, (value, path) in effective_settings(files, environ).items()
    }


def redacted(argv: Sequence[str]) -> tuple[str, ...]:
    """Hide what stands behind flags that name a secret.

    >>> redacted(("sglang", "serve", "--api-key", "abc", "--admin-api-key=def"))
    ('sglang', 'serve', '--api-key', '***', '--admin-api-key=***')
    """
    shown: list[str] = []
    is_secret = False
    for word in argv:
        flag, equals, _value = word.partition("=")
        # Whole words: "--max-total-tokens" counts, it tells nothing.
        names_secret = flag.startswith("--") and bool(_SECRET_WORDS & set(flag[2:].split("-")))
        if is_secret and not word.startswith("--"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{flag}={HIDDEN}" if names_secret and equals else word)
        is_secret = names_secret and not equals
    return tuple(shown)


def _markers(
    own: Mapping[str, str] | None, environs: Mapping[int, EnvironReading]
) -> Iterator[tuple[int, Marker]]:
    """Yield each rank's mark; where it cannot be read, the one that it must have inherited."""
    of_root = parse_marker((own or {}).get(MARKER))
    for pid, reading in environs.items():
        marker = of_root if reading.values is None else parse_marker(reading.values.get(MARKER))
        if marker is not None:
            yield pid, marker
    if of_root is not None:
        yield 0, of_root


def _parsed(argv: tuple[str, ...]) -> LaunchCommand | None:
    try:
        return parse_launch(argv) if argv else None
    except NccltuneError:
        return None


def _visible(process: Process, root: Path) -> tuple[str, ...]:
    """Return a launch command with files named so that they can be read from here."""
    words = list(process.argv)
    for idx, flag in enumerate(words[:-1]):
        if flag in _FILE_FLAGS:
            named = words[idx + 1]
            is_absolute = named.startswith("/")
            if is_absolute and os.path.exists(named):  # noqa: PTH110 - no error where it is closed
                continue
            path = root / str(process.pid) / ("root" if is_absolute else "cwd") / named.lstrip("/")
            if os.path.exists(path):  # noqa: PTH110 - as above
                words[idx + 1] = str(path)
    return tuple(words)


def _python_of(process: Process, environ: Mapping[str, str], root: Path) -> str | None:
    """Return a server's interpreter as it was called, so that its virtual environment is known.

    None where that file is another one from here, which it is for a container.
    """
    running = root / str(process.pid) / "exe"
    try:
        target = os.readlink(running)  # noqa: PTH115 - may say "(deleted)" behind the path
    except OSError:
        return None
    for name in (find_python(process.argv, environ), process.title, target):
        try:
            if name and name.startswith("/") and Path(name).samefile(running):
                return name
        except OSError:
            continue
    return None


def _numbers_in_containers(pid: int, root: Path) -> tuple[int, ...]:
    """Return the numbers that a process has inside its containers, where its launch was written."""
    try:
        text = (root / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name == "NSpid":
            return tuple(int(number) for number in numbers.split())
    return ()
