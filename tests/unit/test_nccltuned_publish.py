"""What is published, and when it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nccltune.errors import FileError
from nccltune.inject.marker import MARKER, parse_marker
from nccltuned.publish import Publisher, format_env
from tests.support.stocks import active_data, stock_data


def read_env(text: str) -> dict[str, str]:
    """Read an environment file without quotes, as systemd and docker both do."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_format_env_holds_the_settings_and_the_mark_of_who_set_them() -> None:
    active = active_data()

    found = read_env(format_env(active))

    marker = parse_marker(found.pop(MARKER))
    assert found.pop("SPT_NOENV") == "1"
    assert found == active["settings"]
    assert marker is not None
    assert marker.keys == tuple(sorted(active["settings"]))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"name": None, "digest": None, "settings": {}}, "No profile is active"),
        ({"is_degraded": True, "problem": "x.json: is\nempty"}, "x.json: is empty"),
        ({"is_degraded": True, "match": "foreign"}, "another kind of host"),
        ({"is_degraded": True, "unknown": "no driver"}, "no driver"),
        (
            {"name": None, "digest": None, "problem": "broken", "is_degraded": True},
            "No profile can be used: broken",
        ),
    ],
    ids=["none", "broken", "foreign", "unknown", "broken_state"],
)
def test_format_env_without_a_usable_profile_sets_nothing_and_says_why(
    changes: dict[str, object], word: str
) -> None:
    text = format_env(active_data(**changes))

    assert read_env(text) == {}
    assert word in text


def test_publish_writes_both_files_and_only_when_something_is_new(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "run", {"pid": 7, "started_ticks": 8})

    assert publisher.publish(stock_data(), {"rollbacks": []})
    assert not publisher.publish(stock_data(), {"rollbacks": []})
    assert publisher.publish(stock_data(), {"rollbacks": [1]})

    data = json.loads((tmp_path / "run/active.json").read_text(encoding="utf-8"))
    assert data["schema"] == "nccltune.active/1"
    assert data["nccltuned"]["pid"] == 7
    assert data["active"]["name"] == "mine"
    assert data["rollbacks"] == [1]
    assert (tmp_path / "run/active.env").stat().st_mode & 0o777 == 0o644


def test_publish_writes_again_what_it_was_told_to_forget(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, {})
    publisher.publish(stock_data(), {})
    (tmp_path / "active.env").unlink()
    publisher.forget()

    assert publisher.publish(stock_data(), {})
    assert (tmp_path / "active.env").exists()


def test_publish_that_cannot_write_says_so_and_tries_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.write_text("", encoding="utf-8")
    publisher = Publisher(folder, {})
    with pytest.raises(FileError):
        publisher.publish(stock_data(), {})
    folder.unlink()

    assert publisher.publish(stock_data(), {})
