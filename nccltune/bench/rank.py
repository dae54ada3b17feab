"""The program of one rank: take its environment, answer commands, tell refusals apart.

It knows no torch. What it drives is a ``RankDevice``: the GPU in production, a stand-in in tests.
Commands arrive and answers leave on one connection; anything a library prints goes to the rank's
own log file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nccltune.bench.steps import Note, StepFile

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from nccltune.measurement import PayloadRequest

FAULT_VARIABLE = "NCCLTUNE_TEST_FAULT"
"""Test hook: ``hang`` or ``wrong_data``, then ``@RANK`` and ``:NAME=VALUE``; acts only when that
setting is in force."""

HANG_S = 86400
PR_SET_PDEATHSIG = 1


class Refused(Exception):
    """The communicator's init refused the settings."""


class Unsupported(Exception):
    """A collective refused the settings at its first use."""


@dataclass(frozen=True, slots=True)
class Role:
    """Which rank this is, and on which device."""

    rank: int
    world_size: int
    device_ordinal: int
    fault: str = ""
    """What the test hook wants to go wrong here: ``hang``, ``wrong_data`` or nothing."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """All that a forked rank needs before its first command."""

    role: Role
    environ: dict[str, str]
    log_path: str
    step_path: str
    cpu_set: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RankSamples:
    """One rank's times of one payload, us per collective for each replay.

    And whether its data was right.
    """

    samples_us: tuple[float, ...]
    is_data_ok: bool


class RankDevice(Protocol):
    """What a rank drives; ``nccltune.bench.device.CudaRank`` says what each call means."""

    def open_context(self) -> None:
        """Take the GPU."""

    def unique_id(self) -> bytes:
        """Make the id of a communicator."""

    def connect(self, unique_id: bytes) -> None:
        """Join a communicator; raises Refused."""

    def measure(self, request: PayloadRequest, seed: int) -> RankSamples:
        """Time one payload and check its data; raises Unsupported."""

    def measure_gather(self, request: PayloadRequest, seed: int) -> RankSamples:
        """Time one all-gather and check its data; raises Unsupported."""

    def free_bytes(self) -> int:
        """Read the free GPU memory."""

    def check_collectives(self, seed: int) -> dict[str, bool]:
        """Run the other collectives: name -> whether the data was right."""

    def close(self) -> None:
        """Give the communicators back."""


OpenDevice = Callable[[Role, Note], RankDevice]
"""Takes a rank's device, which notes its steps wherever it may have to wait for other ranks."""


def run_rank(connection: Connection, job: RankJob, open_device: OpenDevice) -> None:
    """Serve commands until told to leave; never returns by exception.

    Answers are ``(kind, value)``: ``ok``, ``rejected``, ``unsupported`` or ``error`` with a
    message.
    """
    _settle(job)
    role = dataclasses.replace(job.role, fault=_fault(job))
    device: RankDevice | None = None
    steps = StepFile(job.step_path)
    connection.send(("ok", os.getpid()))
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        if command == "leave":
            connection.send(("ok", None))
            return
        try:
            if device is None:
                device = open_device(role, steps.note)
            if command == "measure" and role.fault == "hang":
                time.sleep(HANG_S)
            answer: tuple[str, Any] = ("ok", getattr(device, command)(*arguments))
        except Refused as error:
            answer = ("rejected", str(error))
        except Unsupported as error:
            answer = ("unsupported", str(error))
        except Exception as error:  # noqa: BLE001 - a rank's fault becomes an answer, whatever it is
            answer = ("error", f"{type(error).__name__}: {error}".splitlines()[0])
        steps.rest()
        connection.send(answer)


def _settle(job: RankJob) -> None:
    """Become a process group of its own that dies with the server.

    With the job's environment and output.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(job.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(job.environ)
    if job.cpu_set:
        os.sched_setaffinity(0, job.cpu_set)


def _fault(job: RankJob) -> str:
    """Return the fault that the test hook asks of this rank under these settings."""
    for wish in filter(None, job.environ.get(FAULT_VARIABLE, "").split(";")):
        head, _, setting = wish.partition(":")
        kind, _, rank = head.partition("@")
        name, _, value = setting.partition("=")
        if job.environ.get(name) == value and job.role.rank == int(rank or 0):
            return kind
    return ""
