"""The whole picture: store, host and servers, whatever is wrong with any of them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nccltune.host.facts import HostFacts
from nccltune.live.scanner import MAX_RANKS_OF_SERVER, find_servers
from nccltune.live.servers import Context
from nccltune.live.stock import shape_of, take_stock
from nccltune.profile import Profile
from nccltune.seen_files import OWN
from nccltune.sglang.command import parse_launch
from nccltune.store import activate, profiles_dir, save_candidate
from tests.support.command_line import FINGERPRINT
from tests.support.fake_proc import FakeProc

SETTINGS = {"NCCL_ALGO": "allreduce:ring"}


def this_host(*_: object) -> tuple[HostFacts | None, str]:
    return HostFacts(FINGERPRINT, "sm90"), ""


def other_host(*_: object) -> tuple[HostFacts | None, str]:
    return HostFacts(replace(FINGERPRINT, gpu_names=("L4", "L4")), "sm89"), ""


@pytest.fixture
def profile_path() -> Path:
    """Activate a profile for the stand-in host and return its file."""
    path = save_candidate(Profile("mine", SETTINGS, fingerprint=FINGERPRINT.to_json()))
    activate("mine", reason="manual")
    return path


def test_take_stock_of_a_host_without_anything_is_calm() -> None:
    stock = take_stock(())

    assert stock.profile.name is None
    assert not stock.profile.is_degraded
    assert stock.servers == ()
    json.dumps(stock.to_json())


def test_take_stock_of_an_active_profile_compares_it_with_the_host(profile_path: Path) -> None:
    stock = take_stock((), read_host=this_host)

    assert stock.to_json()["active"] == {
        **dict(stock.to_json()["active"]),  # type: ignore[call-overload]
        "name": "mine",
        "path": str(profile_path),
        "match": "identical",
        "is_degraded": False,
        "settings": SETTINGS,
    }


def test_take_stock_on_another_host_is_degraded(profile_path: Path) -> None:
    profile = take_stock((), read_host=other_host).profile

    assert profile.is_degraded
    assert "gpu_names" in profile.differing


def _truncate(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8")[:40], encoding="utf-8")


def _give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (Path.unlink, "cannot be read"),
        (_truncate, "not JSON"),
        (_give_away, "belongs to user"),
        (lambda path: path.write_text("", encoding="utf-8"), "empty"),
    ],
    ids=["deleted", "truncated", "other_owner", "empty"],
)
def test_take_stock_of_a_profile_that_came_to_harm_says_how(
    profile_path: Path, harm: object, word: str
) -> None:
    harm(profile_path)  # type: ignore[operator]

    profile = take_stock((), read_host=this_host).profile

    assert profile.is_degraded
    assert profile.name == "mine"
    assert word in profile.problem
    assert profile.settings == {}


def test_take_stock_with_a_broken_policy_and_broken_launches_warns(profile_path: Path) -> None:
    folder = profiles_dir().parent
    (folder / "policy.json").write_text("{", encoding="utf-8")
    (folder / "launches.jsonl").mkdir()

    warnings = take_stock((), read_host=this_host).warnings

    assert any("policy.json" in warning for warning in warnings)
    assert any("launches.jsonl" in warning for warning in warnings)


def test_take_stock_with_a_broken_state_is_degraded() -> None:
    folder = profiles_dir().parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text("not json", encoding="utf-8")

    profile = take_stock(()).profile

    assert profile.is_degraded
    assert "state.json" in profile.problem


def test_shape_of_a_model_that_is_not_there_is_none() -> None:
    command = parse_launch(["sglang", "serve", "--model-path", "/no/such/model"])

    assert shape_of(command, {}, OWN) is None


def test_stock_cuts_what_somebody_else_made_too_long(
    tmp_path: Path, profile_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = FakeProc(tmp_path)
    monkeypatch.setattr("nccltune.live.stock.Context", partial(Context, proc_root=proc.root))
    flags = [f"--flag-{number}" for number in range(1000)]
    argv = ["sglang", "serve", "--model-path", "x" * 5000, *flags, "--tp", "2"]
    proc.add(100, argv, environ={"NCCL_ALGO": "y" * 100_000})
    for number in range(100):
        environ = {"NCCL_ALGO": "y" * 100_000}
        proc.add_rank(200 + number, f"TP{number}", parent=100, environ=environ)

    stock = take_stock(find_servers(proc.root), read_host=this_host)

    text = json.dumps(stock.to_json())
    assert len(text) < 200_000
    assert len(stock.servers[0].ranks) == MAX_RANKS_OF_SERVER
