"""What a test asks of the stand-in, through STANDIN_SGLANG_* variables (see the README)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

PREFIX = "STANDIN_SGLANG_"


def text(name: str, default: str = "") -> str:
    return os.environ.get(PREFIX + name, default)


def number(name: str, default: float = 0.0) -> float:
    return float(text(name) or default)


def is_set(name: str) -> bool:
    return text(name) not in ("", "0")


def fails(kind: str) -> bool:
    """Tell whether this failure was asked for, and its condition on the environment holds."""
    return text("FAIL") == kind and _holds(text("FAIL_IF"))


def _holds(condition: str) -> bool:
    """Judge NAME, NAME=VALUE or !NAME in this process's environment."""
    if not condition:
        return True
    if condition.startswith("!"):
        return not _holds(condition[1:])
    name, equals, value = condition.partition("=")
    return os.environ.get(name) == value if equals else name in os.environ


def pause(duration_s: float) -> None:
    if duration_s > 0:
        time.sleep(duration_s)


def hang() -> None:
    while True:
        time.sleep(3600.0)


def record(role: str, **facts: object) -> None:
    """Append what this process has to the file of STANDIN_SGLANG_RECORD, one line a process."""
    path = text("RECORD")
    if not path:
        return
    own = ("NCCL", "SPT_", "CUDA_", "SGLANG_", "EP_")
    environ = {name: value for name, value in os.environ.items() if name.startswith(own)}
    entry = {"role": role, "pid": os.getpid(), "environ": environ, **facts}
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - one write, so lines stay whole
        file.write(json.dumps(entry) + "\n")


def factor(environ: Mapping[str, str]) -> float:
    """Return how much slower a step is in this environment, from STANDIN_SGLANG_FACTORS."""
    total = 1.0
    for condition, by in json.loads(text("FACTORS") or "{}").items():
        name, equals, value = condition.partition("=")
        if environ.get(name) == value if equals else name in environ:
            total *= float(by)
    return total
