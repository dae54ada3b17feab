"""What is looked at: one host, one interpreter, one launch where there is one. Read once, together.

Every place that is read can be replaced, so that any host can be put before the checks.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.doctor.gpus import choose
from nccltune.doctor.interpreter import Interpreter, find_interpreter, own_interpreter
from nccltune.doctor.server import ProbedServer, ProbeError, probe_server
from nccltune.errors import HostError, NccltuneError
from nccltune.host.conf_files import ConfFile, effective_settings, read_conf_files
from nccltune.host.facts import nccl_version
from nccltune.host.hardware import Gpu, Hardware, read_gpus
from nccltune.paths import reading_dir
from nccltune.payloads.model_config import load_model_shape
from nccltune.sglang.argv import environ_at_server
from nccltune.sglang.command import LaunchCommand, parse_launch
from nccltune.store import ActiveState, read_active

if TYPE_CHECKING:
    from types import ModuleType

    from nccltune.host.fingerprint import Fingerprint, LinkMatrix
    from nccltune.payloads.shapes import ModelShape

_HOME_FROM_ENVIRONMENT = (2, 30, 3)
"""NCCL from this version on takes ``$HOME`` for its home, before it the user database."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where readings come from.

    Attributes:
        environ: what the server would be started in, as far as the caller knows.
        root: where ``proc``, ``sys``, ``dev`` and ``etc`` are.
        nvml: stands in for ``pynvml``; None for the real one.
        user_home: of this user by the user database; None where it has none.
        probe: asks an interpreter.
    """

    environ: Mapping[str, str]
    root: Path = Path("/")
    nvml: ModuleType | None = None
    user_home: Path | None = None
    probe: Callable[[Path, Mapping[str, str]], ProbedServer] = probe_server

    @property
    def proc(self) -> Path:
        """Where procfs is."""
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        """Where sysfs is."""
        return self.root / "sys"

    @property
    def dev(self) -> Path:
        """Where devices are."""
        return self.root / "dev"


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that several checks need.

    Attributes:
        environ: what SGLang finds: the caller's, but for what ``env`` in the command does to it.
        interpreter: of the server; its path is None where that is not known.
        server: what that interpreter would load; None where it gave no answer.
        server_problem: why not.
        assumed_nccl: version that launches take the server's NCCL for, told without starting it.
        gpus: those of the launch's first group of ranks, in rank order; without a launch all
            visible ones.
        visible: every GPU that the launch would see, in its order.
        gpu_error: why there are none, or not enough.
        shape: of the launch's model; None where it cannot be read, and ``shape_problem`` says why.
        conf_files: NCCL's own configuration files, the strongest first.
    """

    sources: Sources
    environ: Mapping[str, str]
    launch: LaunchCommand | None
    interpreter: Interpreter
    server: ProbedServer | None
    server_problem: str
    assumed_nccl: str | None
    hardware: Hardware | None
    nvml_error: HostError | None
    gpus: tuple[Gpu, ...]
    gpu_error: NccltuneError | None
    active: ActiveState
    state_dir: Path | None
    state_problem: str
    shape: ModelShape | None = None
    shape_problem: str = ""
    visible: tuple[Gpu, ...] = ()
    conf_files: tuple[ConfFile, ...] = field(default=())

    @property
    def links(self) -> LinkMatrix:
        """Ways between the GPUs of the launch; empty where not known."""
        if self.hardware is None or not self.gpus:
            return ()
        return self.hardware.restricted_to(self.gpus).links

    @property
    def here(self) -> Fingerprint | None:
        """The GPUs of the launch, as a profile found on them would hold them; None without any."""
        return self._fingerprint(self.gpus)

    @property
    def seen_by_launch(self) -> Fingerprint | None:
        """Every GPU that the launch sees, in its order; None where that is not known."""
        return self._fingerprint(self.visible)

    def _fingerprint(self, gpus: tuple[Gpu, ...]) -> Fingerprint | None:
        if self.hardware is None or not gpus:
            return None
        server = self.server
        return self.hardware.fingerprint(
            gpus,
            nccl_version=None if server is None else server.nccl_version,
            torch_version=None if server is None else server.torch_version,
        )

    @property
    def nccl_environ(self) -> dict[str, str]:
        """What NCCL goes by in a launch: its files, the active profile, the environment."""
        profile = self.active.profile
        conf = {n: v for n, (v, _) in effective_settings(self.conf_files, self.environ).items()}
        return {**conf, **(profile.settings if profile else {}), **self.environ}


