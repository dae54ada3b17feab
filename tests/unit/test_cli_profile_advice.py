"""``nccltune profile``: what is said is of use, said once, and holds for every kind of profile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.cli import host_check, main
from nccltune.errors import HostError
from nccltune.profile import Profile
from nccltune.store import profiles_dir, read_active, save_candidate
from tests.support.command_line import FINGERPRINT
from tests.support.profiles import MINE, SETTINGS, profile_verb, put

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "read_here", lambda _python: FINGERPRINT)


@pytest.mark.parametrize("source", ["gpus", "", "shipped", "shared-gpu", "recording:h200-2x-shm"])
def test_import_of_any_source_says_a_command_that_activates_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str
) -> None:
    file = put(tmp_path / "mine.json", replace(MINE, source=source))
    assert main(["profile", "import", str(file)]) == 0
    [said] = [line for line in capsys.readouterr().out.splitlines() if "To use it: " in line]

    program, *words = said.removeprefix("To use it: ").split()

    assert program == "nccltune"
    assert main(words) == 0
    assert read_active().name == "mine"
    assert ("--any-host" in words) is source.startswith(("shared-gpu", "recording:"))


def absent(_python: str) -> None:
    raise HostError("no NVIDIA driver found", code="nvml_absent")


@pytest.mark.parametrize("source", ["gpus", "shared-gpu", "recording:h200-2x-shm"])
@pytest.mark.parametrize(
    "fingerprint",
    [None, FINGERPRINT.to_json(), {"gpu_names": 7}],
    ids=["no_host", "host", "broken_host"],
)
@pytest.mark.parametrize(
    "read_here",
    [
        absent,
        lambda _python: FINGERPRINT,
        lambda _python: replace(FINGERPRINT, nccl_version="9"),
        lambda _python: replace(FINGERPRINT, nccl_version=None),
        lambda _python: replace(FINGERPRINT, gpu_uuids=("GPU-8", "GPU-9")),
    ],
    ids=["no_driver", "same", "foreign", "unknown_nccl", "equivalent"],
)
def test_activate_for_any_host_says_nothing_twice(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    fingerprint: dict[str, object] | None,
    read_here: Any,
) -> None:
    save_candidate(replace(MINE, source=source, fingerprint=fingerprint))
    monkeypatch.setattr(host_check, "read_here", read_here)

    envelope = profile_verb(capsys, "activate", "mine", "--any-host")

    clauses = [
        clause.strip()
        for warning in envelope["warnings"]
        for part in warning.split(";")
        for clause in part.split(",")
    ]
    assert envelope["exit_code"] == 0
    assert len(clauses) == len(set(clauses))
    assert sum("--any-host" in warning for warning in envelope["warnings"]) <= 1


def test_activate_without_a_driver_says_both_reasons_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(replace(MINE, source="recording:h200-2x-shm"))
    monkeypatch.setattr(host_check, "read_here", absent)

    [warning] = profile_verb(capsys, "activate", "mine", "--any-host")["warnings"]

    assert "although it was found in the recording h200-2x-shm" in warning
    assert "and not compared: no NVIDIA driver found" in warning
    assert warning.endswith("each launch needs --any-host too: nccltune run --any-host -- CMD")


def listed(capsys: pytest.CaptureFixture[str], name: str) -> list[tuple[str, str]]:
    """Return state and path of every row of that name, the same in both forms."""
    rows = profile_verb(capsys, "list")["data"]["profiles"]
    found = [(row["state"], row["path"]) for row in rows if row["name"] == name]
    main(["profile", "list"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line[:1] == [name]] == [state for state, _ in found]
    return found


def test_list_shows_a_shipped_profile_once_while_its_copy_is_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = profiles_dir() / "folk-ll-ring.json"
    [(before, _)] = listed(capsys, "folk-ll-ring")

    profile_verb(capsys, "activate", "folk-ll-ring")
    active = listed(capsys, "folk-ll-ring")
    profile_verb(capsys, "off")
    off = listed(capsys, "folk-ll-ring")

    assert before == "shipped"
    assert active == [("active", str(copy))]
    assert off == [("candidate", str(copy))]


def test_list_shows_both_as_soon_as_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    profile_verb(capsys, "activate", "folk-ll-ring")
    copy = profiles_dir() / "folk-ll-ring.json"
    put(copy, Profile("folk-ll-ring", SETTINGS))

    assert [state for state, _ in listed(capsys, "folk-ll-ring")] == ["active", "shipped"]
