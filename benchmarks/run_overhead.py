"""What ``nccltune run -- sglang serve ...`` costs over the bare command.

An EAGLE-3 launch at tensor parallel size 8 (as many GPUs as there are, on a GPU host) of a stand-in
for SGLang that ends at once, under an active profile that matches: the store is read, the launch
parsed, the fingerprint taken, the record written to disk. Bare and wrapped starts take turns. The
driver is a stand-in with eight GPUs, and there is a limit; where NVML works, it is the real one,
which takes its own time, and the figure is reported without a verdict.

Pairs during which other programs kept a CPU busy are left out, and counted; where too few are left
within the time limit, all of them count, and the table says so.

    python benchmarks/run_overhead.py [--pairs 60] [--limit-ms 80] [--timeout-s 120] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nccltune.errors import HostError
from nccltune.host.facts import read_here
from nccltune.host.hardware import read_gpus
from nccltune.store import activate, save_candidate
from tests.support.launch_host import LaunchHost, make_host

LIMIT_MS = 80.0
BLOCK_PAIRS = 3
QUIET_SHARE = 0.15
"""Of one CPU's time, that other programs may take while a block of pairs is measured."""

_ENTRY = """#!{python}
import sys
from nccltune.entry import main
sys.exit(main())
"""


def main() -> int:
    """Measure, print a table, and end with 1 where the limit is missed, if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--limit-ms", type=float, default=LIMIT_MS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    gpu_count = _gpu_count()
    with tempfile.TemporaryDirectory(prefix="run-overhead-") as folder:
        bare, wrapped, environ = _set_up(Path(folder), gpu_count)
        pairs, disturbed = _measure(bare, wrapped, environ, options.pairs, options.timeout_s)
    found = {
        "bare_ms": _summary([bare_ms for bare_ms, _ in pairs]),
        "wrapped_ms": _summary([wrapped_ms for _, wrapped_ms in pairs]),
        "overhead_ms": _summary([wrapped_ms - bare_ms for bare_ms, wrapped_ms in pairs]),
    }
    _print(found, len(pairs), disturbed)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    verdict, status = judge(found["overhead_ms"]["median"], options.limit_ms, gpu_count)
    print(verdict)
    return status


def judge(median_ms: float, limit_ms: float, gpu_count: int) -> tuple[str, int]:
    """Say what a median comes to, and with which status to end.

    Args:
        median_ms: of the overhead.
        limit_ms: for the stand-in driver.
        gpu_count: GPUs of the real driver; 0 for the stand-in.
    """
    found = f"median overhead {median_ms:.1f} ms"
    if gpu_count:
        return f"{found} with the real driver of {gpu_count} GPUs, for which there is no limit", 0
    if median_ms > limit_ms:
        return f"{found}: ABOVE the limit of {limit_ms:g} ms", 1
    return f"{found}: within the limit of {limit_ms:g} ms", 0


def _set_up(folder: Path, gpu_count: int) -> tuple[list[str], list[str], dict[str, str]]:
    """Lay out a host with an active profile; return the bare and the wrapped command."""
    os.environ["NCCLTUNE_HOME"] = str(folder / "home")
    host = make_host(folder / "host", count=gpu_count or 8)
    environ = host.environ()
    command = list(host.command)
    if gpu_count:
        environ["PYTHONPATH"] = environ["PYTHONPATH"].partition(os.pathsep)[2]
        command[command.index("--tp-size") + 1] = str(gpu_count)
        fingerprint = read_here(sys.executable, environ)
    else:
        fingerprint = host.fingerprint()
    save_candidate(host.profile(fingerprint=fingerprint.to_json()))
    activate("kimi", reason="manual")
    entry = folder / "nccltune"
    entry.write_text(_ENTRY.format(python=sys.executable))
    entry.chmod(0o755)
    wrapped = [str(entry), "run", "--", *command]
    _check(host, wrapped, environ)
    return command, wrapped, environ


def _measure(
    bare: Sequence[str],
    wrapped: Sequence[str],
    environ: Mapping[str, str],
    pair_count: int,
    timeout_s: float,
) -> tuple[list[tuple[float, float]], str]:
    """Return pairs of times, and a remark on those that were disturbed."""
    quiet: list[tuple[float, float]] = []
    every: list[tuple[float, float]] = []
    deadline_s = time.monotonic() + timeout_s
    while len(quiet) < pair_count and time.monotonic() < deadline_s:
        began_s, others_s = time.monotonic(), _others_s()
        block = [(_time_ms(bare, environ), _time_ms(wrapped, environ)) for _ in range(BLOCK_PAIRS)]
        every += block
        if _others_s() - others_s < QUIET_SHARE * (time.monotonic() - began_s):
            quiet += block
    if len(quiet) < pair_count:
        return every, f"this machine is busy: {len(quiet)} undisturbed, all counted"
    return quiet, f"{len(every) - len(quiet)} disturbed ones left out"


def _others_s() -> float:
    """Return the CPU time that programs other than this one and its children have taken."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    idle = fields[3] + fields[4]
    total_s = (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return total_s - sum(usage.ru_utime + usage.ru_stime for usage in own)


def _gpu_count() -> int:
    """Return how many GPUs NVML shows; 0 where it does not work or there are too few to launch."""
    try:
        count = len(read_gpus().gpus)
    except HostError:
        return 0
    return count if count > 1 else 0


def _check(host: LaunchHost, wrapped: Sequence[str], environ: Mapping[str, str]) -> None:
    """See that what is timed is the whole way: the profile applied, the host found identical."""
    report = host.root / "report.json"
    words = [*wrapped[:2], "--report-file", str(report), *wrapped[2:]]
    subprocess.run(words, env=dict(environ), check=True, stderr=subprocess.DEVNULL)
    data = json.loads(report.read_text())["data"]
    if (data["profile"], data["match"]) != ("kimi", "identical"):
        raise SystemExit(f"the profile does not apply here: {data['reason']}")


def _time_ms(words: Sequence[str], environ: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, env=dict(environ), check=True, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1000


def _summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
    }


def _print(found: Mapping[str, Mapping[str, float]], pair_count: int, remark: str) -> None:
    cpus = f"{os.cpu_count()} CPUs"
    print(f"Python {sys.version.split()[0]}, {cpus}, {pair_count} pairs, {remark}")
    print(f"{'':12}{'min':>10}{'median':>10}{'p90':>10}  ms")
    for name, values in found.items():
        row = "".join(f"{values[key]:10.1f}" for key in ("min", "median", "p90"))
        print(f"{name.removesuffix('_ms'):12}{row}")


if __name__ == "__main__":
    sys.exit(main())
