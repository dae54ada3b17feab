"""Groups that know their verbs by name and import only the one that is called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb's command is, and its line in the help of the group."""

    module: str
    summary: str
    attribute: str = "command"


class LazyGroup(click.Group):
    """A group of verbs that are not loaded before they are called."""

    def __init__(self, *args: Any, verbs: Mapping[str, Verb], **kwargs: Any) -> None:
        kwargs.setdefault("no_args_is_help", False)
        super().__init__(*args, **kwargs)
        # Taken anywhere before the verb too; ``main`` has seen it by then.
        self.params.append(click.Option(["--json"], is_flag=True, hidden=True, expose_value=False))
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs, in the order of the help."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module."""
        verb = self.verbs.get(cmd_name)
        if verb is None:
            return None
        command = getattr(importlib.import_module(verb.module), verb.attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - a slip in the table of verbs
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest verb when the given one does not exist."""
        name = args[0]
        if name not in self.verbs and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, self.verbs, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there is {', '.join(self.verbs)}"
            raise click.UsageError(f"no command {name!r}: {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in self.verbs.items()])
