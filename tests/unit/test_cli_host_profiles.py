"""Profiles of the host's store, for a user who has never activated anything of his own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from nccltune import paths
from nccltune.cli.settings_options import candidates_from_options
from nccltune.cli.verify_answer import conclude
from nccltune.cli.verify_marking import mark_gains, unmarked_warnings
from nccltune.cli.verify_options import find_arm_profile
from nccltune.errors import FileError
from nccltune.paths import state_dir
from nccltune.profile import Profile, format_profile
from nccltune.store import activate, find_profile, list_profiles, profiles_dir, save_candidate
from nccltune.store.files import Where
from nccltune.verify.judging.judgement import Verdict
from tests.support.boots import DEFAULT_ARM, FAST_ARM, mirrored, record_of
from tests.support.command_line import FINGERPRINT
from tests.support.profiles import profile_verb

if TYPE_CHECKING:
    from nccltune.cli.envelope import Complaint

SETTINGS = {"NCCL_PROTO": "allreduce:LL"}
MINE = Profile("mine", SETTINGS, source="gpus", fingerprint=FINGERPRINT.to_json())
FOLK = "folk-ll-ring"
PROFILES = "profiles"


def close(monkeypatch: pytest.MonkeyPatch, folder: Path, *, may_enter: bool = False) -> None:
    """Let nobody list a folder, as mode 711 does, nor look at what is in it, as mode 700 does.

    Modes alone would say nothing to root, who may be the one that runs this.
    """
    listed, looked_at, opened = Path.iterdir, Path.lstat, os.open

    def refuse(path: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    def is_within(path: object) -> bool:
        return folder in Path(str(path)).parents

    def iterdir(path: Path) -> Any:
        return refuse(path) if path == folder or is_within(path) else listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    if may_enter:
        return

    def lstat(path: Path) -> Any:
        return refuse(path) if is_within(path) else looked_at(path)

    def open_file(path: Any, *rest: Any, **more: Any) -> int:
        return refuse(path) if is_within(path) else opened(path, *rest, **more)

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(os, "open", open_file)


@pytest.fixture
def host_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's store with one that is active, read by a user who has activated nothing."""
    system = tmp_path / "system"
    monkeypatch.setenv("NCCLTUNE_HOME", str(system))
    save_candidate(MINE)
    save_candidate(replace(MINE, name="other"))
    for name in ("folk-ll-ring", "mine"):
        activate(name, reason="manual", is_any_host=True)
    monkeypatch.delenv("NCCLTUNE_HOME")
    monkeypatch.setattr(paths, "SYSTEM_STATE_DIR", system)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return system


def test_list_and_show_of_a_user_without_a_store_know_the_hosts_profiles(
    capsys: pytest.CaptureFixture[str], host_store: Path
) -> None:
    (host_store / "profiles" / "broken.json").write_text("{")

    listed = profile_verb(capsys, "list")
    shown = profile_verb(capsys, "show", "mine")["data"]
    copied = profile_verb(capsys, "show", "folk-ll-ring")["data"]

    rows = {each["path"]: each["state"] for each in listed["data"]["profiles"]}
    folder = host_store / "profiles"
    assert rows[str(folder / "mine.json")] == "active"
    assert rows[str(folder / "other.json")] == "candidate"
    assert rows[str(folder / "broken.json")] == "candidate"
    assert "broken.json" in listed["warnings"][0]
    assert (shown["state"], shown["path"]) == ("active", str(folder / "mine.json"))
    assert copied["path"] == str(folder / "folk-ll-ring.json")
    assert not state_dir().exists()


@pytest.mark.usefixtures("host_store")
def test_all_that_reads_a_profile_knows_the_hosts_and_activate_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compared = profile_verb(capsys, "diff", "mine", "other")
    exported = profile_verb(capsys, "export", "other", "--format", "docker")
    activated = profile_verb(capsys, "activate", "other")

    assert compared["data"]["is_equal"] is True
    assert exported["data"]["settings"] == SETTINGS
    assert find_arm_profile("other").settings == SETTINGS
    assert candidates_from_options(["other"], ()) == [("other", SETTINGS)]
    assert activated["errors"][0]["code"] == "not_in_store"
    assert not state_dir().exists()


def test_list_and_show_tell_a_users_own_from_the_hosts_of_that_name(
    capsys: pytest.CaptureFixture[str], host_store: Path
) -> None:
    own = save_candidate(MINE)

    listed = profile_verb(capsys, "list")["data"]["profiles"]
    shown = profile_verb(capsys, "show", "mine")["data"]

    states = {each["path"]: each["state"] for each in listed if each["name"] == "mine"}
    assert states == {str(own): "candidate", str(host_store / "profiles/mine.json"): "active"}
    assert (shown["state"], shown["path"]) == ("candidate", str(own))


def test_list_of_a_user_with_a_store_leaves_the_hosts_out(
    capsys: pytest.CaptureFixture[str], host_store: Path
) -> None:
    save_candidate(replace(MINE, name="own"))
    activate("own", reason="manual", is_any_host=True)

    listed = profile_verb(capsys, "list")["data"]["profiles"]

    assert not [each for each in listed if each["path"].startswith(str(host_store))]
    assert profile_verb(capsys, "show", "other")["errors"][0]["code"] == "no_such_profile"


