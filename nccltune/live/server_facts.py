"""What can be read of one running server: its environments, launch command, interpreter, record.

Its command line and its environment are the choice of its user. Files that they name are read as
the server sees them, in its container too, with no right that its user lacks; none is run or
loaded, and none of their text is repeated.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nccltune.errors import NccltuneError
from nccltune.host.conf_files import ETC_CONF_PATH, effective_settings, read_conf_files
from nccltune.host.server_python import find_python, installed_version, package_dirs
from nccltune.inject.marker import MARKER, Marker, parse_marker
from nccltune.live.drift import ConfEntry
from nccltune.live.process_files import ProcessFiles
from nccltune.live.procfs import (
    PROC_ROOT,
    EnvironReading,
    Process,
    is_exhausted,
    read_environ,
    read_status,
    started_at_s,
)
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import LaunchCommand, parse_launch

if TYPE_CHECKING:
    from nccltune.live.scanner import Server
    from nccltune.store import LaunchRecord

HIDDEN = "***"
_SECRET_WORDS = frozenset({"key", "token", "password", "secret"})
_NO_SECRETS = frozenset({("speculative", "token", "map")})
"""Words of flags that only sound like one: a path, and another file is another server."""
_WORDS = re.compile(r"[a-z0-9]+")
_CONFIG_FLAG = "--config"
_MAX_CONF_BYTES = 64 * 1024
_CONFIG_PROBLEM = (
    "its launch command is not known, for its --config file cannot be read as its user reads it, "
    "or makes no sense"
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was read of one server.

    Attributes:
        launch_environ: what its own process was started with; None where that cannot be read.
        environs: of its ranks, by process id.
        markers: marks of a route of ours, by the process id of a rank; 0 is the server's own.
        files: as its own process sees them.
        record: of its launch; None where none of ours is there.
        argv: its launch command, with what its ``--config`` file sets in place of that file; empty
            where it is not known.
        problem: why it is not.
        command: that command, read; None where it makes no sense.
        python: its interpreter, as it sees it; None where it cannot be told.
        version: of its SGLang.
    """

    server: Server
    launch_environ: Mapping[str, str] | None
    environs: Mapping[int, EnvironReading]
    markers: Mapping[int, Marker]
    files: ProcessFiles
    record: LaunchRecord | None = None
    argv: tuple[str, ...] = ()
    problem: str = ""
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
        """The environment that its launch command is judged in: whatever ``env`` did is done."""
        return self.launch_environ or {}


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
    files = ProcessFiles.of(server.pid, root)
    launch = _read_launch(server, files)
    python = version = None
    if process is not None and launch.argv:
        variables = own or {}
        python = _python_of(process, variables, files, root)
        if python is not None:
            version = installed_version(package_dirs(python, variables, files), "sglang", files)
    return ServerFacts(
        server=server,
        launch_environ=own,
        environs=environs,
        markers=dict(_markers(own, environs)),
        record=None if process is None else find_record(process, records, root),
        argv=launch.argv,
        problem=launch.problem,
        command=launch.command,
        python=python,
        version=version,
        files=files,
        proc_root=root,
    )


class _Launch(NamedTuple):
    argv: tuple[str, ...] = ()
    command: LaunchCommand | None = None
    problem: str = ""


def _read_launch(server: Server, files: ProcessFiles) -> _Launch:
    """Read a launch command, and the file of flags that it may name."""
    if server.root is None:
        return _Launch(problem="its launching process is gone, so that its command is not known")
    if not server.is_launch:
        problem = "another program started its ranks, so that its launch command is not known"
        return _Launch(problem=problem)
    argv = server.root.argv
    has_file = any(word.partition("=")[0] == _CONFIG_FLAG for word in argv)
    try:
        command = parse_launch(argv, files.read)
    except NccltuneError:
        # What is wrong with words of the command is told later; that of a file's is not.
        return _Launch(problem=_CONFIG_PROBLEM) if has_file else _Launch(argv)
    return _Launch(_without_file(argv, command) if has_file else argv, command)


def _without_file(argv: tuple[str, ...], command: LaunchCommand) -> tuple[str, ...]:
    """Write a command with what its ``--config`` file sets, so that nobody reads that again."""
    start, _tokens = split_launch(argv)
    words = [*argv[:start], "sglang", "serve"]
    for name, values in command.flags.items():
        flag = f"--{name.replace('_', '-')}"
        if flag != _CONFIG_FLAG:
            words += [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *values]
    return tuple(words)


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
    except OSError as error:
        if is_exhausted(error):
            raise
        return ""


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
    home = environ.get("HOME")
    files = read_conf_files(
        environ,
        Path(home) if home else None,
        ETC_CONF_PATH,
        ProcessFiles.of(pid, facts.proc_root),
        _MAX_CONF_BYTES,
    )
    return {
        name: ConfEntry(value, str(path))
        for name, (value, path) in effective_settings(files, environ).items()
    }


def redacted(argv: Sequence[str]) -> tuple[str, ...]:
    """Hide what stands behind flags and variables that name a secret.

    >>> redacted(("sglang", "serve", "--api-key", "abc", "--admin-api-key=def"))
    ('sglang', 'serve', '--api-key', '***', '--admin-api-key=***')
    """
    shown: list[str] = []
    is_secret = False
    for word in argv:
        flag, equals, _value = word.partition("=")
        # Whole words: "--max-total-tokens" counts, it tells nothing.
        is_name = flag.startswith("--") or (equals == "=" and flag.isidentifier())
        words = tuple(_WORDS.findall(flag.lower()))
        names_secret = is_name and words not in _NO_SECRETS and bool(_SECRET_WORDS & set(words))
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


def _python_of(
    process: Process, environ: Mapping[str, str], files: ProcessFiles, root: Path
) -> str | None:
    """Return a server's interpreter as it was called, so that its virtual environment is known."""
    running = root / str(process.pid) / "exe"
    try:
        target = os.readlink(running)  # noqa: PTH115 - may say "(deleted)" behind the path
        status = running.stat()
    except OSError:
        return None
    for name in (find_python(process.argv, environ, files), process.title, target):
        if name and name.startswith("/"):
            found = files.stat(Path(name))
            if found is not None and os.path.samestat(found, status):
                return name
    return None


def _numbers_in_containers(pid: int, root: Path) -> tuple[int, ...]:
    """Return the numbers that a process has inside its containers, where its launch was written."""
    return tuple(int(number) for number in read_status(pid, root).get("NSpid", "").split())
