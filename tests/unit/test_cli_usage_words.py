"""What click says, in the words of every other message."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator

import click
import pytest

import nccltune.cli.usage_words as usage_words
from nccltune.cli import cli, main
from nccltune.cli.options import FiniteRange
from nccltune.cli.usage_words import usage_message

# Whatever click was asked for in vain.
RANGES = {
    "at_least": click.IntRange(min=2),
    "at_most": click.IntRange(max=2),
    "above": click.IntRange(min=2, min_open=True),
    "below": click.FloatRange(max=2.0, max_open=True),
    "between": click.IntRange(min=2, max=3),
    "finite": FiniteRange(min=1.0),
    "integer": click.INT,
    "float": click.FLOAT,
    "flag": click.BOOL,
    "choice": click.Choice(["one", "two"]),
    "path": click.Path(exists=True),
}
WRONG = ("abc", "-1", "9", "1.5", "", "nan", "/no/where", "A Word. Another")
CODED = re.compile(r"valid (integer|float)|range|<=|>=|x[<>]")


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(cli))


def assert_ours(message: str) -> None:
    """Fail unless a message is one line in the house's words."""
    assert len(message.splitlines()) == 1
    assert not message[0].isupper()
    assert not re.search(r"[.?!,:;]{2}|[.?!][;,]", message), message
    assert not re.match(r"(Invalid|Missing|No such|Option|Got|Error)\b", message)
    assert not CODED.search(message), message


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("value", WRONG)
def test_value_that_click_refuses_is_refused_in_our_words(kind: str, value: str) -> None:
    command = click.Command("search", params=[click.Option(["--some"], type=RANGES[kind])])
    try:
        command.make_context("nccltune search", ["--some", value])
    except click.UsageError as error:
        message = usage_message(error)
    else:
        return

    assert_ours(message)
    assert message.startswith("--some: ")
    assert message.endswith("; see nccltune search --help")
    assert value in message


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_option_that_no_command_has_is_refused_in_our_words(
    capfd: pytest.CaptureFixture[str], name: tuple[str, ...]
) -> None:
    status = main([*name, "--jsno", "--", "x"])
    error = capfd.readouterr().err.splitlines()

    assert status in (2, 125)
    assert error[0].startswith("nccltune: no such option: --jsno")
    assert_ours(error[0].removeprefix("nccltune: "))


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_numeric_option_refuses_letters_in_our_words(
    capfd: pytest.CaptureFixture[str], name: tuple[str, ...]
) -> None:
    numeric = (click.types.IntParamType, click.types.FloatParamType)
    for param in COMMANDS[name].params:
        if not isinstance(param, click.Option) or not isinstance(param.type, numeric):
            continue
        assert main([*name, param.opts[0], "abc", "--", "x"]) in (2, 125)
        [error] = capfd.readouterr().err.splitlines()
        assert error.startswith(f"nccltune: {param.opts[0]}: 'abc' is not a ")
        assert_ours(error.removeprefix("nccltune: "))


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_option_without_its_argument_points_to_the_help_of_its_command(
    capfd: pytest.CaptureFixture[str], name: tuple[str, ...]
) -> None:
    for param in COMMANDS[name].params:
        if not isinstance(param, click.Option) or param.is_flag:
            continue
        for words in ([*name, param.opts[0]], ["--json", *name, param.opts[0]]):
            assert main(words) in (2, 125)
            said = capfd.readouterr()
            assert f"; see nccltune {' '.join(name)} --help" in said.out + said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["search", "--seed", "abc"],
            "--seed: 'abc' is not a whole number; see nccltune search --help",
        ),
        (
            ["search", "--jsno"],
            "no such option: --jsno; did you mean --json? See nccltune search --help",
        ),
        (["serch"], "no command 'serch': did you mean search? See nccltune --help"),
        (["search", "--trials", "1"], "--trials: 1 is not 2 or more; see nccltune search --help"),
        (["profile"], "missing command; see nccltune profile --help"),
        (
            ["profile", "show"],
            "missing argument 'NAME|FILE'; see nccltune profile show --help",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_line_is_refused_in_one_plain_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2

    assert capsys.readouterr().err == f"nccltune: {message}\n"


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(usage_words).failed == 0
