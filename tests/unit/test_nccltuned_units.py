"""Whether a server is one of systemd's own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nccltuned.units import is_of_unit
from tests.support.fake_proc import FakeProc

INVOCATION = "0123456789abcdef" * 2
SERVER, CRON = 1000, 0


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """A server that its unit's main process has started, as the same user."""
    found = FakeProc(tmp_path)
    found.add(90, ["nccltune", "launch"], uid=SERVER)
    found.add(100, ["sglang", "serve"], parent=90, uid=SERVER)
    put_into(found, "0::/system.slice/sglang@kimi.service/payload")
    return found


def put_into(proc: FakeProc, lines: str) -> None:
    (proc.root / "100/cgroup").write_text(f"{lines}\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What systemd says of the unit that it is asked about."""
    facts = {"MainPID": "90", "InvocationID": INVOCATION, "asked": []}

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        facts["asked"] = [*facts["asked"], words[-1]]
        text = f"MainPID={facts['MainPID']}\nInvocationID={facts['InvocationID']}\n"
        return subprocess.CompletedProcess(words, 0, text, "")

    monkeypatch.setattr(subprocess, "run", run)
    return facts


def test_server_that_a_units_main_process_has_started_is_of_the_unit(
    proc: FakeProc, shown: dict[str, Any]
) -> None:
    assert is_of_unit(100, INVOCATION, proc.root)
    assert shown["asked"] == ["sglang@kimi.service"]


@pytest.mark.parametrize(
    "lines",
    [
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/fake.service",
        "0::/user.slice/user-1000.slice/session-1.scope",
        "0::/system.slice/docker-abc.scope",
        "0::/",
        "nonsense",
        "",
    ],
    ids=["users_unit", "session", "container", "top", "nonsense", "nothing"],
)
def test_server_in_no_unit_of_the_host_is_of_none_whatever_it_says(
    proc: FakeProc, shown: dict[str, Any], lines: str
) -> None:
    put_into(proc, lines)

    assert not is_of_unit(100, INVOCATION, proc.root)
    assert shown["asked"] == []


@pytest.mark.parametrize(
    "facts",
    [{"InvocationID": "f" * 32}, {"MainPID": "0"}, {"MainPID": "77"}, {"MainPID": ""}],
    ids=["another_run", "no_main", "another_main", "unknown"],
)
def test_server_that_systemd_does_not_confirm_is_of_no_unit(
    proc: FakeProc, shown: dict[str, Any], facts: dict[str, str]
) -> None:
    shown.update(facts)

    assert not is_of_unit(100, INVOCATION, proc.root)


def test_server_below_a_main_process_of_another_user_is_of_no_unit(proc: FakeProc) -> None:
    proc.add(90, ["cron", "-f"], uid=CRON)

    assert not is_of_unit(100, INVOCATION, proc.root)


def test_server_whose_systemd_does_not_answer_is_of_no_unit(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", fail)

    assert not is_of_unit(100, INVOCATION, proc.root)
    assert not is_of_unit(4242, INVOCATION, proc.root)
