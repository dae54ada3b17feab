"""One rank's GPU work: buffers, CUDA graphs, timing and data check; the only importer of torch.

It does what SGLang's decode graphs do: bf16, in place, on the capture stream, as many all-reduces
in one CUDA graph as a forward pass has. A sample is one replay's time over its all-reduces, between
two CUDA events.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nccltune.bench.data_check import plan_check
from nccltune.bench.nccl import Nccl, NcclError, library_path
from nccltune.bench.rank import RankSamples, Refused, Role, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import c_void_p

    from nccltune.bench.steps import Note
    from nccltune.measurement import PayloadRequest

COLLECTIVE_COUNT = 61440
"""Elements a rank gathers in the check of other collectives: SGLang's logits gather has this order
of magnitude."""


def open_device(role: Role, note: Note) -> CudaRank:
    """Take a rank's GPU."""
    return CudaRank(role, note)


def versions() -> dict[str, str]:
    """Versions that results depend on, read without touching CUDA."""
    return {"torch": torch.__version__, "nccl": Nccl(library_path()).version()}


class CudaRank:
    """A rank on a real GPU."""

    def __init__(self, role: Role, note: Note) -> None:
        self._role = role
        self._note = note
        self._nccl = Nccl(library_path())
        self._communicators: list[c_void_p] = []

    def open_context(self) -> None:
        """Create the CUDA context and the stream that everything runs on."""
        torch.cuda.set_device(self._role.device_ordinal)
        self._device = torch.device("cuda", self._role.device_ordinal)
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        torch.zeros(1, device=self._device)
        torch.cuda.synchronize()

    def unique_id(self) -> bytes:
        """Make the id of a communicator."""
        return self._nccl.unique_id()

    def connect(self, unique_id: bytes) -> None:
        """Join a communicator.

        Raises:
            Refused: NCCL does not accept the settings.
        """
        self._note("joining")
        try:
            communicator = self._nccl.init_rank(unique_id, self._role.rank, self._role.world_size)
        except NcclError as error:
            raise Refused(str(error)) from error
        self._communicators.append(communicator)

    def measure(self, request: PayloadRequest, seed: int) -> RankSamples:
        """Time one payload; its data is checked before and after.

        Raises:
            Unsupported: NCCL has no algorithm for it under these settings.
        """
        buffer = torch.empty(request.size_bytes // 2, dtype=torch.bfloat16, device=self._device)
        buffer.fill_(1.0)
        all_reduce = partial(self._all_reduce, buffer)
        self._run_first(all_reduce, "all-reduce")
        graph = self._capture(all_reduce, request.graph_count)
        check = self._checker(buffer, request.graph_count, graph, seed)
        is_data_ok = check()
        self._note("timing the graph")
        samples_us = _time_us(graph, request)
        is_data_ok = check() and is_data_ok
        return RankSamples(samples_us, is_data_ok)

    def measure_gather(self, request: PayloadRequest, seed: int) -> RankSamples:
        """Time one all-gather, of so many bytes from each rank; its data is checked afterwards.

        Raises:
            Unsupported: NCCL has no algorithm for it under these settings.
        """
        count, world = request.size_bytes // 2, self._role.world_size
        parts = [_pattern(count, r, seed, 4, self._device).to(torch.bfloat16) for r in range(world)]
        mine, expected = parts[self._role.rank], torch.cat(parts)
        result = torch.zeros_like(expected)
        all_gather = partial(self._all_gather, mine, result, self._communicators[0])
        self._run_first(all_gather, "all-gather")
        graph = self._capture(all_gather, request.graph_count)
        self._note("timing the graph")
        samples_us = _time_us(graph, request)
        result.zero_()
        graph.replay()
        self._await("the data check")
        return RankSamples(samples_us, bool(torch.equal(result, expected)))

    def free_bytes(self) -> int:
        """GPU memory that is free now."""
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    def check_collectives(self, seed: int) -> dict[str, bool]:
        """Run what a server needs beside all-reduce, on every communicator, with data check."""
        rank, world = self._role.rank, self._role.world_size
        pieces = [
            _pattern(COLLECTIVE_COUNT, other, seed, 4, self._device) for other in range(world)
        ]
        results: dict[str, bool] = {}
        for communicator in self._communicators:
            for name, run in (
                ("all_gather", self._all_gather_is_right),
                ("broadcast", self._broadcast_is_right),
                ("reduce_scatter", self._reduce_scatter_is_right),
            ):
                self._note(f"enqueueing {name}")
                try:
                    is_right = run(communicator, pieces, rank)
                except NcclError as error:
                    raise Unsupported(f"{name}: {error}") from error
                results[name] = is_right and results.get(name, True)
        return results

    def close(self) -> None:
        """Finish what runs; communicators and context go with the process, as a server's do.

        Destroying them first costs time in every trial and frees nothing more.
        """
        torch.cuda.synchronize()

    def _run_first(self, collective: Callable[[], None], name: str) -> None:
        # NCCL connects lazily at the first use of an algorithm, which may not happen inside a
        # capture.
        self._note(f"enqueueing the first {name}")
        try:
            collective()
        except NcclError as error:
            raise Unsupported(str(error)) from error
        self._await(f"the first {name}")

    def _await(self, what: str) -> None:
        """Wait until the GPU has finished; never called while a graph is timed."""
        self._note(f"waiting for {what}")
        torch.cuda.synchronize()

    def _all_reduce(self, buffer: torch.Tensor) -> None:
        self._nccl.all_reduce(
            buffer.data_ptr(), buffer.numel(), self._communicators[0], self._stream.cuda_stream
        )

    def _all_gather(self, mine: torch.Tensor, result: torch.Tensor, communicator: c_void_p) -> None:
        self._nccl.all_gather(
            mine.data_ptr(), result.data_ptr(), mine.numel(), communicator, self._stream.cuda_stream
        )

    def _capture(self, collective: Callable[[], None], count: int) -> Any:
        self._note("capturing the graph")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(count):
                collective()
        return graph

    def _checker(
        self, buffer: torch.Tensor, graph_count: int, graph: Any, seed: int
    ) -> Callable[[], bool]:
        """Return a check that compares every element of a replay with the exact answer.

        It replays the timed graph itself, or a shorter one where that would end in infinity.
        """
        world = self._role.world_size
        plan = plan_check(world, graph_count)
        if plan.chain_count != graph_count:
            graph = self._capture(partial(self._all_reduce, buffer), plan.chain_count)
        parts = [_pattern(buffer.numel(), r, seed, plan.limit, self._device) for r in range(world)]
        total = sum(parts[1:], parts[0])
        expected = (total.double() * plan.factor).float().to(torch.bfloat16)
        mine = (parts[self._role.rank] * plan.scale).to(torch.bfloat16)
        if self._role.fault == "wrong_data":
            mine[-1] += 1.0

        def is_right() -> bool:
            buffer.copy_(mine)
            graph.replay()
            self._await("the data check")
            return bool(torch.equal(buffer, expected))

        return is_right

    def _all_gather_is_right(
        self, communicator: c_void_p, pieces: list[torch.Tensor], rank: int
    ) -> bool:
        mine = pieces[rank].to(torch.bfloat16)
        result = torch.zeros(len(pieces) * mine.numel(), dtype=torch.bfloat16, device=self._device)
        self._all_gather(mine, result, communicator)
        self._await("all_gather")
        return bool(torch.equal(result, torch.cat(pieces).to(torch.bfloat16)))

    def _broadcast_is_right(
        self, communicator: c_void_p, pieces: list[torch.Tensor], rank: int
    ) -> bool:
        buffer = pieces[rank].to(torch.bfloat16)
        root = len(pieces) - 1
        self._nccl.broadcast(
            buffer.data_ptr(), buffer.numel(), root, communicator, self._stream.cuda_stream
        )
        self._await("broadcast")
        return bool(torch.equal(buffer, pieces[root].to(torch.bfloat16)))

    def _reduce_scatter_is_right(
        self, communicator: c_void_p, pieces: list[torch.Tensor], rank: int
    ) -> bool:
        mine = pieces[rank].to(torch.bfloat16)
        count = mine.numel() // len(pieces)
        result = torch.zeros(count, dtype=torch.bfloat16, device=self._device)
        self._nccl.reduce_scatter(
            mine.data_ptr(), result.data_ptr(), count, communicator, self._stream.cuda_stream
        )
        self._await("reduce_scatter")
        total = sum(pieces[1:], pieces[0])[rank * count : (rank + 1) * count]
        return bool(torch.equal(result, total.to(torch.bfloat16)))


def _time_us(graph: Any, request: PayloadRequest) -> tuple[float, ...]:
    """Replay a graph and return the time of each replay, us per collective."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * request.replay_count)]
    for _ in range(request.warmup_count):
        graph.replay()
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return tuple(
        start.elapsed_time(end) * 1000.0 / request.graph_count
        for start, end in zip(events[::2], events[1::2], strict=True)
    )


def _pattern(count: int, rank: int, seed: int, limit: int, device: torch.device) -> torch.Tensor:
    """Return small whole numbers that differ by rank, position and trial (float32)."""
    positions = torch.arange(count, device=device, dtype=torch.int64)
    mixed = (positions * 2654435761 + rank * 40503 + seed * 69621) >> 7
    return (mixed % (2 * limit + 1) - limit).float()
