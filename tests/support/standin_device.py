"""A device for rank processes without a GPU: made-up times, real processes, and every fault on
demand.

Ranks wait for each other wherever real ones do. Times depend on the settings in the environment as
a made-up NCCL's would. ``STANDIN_FAULTS`` lists ``KIND@RANK:NAME=VALUE``, separated by ``;``. KIND
is crash, segfault, exit, reject, unsupported, error, leak (ignore SIGTERM, leave a child), gone
(the GPU is lost), wrong_collective, wrong_gather and unsupported_gather (of those that are timed),
hang_in_context, hang_in_reading (of memory), hang_in_init, hang_in_collective (once all ranks have
begun it), hang_between (two of them), child (leave one, with nothing else wrong), out_of_memory
(the kernel kills the rank and its parent; only once where ``STANDIN_ONCE`` names a file to leave
behind). ``STANDIN_IMPORT_S`` and ``STANDIN_EXIT_S`` are how long an interpreter takes to import
this, and a rank to end, in seconds.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from nccltune.bench.rank import RankSamples, Refused, Role, Unsupported
from tests.support.rendezvous import Rendezvous, open_rendezvous

if TYPE_CHECKING:
    from nccltune.bench.steps import Note
    from nccltune.measurement import PayloadRequest

BASE_US = 7.0
BYTES_PER_US = 300_000.0
HANG_S = 3600

time.sleep(float(os.environ.get("STANDIN_IMPORT_S", "0")))


def versions() -> dict[str, str]:
    """Versions of nothing."""
    if os.environ.get("CUDA_HOME") == "/broken":
        raise OSError("libnccl.so.2: cannot open shared object file")
    return {"torch": "0.0", "nccl": "0.0.0"}


def open_device(role: Role, note: Note) -> StandIn:
    """Take no GPU."""
    return StandIn(role, note)


class StandIn:
    """A rank on no GPU."""

    def __init__(self, role: Role, note: Note) -> None:
        self._role = role
        self._note = note
        self._rendezvous: list[Rendezvous] = []
        self._listener: socket.socket | None = None
        self._readings = 0
        seed = os.environ.get("NCCL_MIN_CTAS", "") + str(os.getpid())
        self._rng = random.Random(seed)

    def _has_fault(self, kind: str) -> bool:
        for wish in filter(None, os.environ.get("STANDIN_FAULTS", "").split(";")):
            head, _, setting = wish.partition(":")
            name, _, value = setting.partition("=")
            if head == f"{kind}@{self._role.rank}" and os.environ.get(name) == value:
                return True
        return False

    def _hang_on_demand(self, kind: str) -> None:
        if self._has_fault(kind):
            time.sleep(HANG_S)

    def open_context(self) -> None:
        """Fail where the GPU is to be gone."""
        if self._has_fault("gone"):
            raise RuntimeError("CUDA error: no CUDA-capable device is detected")
        self._hang_on_demand("hang_in_context")

    def unique_id(self) -> bytes:
        """Make an id."""
        name, self._listener = open_rendezvous(self._role.world_size)
        return name

    def connect(self, unique_id: bytes) -> None:
        """Read the settings as NCCL's init does."""
        self._note("joining")
        self._hang_on_demand("hang_in_init")
        if self._has_fault("reject"):
            raise Refused('ncclCommInitRank failed with code 5: Unrecognized element token "bogus"')
        self._rendezvous.append(Rendezvous(unique_id, self._listener, self._role.world_size))
        self._listener = None
        self._meet()

    def measure(self, request: PayloadRequest, seed: int) -> RankSamples:
        """Make up times."""
        self._fail_on_demand()
        self._collective("the first all-reduce")
        threshold = os.environ.get("NCCL_THREAD_THRESHOLDS", "")
        factor = 0.9 if threshold.split()[3:4] == ["4"] else 1.0
        factor *= 0.95 if os.environ.get("NCCL_MIN_CTAS") in ("16", "32") else 1.0
        is_folk = os.environ.get("NCCL_PROTO", "").endswith("LL") and request.size_bytes > 1 << 20
        factor *= 3.0 if is_folk else 1.0
        mean = factor * (BASE_US + request.size_bytes / BYTES_PER_US)
        self._hang_on_demand("hang_between")
        self._collective("the data check")
        launch = self._rng.gauss(1.0, 0.003)
        samples = [mean * launch * self._rng.gauss(1.0, 0.005) for _ in range(request.replay_count)]
        return RankSamples(tuple(samples), self._role.fault != "wrong_data")

    def measure_gather(self, request: PayloadRequest, seed: int) -> RankSamples:
        """Make up times: those of an all-reduce of all that is gathered, on rank 0 twice that."""
        if self._has_fault("unsupported_gather"):
            raise Unsupported("ncclAllGather failed with code 5: no algorithm/protocol available")
        self._collective("the first all-gather")
        whole = BASE_US + self._role.world_size * request.size_bytes / BYTES_PER_US
        samples = (whole * (2.0 if self._role.rank == 0 else 1.0),) * request.replay_count
        return RankSamples(samples, not self._has_fault("wrong_gather"))

    def _collective(self, name: str) -> None:
        self._note(f"waiting for {name}")
        self._hang_on_demand("hang_in_collective")
        self._meet()

    def _meet(self) -> None:
        for one in self._rendezvous:
            one.meet()

    def _fail_on_demand(self) -> None:
        if self._has_fault("segment"):
            with open(f"/dev/shm/nccl-standin{os.getpid()}", "wb") as segment:  # noqa: PTH123
                segment.write(bytes(4096))
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._has_fault("crash"):
            os.kill(os.getpid(), signal.SIGFPE)
        if self._has_fault("out_of_memory"):
            _run_out_of_memory(os.environ.get("STANDIN_ONCE", ""))
        if self._has_fault("segfault"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._has_fault("exit"):
            print("vm:1:1 [0] NCCL WARN something told on the way out", flush=True)  # noqa: T201
            os._exit(3)
        if self._has_fault("unsupported"):
            raise Unsupported("ncclAllReduce failed with code 5: no algorithm/protocol available")
        if self._has_fault("error"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self._has_fault("leak"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _start_child()
            time.sleep(HANG_S)

    def free_bytes(self) -> int:
        """Shrink by a made-up 64 MiB with each reading."""
        self._hang_on_demand("hang_in_reading")
        self._readings += 1
        return (1 << 34) - (self._readings << 26)

    def check_collectives(self, seed: int) -> dict[str, bool]:
        """Say that all is well, or not."""
        self._collective("all_gather")
        is_right = not self._has_fault("wrong_collective")
        return {"all_gather": is_right, "broadcast": True, "reduce_scatter": True}

    def close(self) -> None:
        """End as slowly as a process does whose driver takes its time."""
        if self._has_fault("child"):
            _start_child()
        exit_s = float(os.environ.get("STANDIN_EXIT_S", "0"))
        end = os._exit

        def slow_exit(status: int) -> None:
            time.sleep(exit_s)
            end(status)

        os._exit = slow_exit  # type: ignore[assignment]


def _start_child() -> None:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_S})"])


def _run_out_of_memory(mark: str) -> None:
    """Be killed together with the parent, as the kernel may choose to."""
    if mark and os.path.exists(mark):  # noqa: PTH110
        return
    if mark:
        open(mark, "w").close()  # noqa: PTH123
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
