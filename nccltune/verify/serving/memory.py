"""Sees GPU memory come back after a server, before the next one is started."""

from __future__ import annotations

from collections.abc import Collection

from nccltune.bench.faults import RankFault
from nccltune.bench.gpu_watch import GpuWatch
from nccltune.errors import HostError
from nccltune.host.hardware import read_foreign_processes, read_memory_used_bytes


class MemoryWatch:
    """GPU memory around one boot.

    Args:
        uuids: of the GPUs that servers see; none where the driver does not say, and then nothing
            is watched.
    """

    def __init__(self, uuids: Collection[str]) -> None:
        self._uuids = uuids
        self._watch = GpuWatch((lambda: read_memory_used_bytes(uuids)) if uuids else None)

    def others(self) -> tuple[str, ...]:
        """Say who computes on the GPUs before anything of ours does; figures are theirs too."""
        try:
            found = read_foreign_processes(self._uuids, ()) if self._uuids else []
        except HostError as error:
            return (f"who else computes on the GPUs is not known: {error}",)
        return tuple(
            f"process {other.process.pid} computes on GPU {other.uuid}: what it does slows the "
            "servers down, and takes their memory"
            for other in found
        )

    def begin(self) -> None:
        """Remember what is in use before a boot.

        Raises:
            HostError: the driver does not answer.
        """
        try:
            self._watch.begin()
        except RankFault as fault:
            raise HostError(str(fault), code="driver") from fault

    def held(self) -> str:
        """Wait for the memory, and say what did not come back; empty where all did."""
        fault = self._watch.await_memory()
        return "" if fault is None else str(fault)
