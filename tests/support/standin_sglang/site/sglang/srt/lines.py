"""Log lines and progress bars with SGLang's own wording, as 0.5.15.post1 writes them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from sglang.srt import wishes
from sglang.version import is_at_least

SHARDS_BAR = "Loading safetensors checkpoint shards"
CAPTURE_FAILED_ADVICE = (
    "Possible solutions:\n"
    "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)\n"
    "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. "
    "(Not recommended. Huge performance loss)\n"
    "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
)


def configure_logger(level: str, prefix: str = "") -> None:
    logging.basicConfig(
        level=logging.CRITICAL if wishes.is_set("QUIET") else getattr(logging, level.upper()),
        format=f"[%(asctime)s{prefix}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )


def init_words() -> tuple[str, str]:
    """Return how a release calls the set-up of its ranks when it begins and ends."""
    name = "Init parallel" if is_at_least(0, 5, 21) else "Init torch distributed"
    return f"{name} begin.", f"{name} ends. elapsed=0.99 s, mem usage=0.97 GB"


def follow_shards(count: int) -> Iterator[int]:
    """Count shards up, with the bar that rank 0 shows."""
    for idx in range(count + 1):
        percent = 100 * idx // count
        rate = "?it/s" if idx == 0 else " 1.20s/it"
        _bar(f"{SHARDS_BAR}: {percent:3d}% Completed | {idx}/{count} [00:00<00:00, {rate}]")
        if idx < count:
            yield idx
    _bar_end()


def follow_captures(sizes: list[int]) -> Iterator[int]:
    """Go through batch sizes, largest first, with the bar that rank 0 shows."""
    total = len(sizes)
    _bar(f"  0%|          | 0/{total} [00:00<?, ?it/s]")
    name = ""
    for idx, size in enumerate(reversed(sizes)):
        name = f"Capturing batches (bs={size} avail_mem=119.24 GB)"
        _bar(_capture_bar(name, idx, total))
        yield size
        _bar(_capture_bar(name, idx + 1, total))
    _bar(_capture_bar(name, total, total))
    _bar_end()


def _capture_bar(name: str, done: int, total: int) -> str:
    percent = 100 * done // total
    drawn = "█" * (percent // 10)
    rate = "?it/s" if done == 0 else " 5.49s/it"
    return f"{name}: {percent:3d}%|{drawn:10}| {done}/{total} [00:05<00:00, {rate}]"


def _bar(text: str) -> None:
    if not wishes.is_set("QUIET"):
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()


def _bar_end() -> None:
    if not wishes.is_set("QUIET"):
        sys.stderr.write("\n")
        sys.stderr.flush()
