"""Everything that can be refused before a server is started."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import BusyError, FileError, ServerError, UsageProblem
from nccltune.host.server_python import find_python, installed_version, package_dirs
from nccltune.inject.decision import apply, decide
from nccltune.inject.marker import KEEP_ENVIRON, KEEP_ENVIRON_VALUE
from nccltune.live.stock import host_of
from nccltune.sdnotify import OWN_VARIABLES
from nccltune.sglang.argv import environ_at_server
from nccltune.sglang.command import LaunchCommand, parse_launch
from nccltune.sglang.endpoints import Endpoint, endpoint_of, is_answered
from nccltune.store import Launches
from nccltune.verify.sameness import resolved_flags
from nccltune.verify.serving.seen import active_state

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.store import LaunchRecord
    from nccltune.verify.model import Arm
    from nccltune.verify.sameness import Flags
    from nccltune.verify.spec import VerifySpec

HOOK_VARIABLE = "NCCLTUNE_HOOK"
"""Set to 0 it keeps the hook in SGLang from bringing the active profile into an arm."""

_PATH_STARTS = ("/", "./", "../", "~")
_PORT_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ReadyArm:
    """An arm with all that its server is given.

    Attributes:
        environ: the server's whole environment.
        flags: of its launch, with those of the ``--config`` file as it was read.
        record: of its launch, to be completed with the process.
        endpoint: where it will listen.
        address: what it will bind: host as typed, and port.
    """

    arm: Arm
    environ: Mapping[str, str]
    flags: Flags
    record: LaunchRecord
    endpoint: Endpoint
    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Ground:
    """What holds for all arms.

    Attributes:
        fingerprint: None where the driver does not say.
        sglang_version: of the installation that the launch starts; None where it is not known.
        notes: what the reader should know.
    """

    arms: tuple[ReadyArm, ...]
    fingerprint: Fingerprint | None
    sglang_version: str | None
    notes: tuple[str, ...]


def prepare(spec: VerifySpec) -> Ground:
    """Check every arm and work out its environment.

    Raises:
        UsageProblem: a profile that would not be used in this launch.
        FileError: the model, the draft model or the ``--config`` file is not there.
        ServerError: the program is not there.
        BusyError: somebody listens where the server would.
    """
    environ = {name: each for name, each in spec.environ.items() if name not in OWN_VARIABLES}
    command = parse_launch(spec.launch)
    _check_program(spec.launch[0], environ)
    _check_models(command)
    notes: list[str] = []
    arms: list[ReadyArm] = []
    for arm in spec.arms:
        ready, warnings = _ready(arm, environ, is_any_host=spec.is_any_host)
        arms.append(ready)
        notes += [f"{arm.name}: {text}" for text in (arm.note, *warnings) if text]
    for ready in arms:
        await_port(ready, 0.0)
    seen = environ_at_server(command.argv, environ)
    python = find_python(command.argv, seen)
    host, problem = host_of(python, seen)
    if host is None:
        notes.append(f"GPU memory is not watched between boots: {problem}")
    fingerprint = None if host is None else host.fingerprint
    version = installed_version(package_dirs(python, seen), "sglang") if python else None
    return Ground(tuple(arms), fingerprint, version, tuple(dict.fromkeys(notes)))


def await_port(ready: ReadyArm, limit_s: float) -> None:
    """Wait until nobody listens where the server will.

    Raises:
        BusyError: somebody still does after that time.
    """
    end_s = time.monotonic() + limit_s
    while is_answered(ready.endpoint) or not _can_bind(*ready.address):
        if time.monotonic() >= end_s:
            _host, port = ready.address
            raise BusyError(
                f"port {port} is in use, and the server would listen there: stop what listens, or "
                f"give the launch another --port (a server that runs is measured by --url "
                f"{ready.endpoint.url})",
                code="port_in_use",
            )
        time.sleep(_PORT_POLL_S)


def _ready(
    arm: Arm, environ: Mapping[str, str], *, is_any_host: bool
) -> tuple[ReadyArm, tuple[str, ...]]:
    decision, record = decide(
        arm.argv,
        environ,
        route="verify",
        is_any_host=is_any_host,
        launches=Launches.ALL,
        active=active_state(arm.profile),
    )
    if arm.profile is not None and not decision.is_applied:
        raise UsageProblem(
            f"arm {arm.word or arm.name}: {decision.reason}", code="profile_not_used"
        )
    own = apply(environ, decision)
    # Both kinds of arm alike: ranks that can be looked at, and no hook that has ideas of its own.
    own.setdefault(KEEP_ENVIRON, KEEP_ENVIRON_VALUE)
    own[HOOK_VARIABLE] = "0"
    command = parse_launch(arm.argv)
    endpoint = endpoint_of(command)
    host = command.value("host") or endpoint.host
    flags = resolved_flags(command)
    ready = ReadyArm(arm, own, flags, record, endpoint, (host, endpoint.port))
    return ready, decision.warnings


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    if shutil.which(name, path=environ.get("PATH", os.defpath)) is None:
        raise ServerError(
            f"{name}: command not found; give the whole path of the program", code="cannot_start"
        )


def _check_models(command: LaunchCommand) -> None:
    """Refuse a model that is a path and leads nowhere; other names may be a hub's."""
    for flag, name in (
        ("--model-path", command.model_path),
        ("--speculative-draft-model-path", command.draft_model_path),
    ):
        is_path = name is not None and name.startswith(_PATH_STARTS)
        if name is not None and is_path and not Path(name).expanduser().exists():
            raise FileError(name, f"no such file or folder, and {flag} names it", code="no_model")


def _can_bind(host: str, port: int) -> bool:
    """Tell whether a server could listen there now; what cannot be tried counts as yes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True
