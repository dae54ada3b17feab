from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.errors import BusyError, FileError, UsageProblem
from nccltune.inject.marker import settings_digest
from nccltune.paths import STATE_NAME
from nccltune.profile import Profile, format_profile
from nccltune.store import (
    Where,
    activate,
    deactivate,
    files,
    find_profile,
    mark_verified,
    profiles_dir,
    read_active,
    rollback,
    save_candidate,
)
from nccltune.store import lock as lock_module
from nccltune.store.lock import LOCK_NAME, state_lock

ONE = Profile("one", {"NCCL_PROTO": "allreduce:LL"})
TWO = Profile("two", {"NCCL_PROTO": "allreduce:Simple"})


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "folk.json").write_text(format_profile(Profile("folk", {"NCCL_ALGO": "Ring"})))
    monkeypatch.setattr(files, "shipped_profiles_dir", lambda: folder)
    return folder


@pytest.fixture
def two_saved() -> None:
    save_candidate(ONE)
    save_candidate(TWO)


def names() -> tuple[str | None, str | None]:
    active = read_active()
    return active.name, active.previous


@pytest.mark.usefixtures("two_saved")
def test_activate_keeps_the_one_before_as_previous() -> None:
    activate("one", reason="search")
    step = activate("two", reason="manual")

    assert names() == ("two", "one")
    assert (step.name, step.previous, step.replaced) == ("two", "one", "one")
    assert (step.how, step.action, step.problem) == ("manual", "activate", None)
    assert step.path == profiles_dir() / "two.json"


@pytest.mark.usefixtures("two_saved")
def test_activate_the_active_one_again_keeps_previous() -> None:
    activate("one", reason="manual")
    activate("two", reason="manual")

    activate("two", reason="manual")

    assert names() == ("two", "one")


def test_activate_a_shipped_profile_copies_it_into_the_state_folder(shipped: Path) -> None:
    activate("folk", reason="manual")
    (shipped / "folk.json").unlink()

    active = read_active()

    assert active.profile is not None
    assert active.profile.settings == {"NCCL_ALGO": "Ring"}
    assert find_profile("folk").where is Where.STATE


@pytest.mark.parametrize("name", ["../one", "one.json", "/etc/passwd", ""])
def test_activate_takes_names_and_never_files(name: str) -> None:
    with pytest.raises(UsageProblem) as refusal:
        activate(name, reason="manual")

    assert refusal.value.code == "bad_name"
    assert names() == (None, None)


@pytest.mark.usefixtures("two_saved")
def test_activate_what_cannot_be_used_changes_nothing() -> None:
    activate("one", reason="manual")
    (profiles_dir() / "two.json").write_text("{")

    with pytest.raises(FileError):
        activate("two", reason="manual")
    with pytest.raises(UsageProblem):
        activate("three", reason="manual")

    assert names() == ("one", None)


@pytest.mark.parametrize(
    ("source", "code"),
    [("shared-gpu", "shared_source"), ("recording:h200-2x-shm", "recorded_source")],
)
def test_activate_what_was_not_measured_on_real_ranks_needs_a_person(
    source: str, code: str
) -> None:
    save_candidate(replace(ONE, source=source))

    with pytest.raises(UsageProblem, match="--any-host") as refusal:
        activate("one", reason="manual")
    assert refusal.value.code == code

    activate("one", reason="manual", is_any_host=True)
    assert names() == ("one", None)


@pytest.mark.usefixtures("two_saved")
def test_activate_for_any_host_is_kept_for_the_gpus_that_it_was_said_of() -> None:
    activate("one", reason="manual", is_any_host=True, gpu_uuids=("GPU-0", "GPU-1"))

    active = read_active()
    assert active.is_insisted_on(("GPU-0", "GPU-1"))
    assert active.is_insisted_on(("GPU-1",))
    assert not active.is_insisted_on(("GPU-1", "GPU-2"))
    assert not active.is_insisted_on(())


