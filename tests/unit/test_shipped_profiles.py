from __future__ import annotations

import json
from pathlib import Path

import pytest

from nccltune.envvars import canonical
from nccltune.paths import shipped_profiles_dir
from nccltune.profile import format_profile, parse_profile
from nccltune.store import Where, find_profile, list_profiles

PATHS = sorted(shipped_profiles_dir().glob("*.json"))
TWO_H200 = shipped_profiles_dir().parent / "docs" / "results" / "two-h200"


def test_shipped_profiles_are_the_default_and_the_folk_set() -> None:
    assert [path.stem for path in PATHS] == ["folk-ll-ring", "sglang-default"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_shipped_profile_is_written_as_we_write_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    profile = parse_profile(text, path)

    assert format_profile(profile) == text
    assert profile.name == path.stem
    assert profile.source == "shipped"
    assert profile.note


def test_shipped_profiles_are_found_and_listed() -> None:
    assert {entry.name for entry in list_profiles() if not entry.problem} == {
        "folk-ll-ring",
        "sglang-default",
    }
    assert find_profile("folk-ll-ring").where is Where.SHIPPED


def test_sglang_default_sets_nothing_and_says_what_sglang_does() -> None:
    profile = find_profile("sglang-default").profile

    assert profile.settings == {}
    for setting in ("NCCL_CUMEM_ENABLE=0", "NCCL_NVLS_ENABLE=0", "NCCL_GRAPH_REGISTER=0"):
        assert setting in profile.note


def test_folk_profile_is_the_hand_found_set_with_its_evidence() -> None:
    profile = find_profile("folk-ll-ring").profile

    assert profile.settings == {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
    }
    assert canonical(profile.settings)["NCCL_PROTO"] == "allreduce:LL"
    assert "docs/results/two-h200" in profile.note


def test_folk_profile_says_of_itself_what_the_kept_searches_measured() -> None:
    note = find_profile("folk-ll-ring").profile.note
    searches = [json.loads(path.read_text())["data"] for path in TWO_H200.glob("*/*search.json")]
    folk = [
        one for data in searches for one in data["comparisons"] if one["name"] == "folk-ll-ring"
    ]
    scores = [one["score_ratio"] for one in folk]
    large = [one["ratios"][str(64 << 20)] for one in folk]

    assert len(folk) == len(searches) == 7
    assert "seven searches" in note
    assert f"{min(scores):.2f} to {max(scores):.2f} of the time" in note
    assert f"{min(large):.1f} to {max(large):.1f} times as long at 64 MiB" in note
