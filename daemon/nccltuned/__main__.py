"""Entry point of the service: this release has none, and says so instead of pretending to run."""

from __future__ import annotations

import sys

import click

from nccltune import __version__
from nccltune.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nccltuned")
def main() -> None:
    """Keep the active NCCL profile of this host published. Not part of this release yet."""
    click.echo(
        f"nccltuned: the service is not part of nccltune {__version__} yet; "
        "'nccltune search' finds a profile and saves it",
        err=True,
    )
    sys.exit(ExitCode.HOST)


if __name__ == "__main__":
    main()
