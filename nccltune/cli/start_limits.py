"""The options that limit a server's start, the same for every verb that starts one."""

from __future__ import annotations

import click

from nccltune.cli.options import Decorated, FiniteRange, add_options
from nccltune.supervise import DEFAULT_READY_TIMEOUT_S, DEFAULT_STALL_TIMEOUT_S


def start_limit_options(command: Decorated) -> Decorated:
    """Add ``--ready-timeout-s`` and ``--stall-timeout-s``."""
    options = (
        click.option(
            "--ready-timeout-s",
            type=FiniteRange(min=0, min_open=True),
            default=DEFAULT_READY_TIMEOUT_S,
            show_default=True,
            metavar="S",
            help="End a server that is not ready after so many seconds, whatever it does.",
        ),
        click.option(
            "--stall-timeout-s",
            type=FiniteRange(min=0, min_open=True),
            default=DEFAULT_STALL_TIMEOUT_S,
            show_default=True,
            metavar="S",
            help="End a server that makes no progress for so many seconds while it starts.",
        ),
    )
    return add_options(options, command)