@pytest.mark.usefixtures("two_saved")
def test_activate_for_any_host_on_two_hosts_that_share_a_folder_is_kept_for_both() -> None:
    activate("one", reason="manual", is_any_host=True, gpu_uuids=("GPU-0",))
    activate("one", reason="manual", is_any_host=True, gpu_uuids=("GPU-1",))

    assert read_active().is_insisted_on(("GPU-0",))
    assert read_active().is_insisted_on(("GPU-1",))


@pytest.mark.usefixtures("two_saved")
def test_activate_for_any_host_survives_a_roll_back_and_is_forgotten_with_the_profile() -> None:
    activate("one", reason="manual", is_any_host=True, gpu_uuids=("GPU-0",))
    activate("two", reason="manual")
    assert not read_active().is_insisted_on(("GPU-0",))

    rollback(reason="daemon")
    assert read_active().is_insisted_on(("GPU-0",))

    rollback()
    save_candidate(replace(ONE, name="three"))
    activate("three", reason="manual")
    activate("one", reason="manual")
    assert not read_active().is_insisted_on(("GPU-0",))


@pytest.mark.usefixtures("two_saved")
def test_activate_for_any_host_goes_with_the_profile_that_a_new_one_sets_aside() -> None:
    activate("one", reason="manual", is_any_host=True, gpu_uuids=("GPU-0",))

    save_candidate(replace(TWO, name="one"))

    assert read_active().name != "one"
    assert read_active().is_insisted_on(("GPU-0",))
    activate("one", reason="manual")
    assert not read_active().is_insisted_on(("GPU-0",))


@pytest.mark.usefixtures("two_saved")
def test_activate_over_a_broken_state_goes_on_and_tells() -> None:
    activate("one", reason="manual")
    (profiles_dir().parent / STATE_NAME).write_text("{")

    step = activate("two", reason="manual")

    assert "state.json:1" in (step.problem or "")
    assert names() == ("two", None)


@pytest.mark.usefixtures("two_saved")
def test_deactivate_leaves_something_to_roll_back_to() -> None:
    activate("one", reason="manual")

    step = deactivate()
    assert (step.name, step.action) == (None, "off")
    assert names() == (None, "one")
    assert read_active().problem is None

    deactivate()
    assert names() == (None, "one")


@pytest.mark.usefixtures("two_saved")
def test_rollback_returns_to_the_previous_and_back() -> None:
    activate("one", reason="manual")
    activate("two", reason="manual")

    step = rollback(reason="daemon")
    assert (step.name, step.replaced, step.how, step.action) == (
        "one",
        "two",
        "daemon",
        "rollback",
    )
    assert names() == ("one", "two")

    rollback()
    assert names() == ("two", "one")


@pytest.mark.usefixtures("two_saved")
def test_rollback_of_the_first_profile_ever_leaves_none_active() -> None:
    activate("one", reason="manual")

    rollback()

    assert names() == (None, "one")


@pytest.mark.usefixtures("two_saved")
def test_rollback_after_off_returns_to_what_was_active() -> None:
    activate("one", reason="manual")
    deactivate()

    rollback()

    assert names() == ("one", None)


@pytest.mark.usefixtures("two_saved")
def test_rollback_to_a_broken_profile_leaves_none_active_and_tells() -> None:
    activate("one", reason="manual")
    activate("two", reason="manual")
    (profiles_dir() / "one.json").write_text("{")

    step = rollback()

    assert step.name is None
    assert "one.json:1" in (step.problem or "")
    assert names() == (None, "two")


@pytest.mark.parametrize("step", [rollback, deactivate])
def test_step_for_what_is_not_active_any_more_changes_nothing(
    step: Callable[..., object],
) -> None:
    for name, algorithm in (("first", "ring"), ("second", "tree")):
        save_candidate(Profile(name, {"NCCL_ALGO": f"allreduce:{algorithm}"}))
        activate(name, reason="manual")
    before = read_active()
    activate("second", reason="manual")

    with pytest.raises(BusyError, match="another step was taken meanwhile, second is active"):
        step(reason="daemon", expected=before)
    assert read_active().name == "second"

    step(reason="daemon", expected=read_active())
    assert read_active().name != "second"


