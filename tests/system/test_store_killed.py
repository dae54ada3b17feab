"""Steps of the store, killed at their system calls: what is there afterwards is the old or the new.

And the order in which a step forces things to disk, which no kill can show: only a power cut would.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from nccltune.store import activate, list_profiles, profiles_dir, read_active, save_candidate
from tests.support.launch_host import REPOSITORY
from tests.support.store_program import BETTER, ONE, TWO

if TYPE_CHECKING:
    from nccltune.profile import Profile
    from tests.conftest import Require

pytestmark = [pytest.mark.system, pytest.mark.slow]

MARK = "getpgid"
CHANGING = frozenset({"openat", "flock", "fchmod", "write", "fsync", "rename", "close"})
_CALL = re.compile(r"\d+\s+(\w+)\((.*)")
_FSYNC = re.compile(r"fsync\(\d+<(.*)>\)")
_RENAME = re.compile(r'rename\("(.*)", "(.*)"\)')


class Call(NamedTuple):
    """One system call of a step.

    Attributes:
        ordinal: how manieth call of its name it is in the whole program, from 1.
    """

    name: str
    ordinal: int
    text: str


@pytest.fixture(autouse=True)
def tools(require: Require) -> None:
    require(os.geteuid() == 0, "killing at system calls needs root")
    require(shutil.which("strace"), "strace is not installed")
    words = ["strace", "-o", os.devnull, "true"]
    traced = subprocess.run(words, capture_output=True, check=False)
    require(traced.returncode == 0, "this machine lets nobody trace processes")


@pytest.fixture
def home() -> Path:
    """A state folder in which ``one`` is active after ``two``."""
    save_candidate(ONE)
    save_candidate(TWO)
    activate("two", reason="manual")
    activate("one", reason="manual")
    return profiles_dir().parent


def trace(step: str, log: Path, *options: str) -> list[Call]:
    """Take a step under strace, and return its system calls, from the first mark on."""
    strace = ["strace", "-f", "-y", "-o", str(log), *options]
    words = [*_fixed_addresses(), *strace, sys.executable, "-m", "tests.support.store_program"]
    environ = {
        "NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"],
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    subprocess.run([*words, step], env=environ, capture_output=True, check=False)
    counts: Counter[str] = Counter()
    calls: list[Call] = []
    is_step = False
    for line in log.read_text(errors="replace").splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        counts[match[1]] += 1
        if match[1] == MARK:
            is_step = not is_step
        if is_step:
            calls.append(Call(match[1], counts[match[1]], line.split(maxsplit=1)[1]))
    return calls


def _fixed_addresses() -> list[str]:
    """Return words that keep the number of memory calls the same from run to run."""
    return ["setarch", "-R"] if shutil.which("setarch") else []


def settings_of(*profiles: Profile) -> list[dict[str, str]]:
    return [dict(profile.settings) for profile in profiles]


def check_store(allowed: Sequence[Profile | None]) -> None:
    """See that the store opens, with one of the profiles that may be active, and can go on."""
    active = read_active()
    assert active.problem is None
    found = None if active.profile is None else dict(active.profile.settings)
    assert found in [None if each is None else dict(each.settings) for each in allowed]
    assert all(listed.profile is not None for listed in list_profiles())
    activate("two", reason="manual")
    assert read_active().profile == TWO


@pytest.mark.parametrize(
    ("step", "allowed", "names"),
    [
        ("activate", (ONE, TWO), None),
        ("rollback", (ONE, TWO), None),
        ("off", (ONE, None), CHANGING),
        ("save", (ONE,), CHANGING),
    ],
    ids=["activate", "rollback", "off", "save"],
)
@pytest.mark.timeout(300)
def test_a_step_killed_at_any_system_call_leaves_the_old_or_the_new(
    home: Path,
    tmp_path: Path,
    step: str,
    allowed: tuple[Profile | None, ...],
    names: frozenset[str] | None,
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(home, kept)
    calls = trace(step, tmp_path / "whole.log")[1:]
    assert {"rename", "fsync"} <= {call.name for call in calls}
    wanted = [call for call in calls if names is None or call.name in names]
    reached = set()

    for call in wanted:
        shutil.rmtree(home)
        shutil.copytree(kept, home)
        inject = f"inject={call.name}:signal=KILL:when={call.ordinal}"
        killed = trace(step, tmp_path / "killed.log", "-e", inject)
        assert "killed by SIGKILL" in (tmp_path / "killed.log").read_text()
        if killed:
            reached.add(len(killed) - 1)
        check_store(allowed)

    expected = {calls.index(call) + 1 for call in wanted}
    assert reached == expected
    assert {calls.index(call) + 1 for call in wanted if call.name == "rename"} <= reached


def test_activate_forces_the_profile_then_the_state_then_its_name_to_disk(
    home: Path, tmp_path: Path
) -> None:
    order = durable_steps(trace("activate", tmp_path / "log"), home)

    assert order == [
        "fsync profiles/two.json",
        "fsync profiles",
        "fsync .",
        "fsync ..",
        "fsync NEW",
        "rename NEW state.json",
        "fsync .",
    ]


def test_activate_of_a_shipped_profile_copies_it_to_disk_first(home: Path, tmp_path: Path) -> None:
    order = durable_steps(trace("activate-shipped", tmp_path / "log"), home)

    assert order[:3] == [
        "fsync profiles/NEW",
        "rename profiles/NEW profiles/folk-ll-ring.json",
        "fsync profiles",
    ]
    assert order[-3:] == ["fsync NEW", "rename NEW state.json", "fsync ."]


@pytest.mark.parametrize("step", ["rollback", "off"])
def test_every_step_forces_the_state_to_disk_before_and_after_it_has_its_name(
    home: Path, tmp_path: Path, step: str
) -> None:
    order = durable_steps(trace(step, tmp_path / "log"), home)

    assert order[-3:] == ["fsync NEW", "rename NEW state.json", "fsync ."]


def test_save_over_the_active_profile_moves_that_before_it_is_overwritten(
    home: Path, tmp_path: Path
) -> None:
    order = durable_steps(trace("save", tmp_path / "log"), home)

    renames = [line.split()[-1] for line in order if line.startswith("rename")]
    assert len(renames) == 3
    assert renames[0].startswith("profiles/one.")
    assert renames[1:] == ["state.json", "profiles/one.json"]
    for idx, line in enumerate(order):
        if line.startswith("rename"):
            assert order[idx - 1].startswith("fsync")
            assert order[idx + 1].startswith("fsync")
    assert settings_of(BETTER) != settings_of(ONE)


def durable_steps(calls: Sequence[Call], home: Path) -> list[str]:
    """Return the calls that order what is on disk, with names as seen from the state folder."""
    found = []
    for call in calls:
        if match := _FSYNC.match(call.text):
            found.append(f"fsync {_place(match[1], home)}")
        elif match := _RENAME.match(call.text):
            found.append(f"rename {_place(match[1], home)} {_place(match[2], home)}")
    return found


def _place(path: str, home: Path) -> str:
    place = os.path.relpath(path, home)
    return re.sub(r"\.nccltune-\w+\.tmp", "NEW", place)
