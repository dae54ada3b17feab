"""The service's own command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nccltuned.__main__ as program
from nccltune import __version__
from nccltune.errors import HostError

if TYPE_CHECKING:
    from nccltuned.service import Config


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leave the limits of the tests' own process as they are."""
    raised: list[str] = []
    monkeypatch.setattr(program, "raise_limit", lambda: raised.append("raised"))
    return raised


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[Config]]:
    """Run the program with a service that only remembers what it was told."""
    seen: list[Config] = []

    class Remembering:
        def __init__(self, config: Config, _notifier: object) -> None:
            seen.append(config)

        def run(self) -> None:
            return

    monkeypatch.setattr(program, "Service", Remembering)
    monkeypatch.setattr("sys.argv", ["nccltuned", *arguments])
    with pytest.raises(SystemExit) as end:
        program.main()
    code = end.value.code
    assert isinstance(code, int)
    return code, seen


def test_main_without_options_publishes_in_the_run_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: list[str]
) -> None:
    monkeypatch.setenv("NCCLTUNE_RUN_DIR", str(tmp_path))

    code, [config] = run(monkeypatch)

    assert code == 0
    assert limits == ["raised"]
    assert config.run_folder == tmp_path
    assert config.metrics == f"unix:{tmp_path}/metrics.sock"
    assert config.state_folder == Path(os.environ["NCCLTUNE_HOME"])
    assert config.rollback_after == 3


def test_main_takes_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--metrics", "127.0.0.1:9469", "--interval-s", "5", "--rollback-after", "0"]

    _, [config] = run(monkeypatch, *options, "--run-dir", "/r")

    assert (config.metrics, config.interval_s, config.rollback_after) == ("127.0.0.1:9469", 5.0, 0)
    assert config.run_folder == Path("/r")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--interval-s", "0"],
        ["--interval-s", "nan"],
        ["--interval-s", "9999"],
        ["--rollback-after", "-1"],
        ["--metrics", "0.0.0.0:9469"],
        ["--metrics", "here"],
        ["--metrics", "unix:here"],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_main_refuses_what_makes_no_sense_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, seen = run(monkeypatch, *arguments)

    assert (code, seen) == (2, [])
    assert "nccltuned" in capsys.readouterr().err


def test_main_ends_with_the_status_of_what_stopped_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            raise HostError("no signals here", code="x")

    monkeypatch.setattr(program, "Service", Failing)
    monkeypatch.setattr("sys.argv", ["nccltuned", "--run-dir", "/r"])
    with pytest.raises(SystemExit) as end:
        program.main()

    assert end.value.code == 5
    assert "no signals here" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_main_tells_about_itself_and_exits_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    code, _ = run(monkeypatch, option)

    assert code == 0
    assert (__version__ if option == "--version" else "usage: nccltuned") in capsys.readouterr().out
