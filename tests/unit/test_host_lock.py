"""One measuring command on a host, whoever starts the second, and wherever it keeps its state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccltune.bench import host_lock as locks
from nccltune.bench.host_lock import SEARCH, VERIFY, host_lock
from nccltune.errors import BusyError

Patch = pytest.MonkeyPatch


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A host with GPUs, whose lock is in a folder of the test."""
    path = tmp_path / "shared.lock"
    monkeypatch.setattr(locks, "_SHARED", path)
    monkeypatch.setattr(locks, "_DRIVER", tmp_path)
    return path


def enter_both(tmp_path: Path) -> None:
    """Measure twice at once, with two state folders."""
    with host_lock(tmp_path / "a" / "lock", VERIFY), host_lock(tmp_path / "b" / "lock", SEARCH):
        pass


def test_another_state_folder_is_the_same_host(tmp_path: Path, shared: Path) -> None:
    with pytest.raises(
        BusyError, match=rf"another state folder \(process {os.getpid()}\)"
    ) as caught:
        enter_both(tmp_path)

    assert caught.value.code == "host_busy"
    with host_lock(tmp_path / "b" / "lock", SEARCH):  # it went with its holder
        assert shared.stat().st_mode & 0o777 == 0o644


def test_same_state_folder_names_what_runs(tmp_path: Path, shared: Path) -> None:
    path = tmp_path / "a" / "lock"
    with (
        host_lock(path, VERIFY),
        pytest.raises(BusyError, match=r"a verify .* is running") as caught,
        host_lock(path, SEARCH),
    ):
        pass

    assert caught.value.code == "verify_running"


def test_host_without_a_driver_has_nothing_to_disturb(
    tmp_path: Path, shared: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(locks, "_DRIVER", tmp_path / "nowhere")

    enter_both(tmp_path)

    assert not shared.exists()


@pytest.mark.parametrize("kind", ["no rights", "link", "pipe", "folder", "no folder"])
def test_whoever_cannot_have_the_lock_is_not_refused(
    tmp_path: Path, shared: Path, monkeypatch: Patch, kind: str
) -> None:
    victim = tmp_path / "victim"
    if kind == "no rights":

        def refuse(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    elif kind == "link":
        shared.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(shared)
    elif kind == "folder":
        shared.mkdir()
    else:
        monkeypatch.setattr(locks, "_SHARED", tmp_path / "nowhere" / "lock")

    enter_both(tmp_path)

    assert not victim.exists()


def test_lock_that_another_user_has_made_is_locked_and_not_written(
    tmp_path: Path, shared: Path
) -> None:
    shared.write_text("theirs")
    shared.chmod(0o444)

    with pytest.raises(BusyError):
        enter_both(tmp_path)

    assert shared.read_text() == "theirs"
