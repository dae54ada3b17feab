"""What the README says of the command line, held against the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from nccltune.cli import cli
from nccltune.errors import ExitCode
from nccltune.export import EXPORTS
from nccltune.inject.running import EXIT_CANNOT_RUN, EXIT_NOT_FOUND, EXIT_OWN_FAULT

README = (Path(__file__).parents[2] / "README.md").read_text()
WITHOUT_JSON = {"run", "launch"}


def verbs(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_takes_json_but_those_that_readme_and_help_leave_out() -> None:
    without = {
        name
        for name, command in verbs(cli)
        if not any("--json" in each.opts for each in command.params)
    }

    assert without == WITHOUT_JSON
    assert "on every command but `run` and `launch`" in README
    help_text = " ".join((cli.help or "").split())
    assert "Every command but run and launch takes --json" in help_text


@pytest.mark.parametrize("name", EXPORTS)
def test_readme_has_the_word_of_every_export_format(name: str) -> None:
    [row] = [line for line in README.splitlines() if "export --format" in line]

    assert f"`{name}`" in row


def test_readme_lists_every_exit_code() -> None:
    table = README.split("### Exit codes")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([\d, ]+) \|", table, flags=re.MULTILINE)
    listed = [int(code) for cell in cells for code in cell.split(",")]

    own = {int(code) for code in ExitCode}
    assert listed == sorted({*own, EXIT_OWN_FAULT, EXIT_CANNOT_RUN, EXIT_NOT_FOUND})
