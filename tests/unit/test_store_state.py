from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nccltune.paths import STATE_NAME
from nccltune.profile import Profile, format_profile
from nccltune.store import activate, profiles_dir, read_active, rollback, save_candidate
from tests.support.launch_host import not_mounted

IS_ROOT = os.geteuid() == 0
MINE = Profile("mine", {"NCCL_PROTO": "allreduce:LL"})


@pytest.fixture
def state_path() -> Path:
    """The state file, with ``mine`` active."""
    save_candidate(MINE)
    activate("mine", reason="manual")
    return profiles_dir().parent / STATE_NAME


def test_read_active_on_a_fresh_host_is_none_without_a_problem() -> None:
    active = read_active()

    assert (active.profile, active.name, active.problem) == (None, None, None)
    assert active.source == "store"


def test_read_active_returns_the_profile_and_who_activated_it(state_path: Path) -> None:
    active = read_active()

    assert active.profile == MINE
    assert active.path == profiles_dir() / "mine.json"
    assert (active.how, active.action, active.problem) == ("manual", "activate", None)
    assert active.activated_at.endswith("+00:00")
    assert state_path.exists()


@pytest.mark.parametrize("value", [7, [], {"mine": 7}, {"mine": [7, None]}, {"other": ["GPU-0"]}])
def test_read_active_takes_nothing_odd_for_a_persons_word(state_path: Path, value: object) -> None:
    state = json.loads(state_path.read_text())
    state_path.write_text(json.dumps({**state, "any_host": value}))

    active = read_active()

    assert active.profile == MINE
    assert active.any_host_gpus == ()


def test_read_active_of_another_folder_reads_that(state_path: Path, tmp_path: Path) -> None:
    assert read_active(state_path.parent).name == "mine"
    assert read_active(tmp_path / "empty").name is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "state.json:1: is empty"),
        ('{"schema": "nccltune.state/1", "act', "ends too early"),
        ("[]", "an object in {}"),
        ('{"schema": "nccltune.state/9", "active": "mine"}', "this version reads"),
        ('{"schema": "nccltune.state/1", "active": "../../etc/x"}', "no profile name"),
        ('{"schema": "nccltune.state/1", "active": 7}', "a profile name in quotes"),
        ('{"schema": "nccltune.state/1", "active": "a", "active": "b"}', "appears twice"),
        ("\x00\x01", "not JSON"),
        ('{"schema": "nccltune.state/1", "active": "\\ud800"}', "which is no text"),
    ],
    ids=["empty", "cut", "list", "schema", "walk", "number", "twice", "binary", "surrogate"],
)
def test_read_active_with_a_broken_state_says_so(state_path: Path, text: str, problem: str) -> None:
    state_path.write_text(text)

    active = read_active()

    assert active.profile is None
    assert active.name is None
    assert active.problem is not None
    assert problem in active.problem


@pytest.mark.parametrize("previous", ["../x", 7, [], "A", ""])
def test_read_active_with_a_broken_previous_keeps_the_active_one(
    state_path: Path, previous: object
) -> None:
    state = json.loads(state_path.read_text())
    state_path.write_text(json.dumps({**state, "previous": previous}))

    active = read_active()

    assert (active.profile, active.previous, active.problem) == (MINE, None, None)
    assert "there is no profile to roll back to: " in active.warning
    step = rollback()
    assert (step.name, step.previous) == (None, "mine")
    assert "there is no profile to roll back to" in (step.problem or "")
    assert read_active().warning == ""


@pytest.mark.parametrize("kind", ["missing", "dangling", "file"])
def test_read_active_of_a_folder_that_is_not_mounted_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("NCCLTUNE_HOME", str(not_mounted(tmp_path, kind)))

    active = read_active()

    assert (active.profile, active.name) == (None, None)
    assert "NCCLTUNE_HOME names is not there" in (active.problem or "")


def test_read_active_with_a_state_that_is_a_pipe_or_folder_says_so(state_path: Path) -> None:
    state_path.unlink()
    os.mkfifo(state_path)
    assert "not a regular file" in (read_active().problem or "")

    state_path.unlink()
    state_path.mkdir()
    assert "not a regular file" in (read_active().problem or "")


def test_read_active_with_a_dangling_state_says_so(state_path: Path) -> None:
    state_path.unlink()
    state_path.symlink_to("nowhere")

    assert "No such file" in (read_active().problem or "")


def test_read_active_leaves_keys_of_a_later_version_alone(state_path: Path) -> None:
    state_path.write_text(state_path.read_text().replace("{", '{"since_version": "9",', 1))

    assert read_active().profile == MINE


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("", "is empty"),
        (format_profile(MINE)[:60], "ends too early"),
        (format_profile(Profile("yours", {})), "holds the profile 'yours'"),
        (format_profile(Profile("mine", {"LD_PRELOAD": "/x.so"})), "LD_PRELOAD"),
        (format_profile(Profile("mine", {"NCCL_PROTO": "LL # small"})), "NCCL_PROTO"),
        (format_profile(Profile("mine", {"NCCL_ALGO": '"Ring"'})), "NCCL_ALGO"),
        (format_profile(Profile("mine", {"NCCL_DEBUG": "INFO"})), "never set by nccltune"),
    ],
    ids=["deleted", "emptied", "cut", "renamed", "preload", "comment", "quotes", "debug"],
)
@pytest.mark.usefixtures("state_path")
def test_read_active_with_a_broken_profile_keeps_its_name(text: str | None, problem: str) -> None:
    path = profiles_dir() / "mine.json"
    path.unlink()
    if text is not None:
        path.write_text(text)

    active = read_active()

    assert active.profile is None
    assert active.name == "mine"
    assert active.path == path
    assert problem in (active.problem or "")


@pytest.mark.skipif(not IS_ROOT, reason="needs root to give files away")
@pytest.mark.parametrize("what", ["state.json", "profiles/mine.json"])
def test_read_active_as_root_refuses_files_in_other_hands(state_path: Path, what: str) -> None:
    path = state_path.parent / what
    os.chown(path, 4711, 4711)
    assert "belongs to user 4711" in (read_active().problem or "")

    os.chown(path, 0, 0)
    path.chmod(0o666)
    assert "anyone can write it" in (read_active().problem or "")

    path.chmod(0o644)
    path.parent.chmod(0o777)
    assert "anyone can swap files" in (read_active().problem or "")


def test_read_active_without_a_home_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLTUNE_HOME", "relative/folder")

    assert "not an absolute path" in (read_active().problem or "")