def test_every_step_has_a_number_of_its_own_that_no_clock_sets() -> None:
    save_candidate(Profile("first", {"NCCL_ALGO": "allreduce:ring"}))
    steps: tuple[Callable[[], object], ...] = (
        lambda: activate("first", reason="manual"),
        deactivate,
        rollback,
    )
    found = []
    for step in (*steps, *steps):
        step()
        found.append(read_active().generation)

    assert found == [1, 2, 3, 4, 5, 6]


def test_rollback_without_anything_before_is_refused() -> None:
    with pytest.raises(UsageProblem) as refusal:
        rollback()

    assert refusal.value.code == "nothing_to_roll_back"


@pytest.mark.usefixtures("two_saved")
def test_save_candidate_over_the_active_one_leaves_launches_as_they_are() -> None:
    activate("one", reason="manual")
    activate("two", reason="manual")
    better = Profile("two", {"NCCL_PROTO": "allreduce:LL128"})

    path = save_candidate(better)

    assert path == profiles_dir() / "two.json"
    assert find_profile("two").profile == better
    active = read_active()
    assert active.profile is not None
    assert active.profile.settings == TWO.settings
    assert (active.name or "").startswith("two.")
    assert (active.previous, active.how) == ("one", "manual")


@pytest.mark.usefixtures("two_saved")
def test_save_candidate_over_the_previous_one_keeps_what_a_rollback_returns_to() -> None:
    activate("one", reason="manual")
    activate("two", reason="manual")

    save_candidate(Profile("one", {}))
    rollback()

    active = read_active()
    assert active.profile is not None
    assert active.profile.settings == ONE.settings


@pytest.mark.usefixtures("two_saved")
def test_save_candidate_with_the_same_settings_updates_the_active_one() -> None:
    activate("one", reason="manual")

    save_candidate(replace(ONE, note="measured again"))

    active = read_active()
    assert active.name == "one"
    assert active.profile is not None
    assert active.profile.note == "measured again"


def test_save_candidate_of_a_long_name_sets_the_active_one_aside() -> None:
    name = "k" * 64
    save_candidate(replace(ONE, name=name))
    activate(name, reason="manual")

    save_candidate(replace(TWO, name=name))

    active = read_active()
    assert active.profile is not None
    assert active.profile.settings == ONE.settings


@pytest.mark.usefixtures("two_saved")
def test_a_step_while_another_is_taken_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_POLL_S", 0.001)
    folder = profiles_dir().parent
    with (folder / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyError), state_lock(folder, wait_s=0.01):
            pass

    activate("one", reason="manual")
    assert names() == ("one", None)


def test_a_step_where_the_folder_cannot_be_made_is_a_file_error() -> None:
    Path(os.environ["NCCLTUNE_HOME"]).rmdir()
    Path(os.environ["NCCLTUNE_HOME"]).write_text("a file in the way")

    with pytest.raises(FileError):
        deactivate()
    with pytest.raises(FileError):
        activate("folk", reason="manual")


@pytest.mark.usefixtures("two_saved")
def test_the_state_file_is_as_documented() -> None:
    activate("one", reason="search")

    state = json.loads((profiles_dir().parent / STATE_NAME).read_text())

    fields = ["schema", "active", "previous", "activated_at", "how", "action", "any_host"]
    assert list(state)[:8] == [*fields, "digest"]
    assert state["digest"] == settings_digest(find_profile("one").profile.settings)
    assert state["schema"] == "nccltune.state/1"
    assert (state["active"], state["previous"], state["how"]) == ("one", None, "search")


@pytest.mark.usefixtures("two_saved")
def test_what_is_written_lets_root_read_it_back() -> None:
    old_mask = os.umask(0)
    try:
        activate("one", reason="manual")
        mark_verified("one", {"gain_pct": 3.0})
    finally:
        os.umask(old_mask)

    for path in (profiles_dir().parent / STATE_NAME, profiles_dir() / "one.json"):
        assert path.stat().st_mode & 0o022 == 0
