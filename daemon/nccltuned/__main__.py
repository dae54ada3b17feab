"""Entry point of the service."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from nccltune import __version__
from nccltune.children import learn_ends
from nccltune.errors import ExitCode, NccltuneError, UsageProblem
from nccltune.live.published import METRICS_NAME, run_dir
from nccltune.paths import state_dir
from nccltune.sdnotify import Notifier
from nccltuned.descriptors import raise_limit
from nccltuned.endpoint import check_address
from nccltuned.journal import open_journal
from nccltuned.service import Config, Service

_MAX_INTERVAL_S = 600.0
_MAX_ROLLBACK_AFTER = 100


def main() -> None:
    """Watch over the active NCCL profile of this host until a signal asks for the end."""
    learn_ends()
    sys.exit(_run(_parser().parse_args()))


def _parser() -> argparse.ArgumentParser:
    # argparse, because it is half the size of click and this process stays.
    parser = argparse.ArgumentParser(
        prog="nccltuned",
        description="Watch over the active NCCL profile of this host: publish it, compare every "
        "running SGLang rank with it, and roll it back when servers fail to start under it.",
        epilog="SIGHUP reads everything again, SIGTERM ends. No launch needs this service.",
    )
    parser.add_argument("--version", action="version", version=f"nccltuned {__version__}")
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS",
        help="serve GET /metrics on unix:/PATH or 127.0.0.1:PORT; off for nowhere; default: a "
        "Unix socket in the run folder; sockets that systemd has opened go first",
    )
    parser.add_argument(
        "--interval-s",
        type=float,
        default=10.0,
        metavar="S",
        help="look for new servers so often, in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--rollback-after",
        type=int,
        default=3,
        metavar="N",
        help="roll back after so many failed starts; 0 for never (default: %(default)s)",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="where to publish the active environment")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    return parser


def _run(options: argparse.Namespace) -> int:
    open_journal(is_verbose=options.verbose)
    raise_limit()
    try:
        Service(_config(options), Notifier.from_environ(os.environ)).run()
    except NccltuneError as error:
        sys.stderr.write(f"nccltuned: {error}\n")
        return int(error.exit_code)
    return int(ExitCode.DONE)


def _config(options: argparse.Namespace) -> Config:
    """Check what was asked for.

    Raises:
        UsageProblem: it makes no sense.
    """
    if not 0.1 <= options.interval_s <= _MAX_INTERVAL_S:
        raise UsageProblem(
            f"--interval-s {options.interval_s:g}: write 0.1 to {_MAX_INTERVAL_S:g}",
            code="bad_interval",
        )
    if not 0 <= options.rollback_after <= _MAX_ROLLBACK_AFTER:
        raise UsageProblem(
            f"--rollback-after {options.rollback_after}: write 0 to {_MAX_ROLLBACK_AFTER}",
            code="bad_rollback_after",
        )
    run_folder = Path(options.run_dir) if options.run_dir else run_dir()
    metrics = options.metrics or f"unix:{run_folder / METRICS_NAME}"
    check_address(metrics)
    return Config(
        state_folder=state_dir(),
        run_folder=run_folder,
        metrics=metrics,
        interval_s=options.interval_s,
        rollback_after=options.rollback_after,
    )


if __name__ == "__main__":
    main()