def own_sources() -> Sources:
    """Return the sources of this process: the host as it is."""
    home: Path | None = None
    with suppress(KeyError):  # a container's user that has no entry
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    return Sources(environ=dict(os.environ), user_home=home)


def read_case(sources: Sources, *, python: Path | None = None, argv: tuple[str, ...] = ()) -> Case:
    """Read what the checks need.

    Args:
        sources: where from.
        python: the server's interpreter; None to find it by the launch command.
        argv: the launch command; empty for none.

    Raises:
        UsageProblem: not an SGLang launch.
        FileError: the launch's ``--config`` file cannot be used.
    """
    launch = parse_launch(argv) if argv else None
    environ = environ_at_server(argv, sources.environ) if launch else sources.environ
    interpreter = _interpreter(python, argv, environ)
    server, server_problem = _ask(sources, interpreter, environ)
    hardware, nvml_error = _hardware(sources)
    chosen = choose(hardware, environ, launch)
    folder, state_problem = _state_dir(sources.environ)
    shape, shape_problem = _shape(launch)
    return Case(
        sources=sources,
        environ=environ,
        launch=launch,
        interpreter=interpreter,
        server=server,
        server_problem=server_problem,
        assumed_nccl=None
        if interpreter.path is None
        else nccl_version(str(interpreter.path), environ),
        hardware=hardware,
        nvml_error=nvml_error,
        gpus=chosen.gpus,
        gpu_error=chosen.error,
        active=read_active(folder),
        state_dir=folder,
        state_problem=state_problem,
        shape=shape,
        shape_problem=shape_problem,
        visible=chosen.visible,
        conf_files=_conf_files(sources, environ, server),
    )


def _interpreter(
    python: Path | None, argv: tuple[str, ...], environ: Mapping[str, str]
) -> Interpreter:
    if python is not None:
        return Interpreter(python.absolute())
    if argv:
        return find_interpreter(argv, environ)
    return own_interpreter()


def _ask(
    sources: Sources, interpreter: Interpreter, environ: Mapping[str, str]
) -> tuple[ProbedServer | None, str]:
    if interpreter.path is None:
        return None, interpreter.problem
    try:
        return sources.probe(interpreter.path, environ), ""
    except ProbeError as error:
        return None, str(error)


def _hardware(sources: Sources) -> tuple[Hardware | None, HostError | None]:
    try:
        return read_gpus(sources.nvml, sys_root=sources.sys), None
    except HostError as error:
        return None, error


def _state_dir(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    try:
        return reading_dir(environ), ""
    except NccltuneError as problem:
        return None, str(problem)


def _shape(launch: LaunchCommand | None) -> tuple[ModelShape | None, str]:
    if launch is None or launch.model_path is None:
        return None, "the launch names no model"
    try:
        return load_model_shape(launch.model_path, is_draft=True), ""
    except NccltuneError as error:
        return None, str(error)


def _conf_files(
    sources: Sources, environ: Mapping[str, str], server: ProbedServer | None
) -> tuple[ConfFile, ...]:
    home = sources.user_home
    version = server.nccl_version if server is not None else None
    if version is not None and _numbers(version) >= _HOME_FROM_ENVIRONMENT:
        home = Path(environ["HOME"]) if environ.get("HOME") else None
    return tuple(read_conf_files(environ, home, sources.root / "etc" / "nccl.conf"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