def test_activate_of_the_hosts_says_whose_it_is_and_how_to_keep_it(
    capsys: pytest.CaptureFixture[str], host_store: Path
) -> None:
    problem = profile_verb(capsys, "activate", "other")["errors"][0]["message"]

    path = host_store / PROFILES / "other.json"
    assert problem.startswith("profile 'other' is the host's")
    assert "launches of this user get the host's active profile already" in problem
    assert problem.endswith(f"nccltune profile import {path}")
    # What it says to do leads to where one wanted to be.
    profile_verb(capsys, "import", str(path))
    assert find_profile("other", is_own=True).path == profiles_dir() / "other.json"


@pytest.mark.usefixtures("host_store")
def test_a_look_up_among_ones_own_names_none_that_it_would_not_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_candidate(replace(MINE, name="own"))

    own = profile_verb(capsys, "activate", "nope")["errors"][0]
    any_one = profile_verb(capsys, "show", "nope")["errors"][0]

    assert own["code"] == any_one["code"] == "no_such_profile"
    assert f"there are: {FOLK}, own, sglang-default (" in own["message"]
    assert f"there are: {FOLK}, mine, other, own, sglang-default (" in any_one["message"]
    assert {each.name for each in list_profiles(is_own=True)} == {FOLK, "own", "sglang-default"}


@pytest.mark.parametrize("closed", [".", PROFILES])
def test_a_store_of_the_hosts_that_is_closed_hides_nothing_else(
    capsys: pytest.CaptureFixture[str],
    host_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    closed: str,
) -> None:
    own = save_candidate(replace(MINE, name="own"))
    close(monkeypatch, host_store / closed)

    listed = profile_verb(capsys, "list")
    missing = profile_verb(capsys, "show", "nope")["errors"][0]

    assert find_profile(FOLK).where is Where.SHIPPED
    assert find_profile("own").path == own
    assert profile_verb(capsys, "show", FOLK)["data"]["state"] == "shipped"
    assert {each["name"] for each in listed["data"]["profiles"]} == {FOLK, "own", "sglang-default"}
    told = f"the host's profiles in {host_store / PROFILES} cannot be read (Permission denied)"
    assert listed["warnings"].count(told) == 1
    assert missing["code"] == "no_such_profile"
    assert missing["message"].endswith(told)


def test_list_shows_the_hosts_active_one_where_its_folder_is_not_to_be_listed(
    capsys: pytest.CaptureFixture[str], host_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close(monkeypatch, host_store / PROFILES, may_enter=True)

    listed = profile_verb(capsys, "list")

    rows = [(each["name"], each["state"]) for each in listed["data"]["profiles"]]
    assert rows == [(FOLK, "shipped"), ("mine", "active"), ("sglang-default", "shipped")]
    assert listed["warnings"] == [
        f"the host's profiles in {host_store / PROFILES} cannot be read (Permission denied)"
    ]


@pytest.mark.parametrize("harm", ["a file", "a loop"])
def test_what_stands_in_the_place_of_the_hosts_profiles_hides_nothing_else(
    capsys: pytest.CaptureFixture[str], host_store: Path, harm: str
) -> None:
    folder = host_store / PROFILES
    folder.rename(host_store / "elsewhere")
    folder.write_text("") if harm == "a file" else folder.symlink_to(folder)

    listed = profile_verb(capsys, "list")

    assert {each["name"] for each in listed["data"]["profiles"]} == {FOLK, "sglang-default"}
    assert listed["warnings"][0].startswith(f"the host's profiles in {folder} cannot be read (")
    assert find_profile(FOLK).where is Where.SHIPPED


@pytest.mark.usefixtures("host_store")
def test_a_store_of_ones_own_that_is_closed_stays_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(MINE)
    close(monkeypatch, profiles_dir())

    for name in ("mine", FOLK, "nope"):
        with pytest.raises(FileError, match="Permission denied"):
            find_profile(name)
    failed = profile_verb(capsys, "list")

    assert (failed["exit_code"], failed["errors"][0]["code"]) == (6, "cannot_read")
    assert str(profiles_dir()) in failed["errors"][0]["message"]


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("by the host", ("is the host's and not this user's own", "{path} first")),
        ("nowhere", ("is not in this user's store", "import it first")),
        ("by the host, shipped too", ("is the host's", "{path} --name NAME first")),
        ("by both", ()),
    ],
)
def test_a_gain_is_marked_for_ones_own_alone_and_the_rest_is_told(
    host_store: Path, monkeypatch: pytest.MonkeyPatch, kept: str, words: tuple[str, ...]
) -> None:
    path = host_store / PROFILES / "fast.json"
    fast = FAST_ARM.profile
    assert fast is not None
    if kept != "nowhere":
        path.write_text(format_profile(fast))
    if kept == "by both":
        save_candidate(fast)
    if kept.endswith("too"):
        monkeypatch.setattr("nccltune.cli.verify_marking.is_shipped", lambda _name: True)
    boots = mirrored(("default", 9.8), ("fast", 8.9))
    found = conclude(record_of(boots, arms=(DEFAULT_ARM, FAST_ARM)))
    assert found.judgement.verdict is Verdict.GAIN

    not_kept: list[Complaint] = []
    marked = mark_gains(found, not_kept)
    told = list(unmarked_warnings(marked))

    assert not not_kept
    assert marked.marked == (() if words else ("fast",))
    assert len(told) == (1 if words else 0)
    assert all(word.format(path=path) in told[0] for word in words)
