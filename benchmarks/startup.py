"""How long ``nccltune --help`` takes, interpreter included: what a person waits for every day.

python benchmarks/startup.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT_MS = 150.0
RUN_COUNT = 15
COMMANDS = (["--help"], ["search", "--help"], ["profile", "list"])


def main() -> int:
    """Time each command and fail when ``--help`` breaks its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    medians_ms: dict[str, float] = {}
    for words in COMMANDS:
        times_ms = []
        for _ in range(RUN_COUNT):
            began = time.perf_counter()
            command = [sys.executable, "-m", "nccltune", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times_ms.append(1000.0 * (time.perf_counter() - began))
        name = " ".join(["nccltune", *words])
        medians_ms[name] = statistics.median(times_ms)
        print(f"{name:24} median of {RUN_COUNT}: {medians_ms[name]:6.1f} ms")
    is_good = medians_ms["nccltune --help"] <= LIMIT_MS
    print(f"limit for nccltune --help: <= {LIMIT_MS:.0f} ms: {'ok' if is_good else 'BROKEN'}")
    if options.json:
        options.json.write_text(json.dumps(medians_ms, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
