"""What counts as a change."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nccltune.live.scanner import ServerScanner
from nccltune.profile import Profile
from nccltune.store import activate, profiles_dir, read_active, save_candidate
from nccltuned.wakeups import Wakeups
from nccltuned.watch import ServerWatch, StoreWatch
from tests.support.fake_proc import FakeProc

ARGV = ("python3", "-m", "sglang.launch_server")


def test_server_watch_notices_servers_and_ranks_that_come_and_go(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = ServerWatch(ServerScanner(proc.root))
    assert watch.look()
    assert not watch.look()

    proc.add(100, ARGV)
    assert watch.look()
    proc.add_rank(101, "TP0", parent=100)
    assert watch.look()
    assert not watch.look()
    proc.add_rank(101, "TP0", parent=100, ticks=9999)
    assert watch.look()
    proc.remove(100, 101)
    assert watch.look()
    assert watch.servers == ()


def test_store_watch_notices_every_way_in_which_the_decision_changes() -> None:
    folder = profiles_dir().parent
    watch = StoreWatch(folder)
    assert watch.has_decision_changed(None)
    assert not watch.has_decision_changed(None)
    path = save_candidate(Profile("mine", {"NCCL_ALGO": "allreduce:ring"}))
    activate("mine", reason="manual")
    assert watch.has_decision_changed(read_active())
    assert not watch.has_decision_changed(read_active())

    path.chmod(0o666)
    assert watch.has_decision_changed(read_active())
    path.unlink()
    assert watch.has_decision_changed(read_active())
    (folder / "policy.json").write_text("{}", encoding="utf-8")
    assert watch.has_decision_changed(read_active())


def test_store_watch_notices_launches_apart_from_decisions() -> None:
    folder = profiles_dir().parent
    folder.mkdir(parents=True, exist_ok=True)
    watch = StoreWatch(folder)
    assert watch.has_launches_changed()
    assert watch.has_decision_changed(None)

    (folder / "launches.jsonl").write_text("{}\n", encoding="utf-8")

    assert watch.has_launches_changed()
    assert not watch.has_launches_changed()
    assert not watch.has_decision_changed(None)


@pytest.fixture
def wakeups() -> object:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO)
    before = {number: signal.getsignal(number) for number in numbers}
    found = Wakeups()
    found.open()
    yield found
    found.close()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGTERM, "is_stop"),
        (signal.SIGINT, "is_stop"),
        (signal.SIGHUP, "is_reload"),
        (signal.SIGIO, "is_change"),
    ],
)
def test_wakeups_tell_one_signal_from_another(
    wakeups: Wakeups, number: signal.Signals, name: str
) -> None:
    os.kill(os.getpid(), number)

    woken = wakeups.take()

    assert [each for each in ("is_stop", "is_reload", "is_change") if getattr(woken, each)] == [
        name
    ]
    assert wakeups.take() == type(woken)()


def test_wakeups_notice_a_file_in_a_folder_that_is_watched(
    wakeups: Wakeups, tmp_path: Path
) -> None:
    wakeups.watch([tmp_path, tmp_path / "later"])
    (tmp_path / "x").write_text("1", encoding="utf-8")
    assert wakeups.take().is_change

    (tmp_path / "later").mkdir()
    wakeups.take()
    wakeups.watch([tmp_path, tmp_path / "later"])
    (tmp_path / "later/x").write_text("1", encoding="utf-8")

    assert wakeups.take().is_change
    assert not wakeups.take().is_change


def test_wakeups_watch_a_folder_that_was_made_anew(wakeups: Wakeups, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    wakeups.watch([folder])
    folder.rename(tmp_path / "old")
    folder.mkdir()
    wakeups.watch([folder])
    wakeups.take()

    (folder / "x").write_text("1", encoding="utf-8")

    assert wakeups.take().is_change
