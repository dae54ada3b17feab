from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.errors import UsageProblem
from nccltune.profile import Profile
from nccltune.store import (
    Standing,
    Where,
    activate,
    find_profile,
    mark_verified,
    profiles_dir,
    read_active,
    read_evidence,
    save_candidate,
    standing_of,
)

MINE = Profile("mine", {"NCCL_PROTO": "allreduce:LL"})


@pytest.fixture(autouse=True)
def saved() -> None:
    save_candidate(MINE)


def standing() -> Standing:
    found = find_profile("mine")
    return standing_of(found.profile, found.where, read_active())


def test_standing_goes_from_candidate_to_verified_to_active() -> None:
    assert standing() is Standing.CANDIDATE

    mark_verified("mine", {"gain_pct": 4.5})
    assert standing() is Standing.VERIFIED

    activate("mine", reason="manual")
    assert standing() is Standing.ACTIVE


def test_standing_of_files_and_shipped_profiles_is_theirs() -> None:
    active = read_active()

    assert standing_of(MINE, Where.FILE, active) is Standing.FILE
    assert standing_of(MINE, Where.SHIPPED, active) is Standing.SHIPPED


def test_evidence_is_read_back() -> None:
    mark_verified("mine", {"gain_pct": 4.5})

    assert read_evidence(MINE) == {"gain_pct": 4.5}


def test_evidence_does_not_survive_other_settings() -> None:
    mark_verified("mine", {"gain_pct": 4.5})

    save_candidate(Profile("mine", {"NCCL_PROTO": "allreduce:Simple"}))

    assert standing() is Standing.CANDIDATE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "nccltune.verified/1"}'])
def test_evidence_that_is_broken_is_none(text: str) -> None:
    path = mark_verified("mine", {})

    path.write_text(text)

    assert read_evidence(MINE) is None
    assert path.parent == profiles_dir().parent / "verified"


def test_mark_verified_of_an_unknown_or_shipped_profile_is_refused() -> None:
    with pytest.raises(UsageProblem):
        mark_verified("nobody", {})
    with pytest.raises(UsageProblem) as refusal:
        mark_verified("sglang-default", {})

    assert refusal.value.code == "not_of_this_host"


def test_mark_verified_takes_no_path(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem):
        mark_verified(str(tmp_path / "x.json"), {})
