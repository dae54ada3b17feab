"""Where the service publishes, and whether what lies there is still true."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nccltune.live.procfs import read_process
from nccltune.live.published import SCHEMA, SYSTEM_RUN_DIR, read_published, run_dir


def test_run_dir_is_the_users_choice_then_systemds() -> None:
    both = {"NCCLTUNE_RUN_DIR": "/a", "RUNTIME_DIRECTORY": "/b:/c"}

    assert run_dir(both) == Path("/a")
    assert run_dir({"RUNTIME_DIRECTORY": "/b:/c"}) == Path("/b")


@pytest.mark.parametrize("given", ["", "relative/path"])
def test_run_dir_for_root_is_the_systems(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    assert run_dir({"NCCLTUNE_RUN_DIR": given}) == SYSTEM_RUN_DIR


def test_run_dir_for_others_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert run_dir({"XDG_RUNTIME_DIR": "/run/user/1000"}) == Path("/run/user/1000/nccltune")
    assert run_dir({}) == Path("/run/user/1000/nccltune")


def publish(folder: Path, **changes: object) -> dict[str, str]:
    own = read_process(os.getpid())
    assert own is not None
    identity = {"pid": own.pid, "started_ticks": own.started_ticks}
    document = {"schema": SCHEMA, "nccltuned": identity, **changes}
    (folder / "active.json").write_text(json.dumps(document), encoding="utf-8")
    return {"NCCLTUNE_RUN_DIR": str(folder)}


def test_read_published_of_a_service_that_runs_is_what_it_wrote(tmp_path: Path) -> None:
    found = read_published(publish(tmp_path, more=1))

    assert found is not None
    assert found.pid == os.getpid()
    assert found.data["more"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"nccltuned": {"pid": 2**22 - 1, "started_ticks": 1}},
        {"nccltuned": {"pid": os.getpid(), "started_ticks": 1}},
        {"schema": "nccltune.active/9"},
        {"nccltuned": None},
    ],
    ids=["dead", "another_process", "schema", "nonsense"],
)
def test_read_published_of_anything_else_is_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    assert read_published(publish(tmp_path, **changes)) is None


def test_read_published_of_a_broken_or_missing_file_is_nothing(tmp_path: Path) -> None:
    environ = {"NCCLTUNE_RUN_DIR": str(tmp_path)}
    assert read_published(environ) is None
    (tmp_path / "active.json").write_text("{", encoding="utf-8")

    assert read_published(environ) is None
