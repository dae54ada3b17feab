"""From a launch command to what is done to its environment: reads the store and the host, decides.

Whatever goes wrong here is a reason to start without a profile, never a reason not to start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nccltune.errors import FileError, NccltuneError, UsageProblem
from nccltune.host.server_python import find_python, installed_version, package_dirs
from nccltune.inject.marker import (
    KEEP_ENVIRON,
    KEEP_ENVIRON_VALUE,
    MARKER,
    NOTHING_APPLIED,
    format_marker,
)
from nccltune.inject.resolver import Decision, resolve
from nccltune.inject.screening import screen
from nccltune.paths import reading_dir
from nccltune.sglang.argv import environ_at_server, split_launch
from nccltune.store import ActiveState, LaunchRecord, Policy, read_active, read_policy

if TYPE_CHECKING:
    from nccltune.host.facts import HostFacts
    from nccltune.payloads.shapes import ModelShape
    from nccltune.sglang.command import LaunchCommand
    from nccltune.store import Launches

GpuReader = Callable[[Mapping[str, str]], "HostFacts"]

_DIGEST_CHARS = 16


class Injection(NamedTuple):
    """A decision, and the record of the launch that it was made for."""

    decision: Decision
    record: LaunchRecord


def decide(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    route: str = "run",
    is_any_host: bool = False,
    launches: Launches | None = None,
    active: ActiveState | None = None,
    pid: int | None = None,
    read_gpus: GpuReader | None = None,
) -> Injection:
    """Decide what a launch is given; never raises for a fault of store, host or tool.

    Args:
        argv: the launch command as typed, wrappers included.
        environ: the environment that it is started in.
        route: ``run``, ``launch``, ``hook`` or ``verify``.
        is_any_host: a person overrides the rules about hosts.
        launches: which launches are covered; None for what the policy file says.
        active: stands in for what the store says is active.
        pid: of the process that is or becomes the server; this one's if None.
        read_gpus: reads the GPUs that an environment shows; None for NVML, here and now.
    """
    try:
        decision = _decide(argv, environ, launches, active, read_gpus, is_any_host=is_any_host)
    except Exception as error:  # noqa: BLE001 - no fault of ours may cost a launch
        reason = f"this is a bug in nccltune: {type(error).__name__}: {error}"
        decision = Decision(reason, is_degraded=True)
    return Injection(decision, make_record(argv, environ, decision, route=route, pid=pid))


def apply(environ: Mapping[str, str], decision: Decision) -> dict[str, str]:
    """Return the environment that a launch is given.

    Nothing but variables of the catalogue and the tool's own two names is ever added.
    """
    gone = {*decision.removed, MARKER}
    result = {name: value for name, value in environ.items() if name not in gone}
    if decision.digest is None:
        if decision.is_launch:
            result[MARKER] = NOTHING_APPLIED
        return result
    result.update(decision.applied)
    result[MARKER] = format_marker(decision.digest, decision.applied)
    result.setdefault(KEEP_ENVIRON, KEEP_ENVIRON_VALUE)
    return result


def make_record(
    argv: Sequence[str],
    environ: Mapping[str, str],
    decision: Decision,
    *,
    route: str,
    pid: int | None = None,
) -> LaunchRecord:
    """Write down a launch that is about to start, or has just started as process ``pid``."""
    number = os.getpid() if pid is None else pid
    return LaunchRecord(
        route=route,
        pid=number,
        started_ticks=_started_ticks(number),
        boot_id=_boot_id(),
        launched_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command_digest=command_digest(argv),
        profile_name=decision.profile_name,
        digest=decision.digest,
        settings=decision.applied,
        kept=decision.kept_from_operator,
        reason=decision.reason,
        is_degraded=decision.is_degraded,
        invocation_id=environ.get("INVOCATION_ID", ""),
    )


def command_digest(argv: Sequence[str]) -> str:
    """Name a command by what is asked of SGLang, whatever program and wrappers stand before it."""
    try:
        _start, tokens = split_launch(tuple(argv))
    except UsageProblem:
        tokens = list(argv)
    text = "\0".join(tokens)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGEST_CHARS]


def _decide(
    argv: Sequence[str],
    environ: Mapping[str, str],
    launches: Launches | None,
    chosen: ActiveState | None,
    read_gpus: GpuReader | None,
    *,
    is_any_host: bool,
) -> Decision:
    stored, policy, warnings = _store(environ, launches)
    active = stored if chosen is None else chosen
    command = screen(argv, active, policy, is_any_host=is_any_host).command
    facts: HostFacts | None = None
    host_problem = ""
    shape: ModelShape | None = None
    version: str | None = None
    if command is not None:
        # Of one environment all of it: what SGLang will find, and nothing that env keeps from it.
        seen = environ_at_server(argv, environ)
        python = find_python(argv, seen)
        shape = read_shape(command)
        version = (
            None if python is None else installed_version(package_dirs(python, seen), "sglang")
        )
        # Last, for another process may be waiting for the driver meanwhile.
        facts, host_problem = _host(python, seen, read_gpus)
    decision = resolve(
        argv=argv,
        environ=environ,
        active=active,
        here=facts.fingerprint if facts else None,
        policy=policy,
        sglang_version=version,
        is_any_host=is_any_host,
        host_problem=host_problem,
        gpu_architecture=facts.gpu_architecture if facts else None,
        shape=shape,
    )
    return replace(decision, warnings=(*warnings, *decision.warnings)) if warnings else decision


def _store(
    environ: Mapping[str, str], launches: Launches | None
) -> tuple[ActiveState, Policy, tuple[str, ...]]:
    """Read the store; a policy that cannot be read is the one that is used without a file."""
    try:
        folder = reading_dir(environ)
    except NccltuneError as problem:
        return ActiveState(None, None, str(problem), Path()), Policy(), ()
    active = read_active(folder)
    warnings = (active.warning,) if active.warning else ()
    if launches is not None:
        return active, Policy(launches), warnings
    try:
        return active, read_policy(folder), warnings
    except FileError as error:
        reason = f"{error}; EAGLE-3 launches alone get a profile"
        return active, Policy(), (*warnings, reason)


def _host(
    python: str | None, environ: Mapping[str, str], read_gpus: GpuReader | None
) -> tuple[HostFacts | None, str]:
    # Loaded here, for a launch that gets no profile never looks at the host.
    from nccltune.host.facts import nccl_version, read_visible, with_nccl

    try:
        version = nccl_version(python, environ)
        return with_nccl((read_gpus or read_visible)(environ), version), ""
    except NccltuneError as error:
        return None, str(error)


def read_shape(command: LaunchCommand) -> ModelShape | None:
    """Read the model of a launch; None where it cannot be found from here."""
    # Loaded here, as above.
    from nccltune.payloads.model_config import load_model_shape

    if command.model_path is None:
        return None
    try:
        return load_model_shape(command.model_path)
    except (NccltuneError, OSError):
        return None


def _started_ticks(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        # The name before it may hold blanks and brackets.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
