"""``nccltune run``: puts the active profile into a command's environment and becomes it."""

from __future__ import annotations

import click

from nccltune.inject.running import HELP, main


class RunCommand(click.Command):
    """A command whose words ``nccltune.inject.running`` reads, which starts without click too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave every word as it was typed."""
        ctx.args = list(args)
        return ctx.args

    def get_help(self, ctx: click.Context) -> str:
        """Return the help that ``nccltune.inject.running`` prints."""
        return HELP.rstrip()


@click.command(name="run", cls=RunCommand, add_help_option=False)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Start a server under the active profile: sets its environment and becomes it."""
    ctx.exit(main(ctx.args))
