"""Who made a variable what it is in a rank."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nccltune.inject.marker import Marker
from nccltune.live.drift import (
    ConfEntry,
    Expectation,
    KeyReport,
    KeyState,
    SglangWrite,
    Verdict,
    compare_rank,
    judge,
)

DIGEST, OTHER_DIGEST = "a" * 16, "b" * 16
ALGO, CUMEM = "NCCL_ALGO", "NCCL_CUMEM_ENABLE"
OURS = Marker(DIGEST, (ALGO, CUMEM))
SETTINGS = {ALGO: "allreduce:ring", CUMEM: "1"}


def one(
    environ: Mapping[str, str] | None,
    *,
    marker: Marker | None = OURS,
    launched: Mapping[str, str] | None = SETTINGS,
    key: str = ALGO,
    **more: object,
) -> KeyReport:
    """Judge one variable of one rank."""
    expectation = Expectation(
        {key: SETTINGS[key]},
        "mine",
        DIGEST,
        launch_environ=launched,
        **more,  # type: ignore[arg-type]
    )
    [report] = compare_rank(expectation, environ, marker, "it is gone" if environ is None else "")
    return report


def test_compare_with_the_profiles_value_is_in_effect_and_names_profile_and_route() -> None:
    report = one(SETTINGS, route="nccltune run")

    assert report == KeyReport(
        ALGO,
        "allreduce:ring",
        "allreduce:ring",
        KeyState.IN_EFFECT,
        "profile mine, set by nccltune run",
    )


def test_compare_with_the_same_value_from_elsewhere_does_not_claim_it() -> None:
    report = one(SETTINGS, marker=None)

    assert report.state is KeyState.IN_EFFECT
    assert report.source == "set by other means"


def test_compare_without_the_variable_is_lost() -> None:
    report = one({}, marker=None, launched={})

    assert (report.state, report.actual) == (KeyState.LOST, None)


def test_compare_without_it_in_the_rank_alone_says_that_the_server_had_it() -> None:
    report = one({})

    assert report.state is KeyState.LOST
    assert "started with it" in report.note


def test_compare_that_cannot_be_read_is_unreadable_and_says_why() -> None:
    report = one(None)

    assert report.state is KeyState.UNREADABLE
    assert report.actual is None
    assert report.note == "it is gone; the server's own process was started with it"


def test_compare_with_what_a_flag_forces_is_sglangs_and_names_the_flag() -> None:
    write = SglangWrite(ALGO, "allreduce:tree", "--enable-deterministic-inference")

    report = one({ALGO: "allreduce:tree"}, forced={ALGO: write})

    assert report.state is KeyState.OVERRIDDEN_BY_SGLANG
    assert "--enable-deterministic-inference" in report.note


def test_compare_with_what_a_flag_forces_under_an_older_name_is_sglangs() -> None:
    write = SglangWrite("NCCL_OLD_NAME", "8", "some flag")

    report = one({**SETTINGS, "NCCL_OLD_NAME": "8"}, forced={ALGO: write})

    assert report.state is KeyState.OVERRIDDEN_BY_SGLANG
    assert "NCCL_OLD_NAME=8" in report.note


def test_compare_with_the_value_that_a_flag_would_force_anyway_is_in_effect() -> None:
    write = SglangWrite(ALGO, "allreduce:ring", "some flag")

    assert one(SETTINGS, forced={ALGO: write}).state is KeyState.IN_EFFECT


def test_compare_with_a_value_that_changed_inside_the_server_is_sglangs_and_not_lost() -> None:
    report = one({CUMEM: "0"}, key=CUMEM)

    assert report.state is KeyState.OVERRIDDEN_BY_SGLANG
    assert "started with 1" in report.note


def test_compare_with_a_value_that_changed_after_the_hook_is_sglangs() -> None:
    report = one({CUMEM: "0"}, key=CUMEM, launched={})

    assert report.state is KeyState.OVERRIDDEN_BY_SGLANG


def test_compare_with_sglangs_default_where_nothing_was_injected_is_lost() -> None:
    report = one({CUMEM: "0"}, key=CUMEM, marker=None, launched={}, defaults={CUMEM: "0"})

    assert report.state is KeyState.LOST
    assert report.source == "SGLang's own default"


def test_compare_with_the_operators_value_is_the_operators() -> None:
    mine = {ALGO: "Tree"}

    report = one(mine, marker=Marker(DIGEST, (CUMEM,)), launched=mine)

    assert (report.state, report.source) == (KeyState.SET_BY_OPERATOR, "operator")


def test_compare_with_the_operators_value_where_nothing_of_ours_ran_is_the_operators() -> None:
    mine = {ALGO: "Tree"}

    assert one(mine, marker=None, launched=mine).state is KeyState.SET_BY_OPERATOR


def test_compare_with_a_value_that_was_changed_after_ours_is_the_operators() -> None:
    changed = {ALGO: "Tree"}

    report = one(changed, launched=changed)

    assert report.state is KeyState.SET_BY_OPERATOR
    assert "after nccltune had set it" in report.note


def test_compare_without_a_variable_that_was_left_to_the_operator_is_the_operators() -> None:
    report = one({}, withheld={ALGO: "left to the operator, who has set NCCL_MIN_NCHANNELS=4"})

    assert report.state is KeyState.SET_BY_OPERATOR
    assert "NCCL_MIN_NCHANNELS=4" in report.note


def test_compare_with_the_value_of_an_earlier_profile_is_lost_and_says_to_restart() -> None:
    old = {ALGO: "allreduce:tree"}

    report = one(old, marker=Marker(OTHER_DIGEST, (ALGO,)), launched=old)

    assert report.state is KeyState.LOST
    assert OTHER_DIGEST in report.source
    assert "restart" in report.note


def test_compare_without_it_where_a_file_sets_the_same_is_unknown_and_names_the_file() -> None:
    entry = ConfEntry("allreduce:ring", "/etc/nccl.conf")

    report = one({}, conf={ALGO: entry})

    assert report.state is KeyState.UNREADABLE
    assert "/etc/nccl.conf" in report.source


def test_compare_without_it_where_a_file_sets_another_value_is_lost() -> None:
    entry = ConfEntry("Tree", "/etc/nccl.conf")

    report = one({}, conf={ALGO: entry})

    assert report.state is KeyState.LOST
    assert "/etc/nccl.conf says Tree" in report.source


def test_compare_lists_every_variable_by_name() -> None:
    reports = compare_rank(Expectation(SETTINGS, "mine", DIGEST), {}, None)

    assert [report.key for report in reports] == [ALGO, CUMEM]


def reports(*states: KeyState) -> list[KeyReport]:
    return [KeyReport(f"NCCL_{idx}", "1", None, state) for idx, state in enumerate(states)]


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([], Verdict.STARTING),
        ([[], []], Verdict.NOTHING_EXPECTED),
        ([reports(KeyState.IN_EFFECT), reports(KeyState.IN_EFFECT)], Verdict.IN_EFFECT),
        ([reports(KeyState.IN_EFFECT), reports(KeyState.LOST)], Verdict.NOT_IN_EFFECT),
        ([reports(KeyState.LOST, KeyState.UNREADABLE)], Verdict.NOT_IN_EFFECT),
        ([reports(KeyState.IN_EFFECT), reports(KeyState.UNREADABLE)], Verdict.UNREADABLE),
        ([reports(KeyState.IN_EFFECT, KeyState.OVERRIDDEN_BY_SGLANG)], Verdict.PARTLY),
        ([reports(KeyState.SET_BY_OPERATOR)], Verdict.PARTLY),
    ],
    ids=["no_ranks", "nothing", "all", "lost_in_one", "lost_wins", "unreadable", "sglang", "own"],
)
def test_judge_sums_up_the_ranks(ranks: list[list[KeyReport]], verdict: Verdict) -> None:
    assert judge(ranks) is verdict


def test_judge_where_nccl_is_not_on_the_path_claims_nothing() -> None:
    for state in KeyState:
        assert judge([reports(state)], is_bypassed=True) is Verdict.BYPASSED


def test_judge_where_nccl_is_not_on_the_path_and_nothing_is_expected_is_calm() -> None:
    assert judge([[]], is_bypassed=True) is Verdict.NOTHING_EXPECTED
