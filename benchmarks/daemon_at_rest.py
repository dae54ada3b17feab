"""What nccltuned costs while nothing happens: memory and processor time beside a server of 8 ranks.

    python benchmarks/daemon_at_rest.py [--seconds 40] [--ranks 8] [--others 400]

The server is the stand-in of the tests: real processes with SGLang's titles, started through
``nccltune run``, so that every rank is read and judged. Other processes sleep beside it, as on a
host in use, because looking for new servers costs more the more there are. Nothing is measured
before the service has seen the server and settled. Prints a table; exits 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "daemon")]

from nccltune.profile import Profile  # noqa: E402 - the path is set above
from nccltune.store import activate, save_candidate  # noqa: E402
from tests.support.service import (  # noqa: E402
    Daemon,
    run_command,
    running_daemon,
    started,
    wait_for,
)
from tests.support.standin_sglang.program import free_port, wait_until_up  # noqa: E402

MAX_RSS_MIB = 40.0
MAX_CPU_PCT = 0.2
INTERVAL_S = 10.0
SETTLE_S = 25.0
"""Until the start is judged, and the processes beside it are no longer young to the scanner."""

SETTINGS = {
    "NCCL_ALGO": "allreduce:ring",
    "NCCL_PROTO": "allreduce:LL",
    "NCCL_MIN_CTAS": "4",
    "NCCL_MAX_CTAS": "16",
    "NCCL_NTHREADS": "256",
    "NCCL_BUFFSIZE": "4194304",
}


def main() -> int:
    """Measure, print, and say whether the limits hold."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="nccltune-at-rest-") as name:
        folder = Path(name)
        os.environ["NCCLTUNE_HOME"] = str(folder / "home")
        save_candidate(Profile("tuned", SETTINGS))
        activate("tuned", reason="manual")
        with _sleepers(options.others), _watched(folder, options.ranks) as daemon:
            print(f"settling for {SETTLE_S:g} s, then measuring for {options.seconds:g} s")
            time.sleep(SETTLE_S)
            rows = _measure(daemon, options.seconds)
    return _report(rows, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="how long to measure")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--others", type=int, default=400, help="processes that sleep beside it")
    options = parser.parse_args()
    if options.seconds < 30.0:
        parser.error("--seconds: 30 or more, or too few ticks are measured")
    return options


@contextmanager
def _sleepers(count: int) -> Iterator[None]:
    """Fill the process table."""
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(count)]
    try:
        yield
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


@contextmanager
def _watched(folder: Path, rank_count: int) -> Iterator[Daemon]:
    """Run the service and a server that it has found to be in effect."""
    port = free_port()
    watchdog = {"WATCHDOG_USEC": "60000000"}
    with (
        running_daemon(folder, interval_s=INTERVAL_S, environ=watchdog) as daemon,
        started(folder, run_command(port=port, tp=rank_count)) as process,
    ):
        wait_until_up(port, process)
        wait_for(lambda: daemon.server(process.pid).get("verdict") == "in_effect", "in effect")
        assert len(daemon.server(process.pid)["ranks"]) == rank_count
        yield daemon


def _measure(daemon: Daemon, duration_s: float) -> dict[str, float]:
    pid = daemon.process.pid
    begun_s, used_s = time.monotonic(), _cpu_s(pid)
    time.sleep(duration_s)
    elapsed_s = time.monotonic() - begun_s
    seen = {*daemon.log().split("server: pid=")[1:]}
    return {
        "server_count": len({each.split()[0] for each in seen}),
        "cpu_s": _cpu_s(pid) - used_s,
        "elapsed_s": elapsed_s,
        "rss_mib": _memory_mib(pid, "VmRSS"),
        "peak_mib": _memory_mib(pid, "VmHWM"),
    }


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process, from the scheduler's own nanoseconds."""
    nanoseconds = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]
    return int(nanoseconds) / 1e9


def _memory_mib(pid: int, name: str) -> float:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024.0


def _report(rows: dict[str, float], options: argparse.Namespace) -> int:
    cpu_pct = 100.0 * rows["cpu_s"] / rows["elapsed_s"]
    process_count = options.others + sum(path.name.isdigit() for path in Path("/proc").iterdir())
    print(f"{options.ranks} ranks watched, about {process_count} processes on the host")
    if rows["server_count"] != 1:
        print(f"NOT AT REST: {rows['server_count']:g} servers were seen, one of them is ours")
    print(f"{'':24}{'measured':>12}{'limit':>12}")
    print(f"{'resident memory, MiB':24}{rows['rss_mib']:12.1f}{MAX_RSS_MIB:12.1f}")
    print(f"{'highest so far, MiB':24}{rows['peak_mib']:12.1f}{'':>12}")
    print(f"{'of a core, %':24}{cpu_pct:12.3f}{MAX_CPU_PCT:12.3f}")
    print(f"{'processor time, ms':24}{1000 * rows['cpu_s']:12.1f}{'':>12}")
    print(f"{'over, s':24}{rows['elapsed_s']:12.1f}{'':>12}")
    is_good = rows["rss_mib"] <= MAX_RSS_MIB and cpu_pct <= MAX_CPU_PCT
    print("within both limits" if is_good else "A LIMIT IS BROKEN")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
