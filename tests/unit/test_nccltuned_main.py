from __future__ import annotations

from click.testing import CliRunner

from nccltune import __version__
from nccltuned.__main__ import main


def test_nccltuned_without_options_says_it_is_not_there_yet_and_exits_5() -> None:
    result = CliRunner().invoke(main, [])

    assert result.exit_code == 5
    assert result.stdout == ""
    assert "not part of nccltune" in result.stderr


def test_nccltuned_version_names_the_release() -> None:
    result = CliRunner().invoke(main, ["--version"])

    assert result.exit_code == 0
    assert __version__ in result.stdout


def test_nccltuned_help_describes_the_command() -> None:
    result = CliRunner().invoke(main, ["--help"])

    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
