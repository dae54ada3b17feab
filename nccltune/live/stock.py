"""The whole picture of a host, as ``nccltune status`` shows it and ``nccltuned`` publishes it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.live.profile_standing import LiveProfile, judge_profile
from nccltune.live.scanner import Server, find_servers
from nccltune.live.servers import Context, ServerReport, report_servers
from nccltune.paths import reading_dir
from nccltune.seen_files import OWN, SeenFiles
from nccltune.store import Policy, read_active, read_launch_records, read_policy

if TYPE_CHECKING:
    from nccltune.host.facts import HostFacts
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.live.drift import KeyReport
    from nccltune.live.servers import HostReader
    from nccltune.payloads.shapes import ModelShape
    from nccltune.sglang.command import LaunchCommand
    from nccltune.store import LaunchRecord

_HOST_VARIABLES = ("CUDA_VISIBLE_DEVICES", "SGLANG_NCCL_SO_PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_MAX_TEXT_CHARS = 1000
_MAX_ENTRIES = 256
"""Of a list: words of a command, ranks, variables."""


@dataclass(frozen=True, slots=True)
class Stock:
    """The active profile and every server."""

    profile: LiveProfile
    servers: tuple[ServerReport, ...]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return what scripts get."""
        return {
            "active": profile_data(self.profile),
            "servers": [shortened(server_data(server)) for server in self.servers],
            "warnings": list(self.warnings),
        }


def take_stock(
    servers: Iterable[Server] | None = None, *, read_host: HostReader | None = None
) -> Stock:
    """Look at the store, the host and every server.

    Never raises for a fault of any of these: it is part of the picture.

    Args:
        servers: where they are known already.
        read_host: stands in for NVML in tests.
    """
    book = _HostBook(read_host or host_of)
    active = read_active()
    warnings = [active.warning] if active.warning else []
    policy = Policy()
    records: tuple[LaunchRecord, ...] = ()
    try:
        policy = read_policy()
    except NccltuneError as error:
        warnings.append(f"{error}; EAGLE-3 launches alone get a profile")
    try:
        records = read_launch_records()
    except NccltuneError as error:
        warnings.append(f"launches are not known: {error}")
    home: Path | None = None
    with suppress(NccltuneError):
        home = reading_dir()
    context = Context(active, policy, records, book.read, shape_of, home=home)
    reports = report_servers(find_servers() if servers is None else servers, context)
    here, host_problem = book.whole_host() if active.profile else (None, "")
    return Stock(judge_profile(active, here, host_problem), reports, tuple(warnings))


def shortened(data: object) -> object:
    """Cut what is longer than anything that makes sense: much of it is the choice of somebody else.

    >>> len(shortened(["x" * 2000])[0])
    1006
    """
    if isinstance(data, str):
        return data if len(data) <= _MAX_TEXT_CHARS else f"{data[:_MAX_TEXT_CHARS]} (cut)"
    if isinstance(data, list):
        return [shortened(each) for each in data[:_MAX_ENTRIES]]
    if isinstance(data, dict):
        return {name: shortened(each) for name, each in data.items()}
    return data


class _HostBook:
    """Answers about the host, each asked for once."""

    def __init__(self, reader: HostReader) -> None:
        self._reader = reader
        self._answers: dict[Hashable, tuple[HostFacts | None, str]] = {}

    def read(
        self, python: str | None, environ: Mapping[str, str], files: SeenFiles
    ) -> tuple[HostFacts | None, str]:
        """Return the host as one server sees it."""
        key = (python, files.name, *(environ.get(name) for name in _HOST_VARIABLES))
        if key not in self._answers:
            self._answers[key] = self._reader(python, environ, files)
        return self._answers[key]

    def whole_host(self) -> tuple[Fingerprint | None, str]:
        """Return every GPU of the host, with the NCCL of the servers where there are any."""
        versions = {host.fingerprint.nccl_version for host, _ in self._answers.values() if host}
        facts, problem = self.read(None, {}, OWN)
        if facts is None:
            return None, problem
        # Several are no word about the host: anybody can start a server with one of his own.
        known = versions - {None}
        return replace(facts.fingerprint, nccl_version=known.pop() if len(known) == 1 else None), ""


def host_of(
    python: str | None, environ: Mapping[str, str], files: SeenFiles = OWN
) -> tuple[HostFacts | None, str]:
    """Read the host as a server meets it, or why it cannot be read.

    Args:
        python: the server's interpreter.
        environ: of the server.
        files: as the server sees them; those of this process for a launch of its own.
    """
    # Loaded here, for NVML and what belongs to it are needed only where a profile is active.
    from nccltune.host.facts import read_host

    try:
        return read_host(python, environ, files=files), ""
    except (NccltuneError, OSError) as error:
        return None, str(error)


def shape_of(
    command: LaunchCommand, environ: Mapping[str, str], files: SeenFiles
) -> ModelShape | None:
    """Read the model of a server as that sees it; None where it cannot be found."""
    # Loaded here, as above.
    from nccltune.payloads.model_config import load_model_shape

    if command.model_path is None:
        return None
    try:
        return load_model_shape(command.model_path, files=files, environ=environ)
    except (NccltuneError, OSError):
        return None


def profile_data(profile: LiveProfile) -> dict[str, object]:
    """Lay out the active profile for scripts."""
    return {
        "name": profile.name,
        "digest": profile.digest or None,
        "settings": dict(profile.settings),
        "path": profile.path,
        "previous": profile.previous,
        "how": profile.how,
        "action": profile.action,
        "activated_at": profile.activated_at or None,
        "is_degraded": profile.is_degraded,
        "problem": profile.problem or None,
        "match": None if profile.match is None else str(profile.match),
        "differing": list(profile.differing),
        "is_stale": bool(profile.stale),
        "stale": list(profile.stale),
        "unknown": profile.unknown or None,
        "advice": profile.advice or None,
    }


def server_data(server: ServerReport) -> dict[str, object]:
    """Lay out one server for scripts."""
    path = server.path
    return {
        "pid": server.pid,
        "uid": server.uid,
        "command": list(server.command),
        "started_at": server.started_at,
        "route": server.route or None,
        "started_under": server.started_under or None,
        "expected_profile": server.expected,
        "verdict": str(server.verdict),
        "reason": server.reason,
        "fix": server.fix or None,
        "all_reduce_path": None if path is None else path.to_json(),
        "warnings": list(server.warnings),
        "ranks": [
            {
                "pid": rank.pid,
                "rank": rank.name,
                "problem": rank.problem or None,
                "keys": [key_data(key) for key in rank.keys],
            }
            for rank in server.ranks
        ],
    }


def key_data(key: KeyReport) -> dict[str, object]:
    """Lay out one variable of one rank for scripts."""
    return {
        "key": key.key,
        "expected": key.expected,
        "actual": key.actual,
        "state": str(key.state),
        "source": key.source or None,
        "note": key.note or None,
    }
