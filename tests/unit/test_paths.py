from __future__ import annotations

import os
import pwd
import sysconfig
from pathlib import Path
from typing import NoReturn

import pytest

from nccltune import paths
from nccltune.errors import FileError, UsageProblem
from tests.support.launch_host import not_mounted


@pytest.fixture
def plain_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)


def test_state_dir_with_own_variable_is_that_folder() -> None:
    assert paths.state_dir({"NCCLTUNE_HOME": "/srv/tune"}) == Path("/srv/tune")


def test_state_dir_reads_the_process_environment_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCLTUNE_HOME", "/srv/other")

    assert paths.state_dir() == Path("/srv/other")


@pytest.mark.parametrize("value", ["state", "./state", "~/state"])
def test_state_dir_with_a_relative_variable_is_refused(value: str) -> None:
    with pytest.raises(UsageProblem, match="not an absolute path") as refusal:
        paths.state_dir({"NCCLTUNE_HOME": value})

    assert refusal.value.code == "bad_home"


def test_state_dir_of_root_is_the_system_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    state = paths.state_dir({"NCCLTUNE_HOME": "", "XDG_STATE_HOME": "/x", "HOME": "/root"})

    assert state == Path("/var/lib/nccltune")


@pytest.mark.usefixtures("plain_user")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_STATE_HOME": "/x/state", "HOME": "/home/ada"}, "/x/state/nccltune"),
        ({"HOME": "/home/ada"}, "/home/ada/.local/state/nccltune"),
        (
            {"XDG_STATE_HOME": "relative", "HOME": "/home/ada"},
            "/home/ada/.local/state/nccltune",
        ),
    ],
    ids=["xdg", "home", "relative xdg is ignored"],
)
def test_state_dir_of_a_user_follows_the_xdg_rules(
    variables: dict[str, str], expected: str
) -> None:
    assert paths.state_dir(variables) == Path(expected)


@pytest.mark.usefixtures("plain_user")
def test_state_dir_of_a_user_id_without_a_home_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)

    with pytest.raises(UsageProblem, match="set NCCLTUNE_HOME") as refusal:
        paths.state_dir({})

    assert refusal.value.code == "no_home"


def test_shipped_profiles_dir_in_a_checkout_is_the_checkouts() -> None:
    checkout = Path(__file__).resolve().parents[2]

    assert paths.shipped_profiles_dir() == checkout / "profiles"
    assert paths.shipped_recordings_dir() == checkout / "profiles" / "recordings"


def test_shipped_profiles_dir_of_an_install_is_the_shared_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "nccltune"
    shared = tmp_path / "share" / "nccltune" / "profiles"
    shared.mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE_DIR", package)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))

    assert paths.shipped_profiles_dir() == shared


def test_shipped_profiles_dir_of_a_target_install_is_found_above_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "target" / "share" / "nccltune" / "profiles"
    shared.mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE_DIR", tmp_path / "target" / "nccltune")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path / "nowhere"))

    assert paths.shipped_profiles_dir() == shared


def test_shipped_profiles_dir_without_any_data_names_the_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_PACKAGE_DIR", tmp_path / "site-packages" / "nccltune")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path / "prefix"))

    assert paths.shipped_profiles_dir() == tmp_path / "prefix" / "share" / "nccltune" / "profiles"


@pytest.mark.parametrize("kind", ["missing", "dangling", "file"])
def test_reading_dir_that_is_not_mounted_is_refused(tmp_path: Path, kind: str) -> None:
    home = not_mounted(tmp_path, kind)

    with pytest.raises(FileError, match="NCCLTUNE_HOME names is not there") as refusal:
        paths.reading_dir({"NCCLTUNE_HOME": str(home)})

    assert refusal.value.code == "no_state_folder"
    assert str(home) in str(refusal.value)


def test_reading_dir_that_is_there_is_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    assert paths.reading_dir({"NCCLTUNE_HOME": str(tmp_path)}) == tmp_path
    assert paths.reading_dir({"NCCLTUNE_HOME": f"{tmp_path}/link"}) == tmp_path / "link"


@pytest.mark.usefixtures("plain_user")
def test_reading_dir_takes_a_store_that_it_may_not_look_into_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_path: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(paths, "SYSTEM_STATE_DIR", tmp_path)
    own = {"HOME": "/home/ada"}
    assert paths.reading_dir(own) == Path("/home/ada/.local/state/nccltune")

    real_lstat = Path.lstat
    monkeypatch.setattr(
        Path,
        "lstat",
        lambda path: closed(path) if path.is_relative_to(tmp_path) else real_lstat(path),
    )
    assert paths.reading_dir(own) == tmp_path
