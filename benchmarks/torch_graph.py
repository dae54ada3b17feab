"""The same all-reduces through torch.distributed, in a CUDA graph: a check of our own timing.

    python benchmarks/torch_graph.py --ranks 2 --payload 43008:123 --payload 67108864:4

Prints one JSON object: payload size -> median us of one all-reduce, the slowest rank's for every
replay. Settings come from the environment, as they do for a server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from multiprocessing.queues import Queue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

REPLAY_COUNT = 15
WARMUP_COUNT = 3


def measure(rank: int, ranks: int, payloads: list[tuple[int, int]], answers: Queue[object]) -> None:
    """Time every payload in one rank and send its samples."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    samples: dict[int, list[float]] = {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for size_bytes, count in payloads:
            buffer = torch.ones(size_bytes // 2, dtype=torch.bfloat16, device=device)
            dist.all_reduce(buffer)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(count):
                    dist.all_reduce(buffer)
            samples[size_bytes] = replay(graph, count)
    answers.put((rank, samples))
    answers.close()
    answers.join_thread()
    os._exit(0)  # tearing captured collectives down is not what is measured


def replay(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Return us of one all-reduce for every timed replay."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(REPLAY_COUNT)
    ]
    for _ in range(WARMUP_COUNT):
        graph.replay()
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000.0 / count for start, end in events]


def main() -> int:
    """Run all ranks and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--payload", action="append", required=True, metavar="BYTES:COUNT")
    options = parser.parse_args()
    pairs = [tuple(map(int, text.split(":"))) for text in options.payload]
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=measure, args=(rank, options.ranks, pairs, answers), daemon=True)
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    collected = [answers.get(timeout=120)[1] for _ in ranks]
    medians = {
        size: statistics.median(map(max, zip(*(one[size] for one in collected), strict=True)))
        for size, _ in pairs
    }
    print(json.dumps(medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
