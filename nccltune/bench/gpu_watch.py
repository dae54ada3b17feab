"""Keeps an eye on the GPUs around a launch: nobody else may compute, and memory must come back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from nccltune.bench.faults import RankFault
from nccltune.errors import HostError
from nccltune.measurement import Outcome

MEMORY_RETURN_DEADLINE_S = 10.0
"""How long the driver may take to give a killed rank's memory back before the host counts as
broken."""

MEMORY_POLL_S = 0.1
MEMORY_TOLERANCE_BYTES = 256 << 20
"""Used GPU memory moves by less than this when nobody works on it; a lost rank holds its CUDA
context and more."""

ReadUsedBytes = Callable[[], Mapping[str, int]]
ReadProcesses = Callable[[], Sequence[str]]
"""The GPU of every process that computes on one of ours, once a process."""


class GpuWatch:
    """Watches the GPUs of one bench.

    Args:
        read_used_bytes: memory in use by GPU; None: not looked at.
        read_processes: None: not looked at, as when somebody else was accepted from the start.

    Processes are counted, not named: in a container the driver may tell other process ids than the
    ones we know our ranks by.
    """

    def __init__(
        self,
        read_used_bytes: ReadUsedBytes | None = None,
        read_processes: ReadProcesses | None = None,
    ) -> None:
        self._read_used_bytes = read_used_bytes
        self._read_processes = read_processes
        self._used_before: Mapping[str, int] = {}

    def begin(self) -> None:
        """Remember what is in use before a launch.

        Raises:
            RankFault: the driver does not answer.
        """
        if self._read_used_bytes is not None:
            try:
                self._used_before = self._read_used_bytes()
            except HostError as error:
                raise RankFault(Outcome.HOST_FAILED, str(error), None) from error

    def check_alone(self, ranks_by_gpu: Mapping[str, int]) -> None:
        """See that nobody but our ranks computes on the GPUs.

        Raises:
            RankFault: somebody does, or the driver does not answer.
        """
        if self._read_processes is None:
            return
        try:
            seen = Counter(self._read_processes())
        except HostError as error:
            raise RankFault(Outcome.HOST_FAILED, str(error), None) from error
        for gpu, count in seen.items():
            if count > ranks_by_gpu.get(gpu, 0):
                message = f"somebody else computes on GPU {gpu}: {count} processes are on it"
                raise RankFault(Outcome.HOST_BUSY, message, None)

    def await_memory(self) -> RankFault | None:
        """After a kill: see the memory come back, or return that the host is broken."""
        end = time.monotonic() + MEMORY_RETURN_DEADLINE_S
        message = self._held_memory()
        while message and time.monotonic() < end:
            time.sleep(MEMORY_POLL_S)
            message = self._held_memory()
        return RankFault(Outcome.HOST_FAILED, message, None) if message else None

    def _held_memory(self) -> str:
        """Say which GPU still holds memory that was free before; nothing when all is well."""
        if self._read_used_bytes is None:
            return ""
        try:
            used = self._read_used_bytes()
        except HostError as error:
            return str(error)
        for gpu, used_bytes in used.items():
            held_bytes = used_bytes - self._used_before.get(gpu, used_bytes)
            if held_bytes > MEMORY_TOLERANCE_BYTES:
                return f"{held_bytes >> 20} MiB did not come back on GPU {gpu} after a kill"
        return ""
