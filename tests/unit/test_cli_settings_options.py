"""Candidates as they are typed."""

from __future__ import annotations

import pytest

from nccltune.cli.settings_options import candidates_from_options, parse_candidate
from nccltune.errors import UsageProblem


def test_parse_candidate_splits_at_names_and_not_at_the_commas_of_a_list() -> None:
    settings = parse_candidate("NCCL_ALGO=allreduce:ring,tree, NCCL_MIN_CTAS=8")

    assert settings == {"NCCL_ALGO": "allreduce:ring,tree", "NCCL_MIN_CTAS": "8"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NCCL_PROTO", "bad_assignment"),
        ("", "bad_assignment"),
        ("NCCL_PROTO=LL,NCCL_PROTO=LL", "bad_assignment"),
        ("NCCL_NTHREADS=100", "bad_value"),
        ("PATH=/x", "unknown_variable"),
    ],
)
def test_parse_candidate_refuses_what_nccl_would_misread(text: str, code: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_candidate(text)

    assert caught.value.code == code


def test_parse_candidate_takes_any_value_when_told_to_and_never_any_variable() -> None:
    assert parse_candidate("NCCL_BUFFSIZE=1000", is_unsafe=True) == {"NCCL_BUFFSIZE": "1000"}
    with pytest.raises(UsageProblem):
        parse_candidate("LD_PRELOAD=/x.so", is_unsafe=True)


def test_candidates_without_options_are_the_baseline_itself() -> None:
    assert candidates_from_options([], []) == [("the baseline again", {})]


def test_candidates_from_assignments_alone_are_one() -> None:
    found = candidates_from_options([], ["NCCL_MIN_CTAS=8", "NCCL_PROTO=allreduce:LL"])

    assert found == [("settings given", {"NCCL_MIN_CTAS": "8", "NCCL_PROTO": "allreduce:LL"})]


def test_candidates_from_two_profiles_are_two() -> None:
    found = candidates_from_options(["folk-ll-ring", "sglang-default"], [])

    assert [name for name, _ in found] == ["folk-ll-ring", "sglang-default"]
    assert found[1][1] == {}


def test_assignment_changes_every_profile_and_an_empty_one_takes_out() -> None:
    found = candidates_from_options(["folk-ll-ring"], ["NCCL_BUFFSIZE=", "NCCL_NTHREADS=256"])

    name, settings = found[0]
    assert name == "folk-ll-ring, changed"
    assert "NCCL_BUFFSIZE" not in settings
    assert settings["NCCL_NTHREADS"] == "256"
    assert settings["NCCL_PROTO"] == "LL"
