from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccltune.host.fingerprint import Fingerprint, MatchKind
from nccltune.inject.marker import MARKER, format_marker, settings_digest
from nccltune.inject.resolver import Decision, resolve
from nccltune.profile import Profile, source_doubt
from nccltune.sglang.allreduce_path import AllReducePath
from nccltune.store import ActiveState, Launches, Policy

SETTINGS = {"NCCL_PROTO": "allreduce:LL", "NCCL_ALGO": "allreduce:Ring", "NCCL_MAX_CTAS": "8"}
EAGLE3 = ("--speculative-algorithm", "EAGLE3")
CHAIN = (
    "--speculative-num-steps=2",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=3",
)
PLAIN_NCCL = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
LAUNCH = (
    *("python", "-m", "sglang.launch_server", "--model-path", "/m", "--tp", "4"),
    *EAGLE3,
    *CHAIN,
    *PLAIN_NCCL,
)


def host(count: int = 4, **changes: Any) -> Fingerprint:
    """PCIe cards, pairs on a switch, four on a socket."""
    links = tuple(
        tuple("X" if i == j else "PIX" if i // 2 == j // 2 else "SYS" for j in range(count))
        for i in range(count)
    )
    facts: dict[str, Any] = {
        "gpu_names": ("L40S",) * count,
        "gpu_uuids": tuple(f"GPU-{idx}" for idx in range(count)),
        "driver_version": "580.1",
        "nccl_version": "2.28.9",
        "link_matrix": links,
        "numa_nodes": tuple(idx // 4 for idx in range(count)),
        "world_size": count,
        **changes,
    }
    return Fingerprint(**facts)


PROFILE = Profile("kimi", SETTINGS, source="gpus", fingerprint=host().to_json())


def state(profile: Profile | None = PROFILE, problem: str | None = None) -> ActiveState:
    name = "kimi" if profile is None else profile.name
    return ActiveState(profile, name, problem, Path("/state/profiles/kimi.json"))


NONE_ACTIVE = ActiveState(None, None, None, Path("/state/state.json"))


def decide(argv: tuple[str, ...] = LAUNCH, **changes: Any) -> Decision:
    facts: dict[str, Any] = {
        "argv": argv,
        "environ": {"PATH": "/bin"},
        "active": state(),
        "here": host(),
        "policy": Policy(),
        "sglang_version": "0.5.15",
        "is_any_host": False,
        **changes,
    }
    return resolve(**facts)


def without(argv: tuple[str, ...], *words: str) -> tuple[str, ...]:
    return tuple(word for word in argv if word not in words)


def test_resolve_on_the_same_host_applies_the_whole_profile() -> None:
    decision = decide()

    assert decision.applied == SETTINGS
    assert decision.profile_name == "kimi"
    assert decision.digest == settings_digest(SETTINGS)
    assert decision.match is MatchKind.IDENTICAL
    assert decision.path is not None
    assert decision.path.path is AllReducePath.NCCL
    assert (decision.warnings, decision.is_degraded, decision.removed) == ((), False, ())


def test_resolve_without_an_active_profile_gives_nothing_and_is_not_degraded() -> None:
    decision = decide(active=NONE_ACTIVE)

    assert decision == Decision("no profile is active", is_launch=True)
    assert not decision.is_applied


@pytest.mark.parametrize(
    "argv",
    [(), ("echo", "hi"), ("vllm", "serve", "x"), ("bash", "-c", "sglang serve m")],
    ids=["empty", "echo", "vllm", "shell"],
)
def test_resolve_of_another_command_gives_nothing_and_is_not_degraded(
    argv: tuple[str, ...],
) -> None:
    decision = decide(argv)

    assert "not an SGLang launch" in decision.reason
    assert (decision.applied, decision.is_degraded, decision.is_launch) == ({}, False, False)
    assert not decide(argv, active=NONE_ACTIVE).is_launch


def test_resolve_of_a_launch_that_makes_no_sense_is_degraded() -> None:
    decision = decide((*LAUNCH, "--tp", "many"))

    assert "whole number" in decision.reason
    assert (decision.applied, decision.is_degraded) == ({}, True)


@pytest.mark.parametrize(
    ("argv", "launches", "is_covered"),
    [
        (LAUNCH, Launches.EAGLE3, True),
        (tuple("EAGLE" if word == "EAGLE3" else word for word in LAUNCH), Launches.EAGLE3, False),
        (
            tuple("EAGLE" if word == "EAGLE3" else word for word in LAUNCH),
            Launches.SPECULATIVE,
            True,
        ),
        (without(LAUNCH, *EAGLE3, *CHAIN), Launches.SPECULATIVE, False),
        (without(LAUNCH, *EAGLE3, *CHAIN), Launches.ALL, True),
        (("sglang", "serve", "/m", *LAUNCH[5:]), Launches.EAGLE3, True),
        (("numactl", "--cpunodebind=0", *LAUNCH), Launches.EAGLE3, True),
    ],
    ids=["eagle3", "eagle", "eagle-speculative", "plain", "plain-all", "serve", "numactl"],
)
def test_resolve_follows_the_policy(
    argv: tuple[str, ...], launches: Launches, is_covered: bool
) -> None:
    decision = decide(argv, policy=Policy(launches))

    assert decision.is_applied is is_covered
    assert not decision.is_degraded
    assert ("the policy covers" in decision.reason) is not is_covered


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(("--tp", "1"), "tensor parallel size 1"), (("--nnodes", "2"), "over 2 nodes")],
)
def test_resolve_at_one_rank_or_over_nodes_needs_a_person(
    flags: tuple[str, ...], reason: str
) -> None:
    argv = (*LAUNCH, *flags)

    refused = decide(argv)
    assert reason in refused.reason
    assert (refused.applied, refused.is_degraded) == ({}, False)

    assert decide(argv, is_any_host=True).applied == SETTINGS


def test_resolve_for_two_ranks_on_one_gpu_as_two_nodes_needs_any_host() -> None:
    argv = (*LAUNCH, "--tp", "2", "--nnodes", "2", "--node-rank", "1")

    decision = decide(argv, here=host(1), is_any_host=True)

    assert decision.applied == SETTINGS
    assert decision.match is MatchKind.FOREIGN
    assert "--any-host" in decision.warnings[0]


def test_resolve_of_a_broken_profile_is_degraded_and_says_why() -> None:
    decision = decide(active=state(None, "/state/profiles/kimi.json:3: not JSON"))

    assert decision.reason == ("profile kimi cannot be used: /state/profiles/kimi.json:3: not JSON")
    assert (decision.applied, decision.is_degraded) == ({}, True)


def test_resolve_with_a_broken_state_is_degraded_and_says_why() -> None:
    broken = ActiveState(None, None, "/state/state.json:1: is empty", Path("/state/state.json"))

    decision = decide(active=broken)

    assert decision.reason == "/state/state.json:1: is empty"
    assert decision.is_degraded


def test_resolve_of_a_broken_profile_for_an_uncovered_launch_is_not_degraded() -> None:
    assert not decide(("echo",), active=state(None, "broken")).is_degraded


def test_resolve_on_an_equivalent_host_applies_and_warns() -> None:
    here = host(gpu_uuids=("a", "b", "c", "d"), driver_version="580.2")

    decision = decide(here=here)

    assert decision.applied == SETTINGS
    assert decision.match is MatchKind.EQUIVALENT
    (warning,) = decision.warnings
    assert "found on a host like this one, not on this very one" in warning
    assert "driver_version (580.1 there, 580.2 here)" in warning
    assert not decision.is_degraded


@pytest.mark.parametrize(
    ("here", "named"),
    [
        (host(gpu_names=("H200",) * 4), "gpu_names (4x L40S there, 4x H200 here)"),
        (host(nccl_version="2.30.7"), "nccl_version (2.28.9 there, 2.30.7 here)"),
        (host(nccl_version=None), "nccl_version (2.28.9 there, unknown here)"),
        (host(driver_version="590.1"), "driver_version (580.1 there, 590.1 here)"),
        (host(link_matrix=host(8).link_matrix[:4]), "link_matrix"),
        (host(2), "needs 4 GPUs and sees 2"),
    ],
    ids=["gpus", "nccl", "nccl-unknown", "driver", "links", "few"],
)
def test_resolve_on_a_foreign_host_names_what_differs(here: Fingerprint, named: str) -> None:
    if named == "link_matrix":
        links = tuple(tuple("X" if i == j else "SYS" for j in range(4)) for i in range(4))
        here = host(link_matrix=links)

    decision = decide(here=here)

    assert (decision.applied, decision.is_degraded) == ({}, True)
    assert decision.match is MatchKind.FOREIGN
    assert named in decision.reason
    assert "--any-host" in decision.reason

    forced = decide(here=here, is_any_host=True)
    assert forced.applied == SETTINGS
    assert named in forced.warnings[0]


def test_resolve_where_the_host_cannot_be_read_is_degraded() -> None:
    decision = decide(here=None, host_problem="no NVIDIA driver found")

    assert "this host is unknown: no NVIDIA driver found" in decision.reason
    assert (decision.applied, decision.is_degraded, decision.match) == ({}, True, None)

    assert decide(here=None, is_any_host=True).applied == SETTINGS


def test_resolve_of_a_profile_whose_fingerprint_is_broken_is_degraded() -> None:
    decision = decide(active=state(replace(PROFILE, fingerprint={"gpu_names": "L40S"})))

    assert "cannot be read" in decision.reason
    assert decision.is_degraded


def test_resolve_of_a_profile_for_no_host_applies_and_warns() -> None:
    decision = decide(active=state(replace(PROFILE, fingerprint=None)), here=None)

    assert decision.applied == SETTINGS
    assert decision.warnings[0] == "profile kimi names no host: not measured on this one"


@pytest.mark.parametrize("source", ["shared-gpu", "recording:h200-2x-shm"])
def test_resolve_of_a_profile_not_measured_on_real_ranks_needs_a_person(source: str) -> None:
    active = state(replace(PROFILE, source=source))

    refused = decide(active=active)
    assert (refused.applied, refused.is_degraded) == ({}, True)
    assert "--any-host" in refused.reason

    forced = decide(active=active, is_any_host=True)
    assert forced.applied == SETTINGS
    assert source_doubt(source).words in forced.warnings[0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "shared-gpu"},
        {"source": "recording:h200-2x-shm"},
        {"fingerprint": host(nccl_version="2.27.5").to_json()},
        {"fingerprint": {"gpu_names": "L40S"}},
    ],
    ids=["shared", "recording", "foreign", "broken"],
)
def test_resolve_follows_what_a_person_said_at_activation_on_those_gpus_alone(
    changes: dict[str, Any],
) -> None:
    said = replace(state(replace(PROFILE, **changes)), any_host_gpus=host().gpu_uuids)

    here = decide(active=said)
    assert here.applied == SETTINGS
    assert "--any-host" in here.warnings[0]

    elsewhere = host(gpu_uuids=("GPU-7", "GPU-1", "GPU-2", "GPU-3"))
    for other in (elsewhere, None):
        decision = decide(active=said, here=other)
        assert (decision.applied, decision.is_degraded) == ({}, True)


def test_resolve_takes_a_word_about_a_host_for_none_about_launches() -> None:
    said = replace(state(), any_host_gpus=host().gpu_uuids)

    assert "tensor parallel size 1" in decide((*LAUNCH, "--tp", "1"), active=said).reason
    assert "nodes" in decide((*LAUNCH, "--nnodes", "2"), active=said).reason


def test_resolve_compares_the_gpus_that_the_launch_uses() -> None:
    assert decide(here=host(8)).match is MatchKind.IDENTICAL

    second = decide((*LAUNCH, "--base-gpu-id", "4"), here=host(8))
    assert second.match is MatchKind.EQUIVALENT

    spread = decide((*LAUNCH, "--gpu-id-step", "2"), here=host(8))
    assert spread.match is MatchKind.FOREIGN


def test_resolve_compares_every_replica_and_the_worst_counts() -> None:
    assert decide((*LAUNCH, "--dp-size", "2"), here=host(8)).match is MatchKind.EQUIVALENT
    assert decide((*LAUNCH, "--dp-size", "3"), here=host(8)).match is MatchKind.FOREIGN
    assert decide((*LAUNCH, "--pp-size", "2"), here=host(8)).match is MatchKind.EQUIVALENT


def test_resolve_lets_the_operator_win_and_names_it() -> None:
    decision = decide(environ={"NCCL_ALGO": "allreduce:Tree"})

    assert decision.applied == without_keys(SETTINGS, "NCCL_ALGO")
    assert decision.kept_from_operator == {"NCCL_ALGO": "allreduce:Tree"}
    assert decision.warnings == ("NCCL_ALGO=allreduce:Tree is the operator's and stays",)
    assert not decision.is_degraded


def test_resolve_takes_the_operators_own_equal_value_for_kept_without_a_warning() -> None:
    decision = decide(environ={"NCCL_MAX_CTAS": "8"})

    assert decision.kept_from_operator == {"NCCL_MAX_CTAS": "8"}
    assert decision.warnings == ()


def test_resolve_takes_an_empty_value_for_the_operators_word_too() -> None:
    assert decide(environ={"NCCL_PROTO": ""}).kept_from_operator == {"NCCL_PROTO": ""}


def test_resolve_knows_the_operators_older_name_of_the_same_number() -> None:
    decision = decide(environ={"NCCL_MAX_NCHANNELS": "4"})

    assert "NCCL_MAX_CTAS" not in decision.applied
    assert decision.kept_from_operator == {"NCCL_MAX_NCHANNELS": "4"}


def test_resolve_takes_variables_in_the_command_for_the_operators() -> None:
    decision = decide(("env", "NCCL_ALGO=allreduce:Tree", *LAUNCH))

    assert decision.kept_from_operator == {"NCCL_ALGO": "allreduce:Tree"}


@pytest.mark.parametrize(
    ("environ", "left_out"),
    [
        ({"NCCL_PROTO": "LL"}, {"NCCL_ALGO"}),
        ({"NCCL_MIN_CTAS": "32"}, {"NCCL_MAX_CTAS"}),
        ({"NCCL_MIN_NCHANNELS": "nonsense"}, {"NCCL_MAX_CTAS"}),
        ({"NCCL_MIN_CTAS": "4"}, set()),
    ],
    ids=["bare-protocol", "bounds", "nonsense", "fits"],
)
def test_resolve_leaves_out_what_does_not_fit_the_operators_values(
    environ: dict[str, str], left_out: set[str]
) -> None:
    decision = decide(environ=environ)

    missing = SETTINGS.keys() - decision.applied.keys() - decision.kept_from_operator.keys()
    assert missing == left_out
    assert all(any(name in warning for warning in decision.warnings) for name in left_out)


@pytest.mark.parametrize(
    "words",
    [
        "env -i",
        "env -",
        "env -vi",
        "env -iv0",
        "env --ignore-env",
        "env --ignore-environment A=1",
        "env A=1 nice env -i B=2",
        "env -C /tmp -i",
        "/usr/bin/env --ignore-e",
        "env " + " ".join(f"-u{name}" for name in SETTINGS),
    ],
)
def test_resolve_counts_a_profile_that_does_not_reach_the_server_as_not_applied(words: str) -> None:
    decision = decide((*words.split(), *LAUNCH))

    assert (decision.is_applied, decision.applied) == (False, {})
    assert (decision.is_degraded, decision.is_launch) == (True, True)
    assert "would not reach the server: env -" in decision.reason


@pytest.mark.parametrize(
    "words",
    [
        "env -u NCCL_ALGO",
        "env -uNCCL_ALGO",
        "env -vu NCCL_ALGO",
        "env --unset=NCCL_ALGO",
        "env --un NCCL_ALGO",
    ],
)
def test_resolve_applies_and_marks_only_what_survives_the_way(words: str) -> None:
    decision = decide((*words.split(), *LAUNCH))

    assert decision.applied == {n: v for n, v in SETTINGS.items() if n != "NCCL_ALGO"}
    assert decision.warnings == ("env -u NCCL_ALGO in the command takes it out again",)


@pytest.mark.parametrize("words", ["env -u NCCL_ALGO NCCL_ALGO=Tree", "env -i NCCL_ALGO=Tree"])
def test_resolve_takes_what_env_sets_for_the_operators_whatever_it_takes_out(words: str) -> None:
    decision = decide((*words.split(), *LAUNCH))

    assert "NCCL_ALGO" not in decision.applied
    assert decision.is_applied == ("-i" not in words)


def test_resolve_keeps_nothing_of_the_operators_that_env_takes_out() -> None:
    words = ("env", "-u", "NCCL_MAX_CTAS")

    decision = decide((*words, *LAUNCH), environ={"NCCL_MAX_CTAS": "4"})

    assert decision.kept_from_operator == {}
    assert "NCCL_MAX_CTAS" not in decision.applied


def test_resolve_warns_of_a_program_that_may_keep_the_profile_from_the_server() -> None:
    (warning,) = decide(("sudo", *LAUNCH)).warnings

    assert "sudo may start the server in an environment of its own" in warning


def test_resolve_names_what_sglang_writes_over() -> None:
    decision = decide((*LAUNCH, "--enable-deterministic-inference"), sglang_version="0.5.20")

    reason = "--enable-deterministic-inference"
    assert decision.overwritten_by_sglang == (("NCCL_ALGO", "allreduce:tree", reason),)
    assert any("SGLang sets NCCL_ALGO" in warning for warning in decision.warnings)
    assert decision.applied == SETTINGS


def test_resolve_says_where_nccl_does_not_carry_the_verify_pass() -> None:
    decision = decide((*LAUNCH, "--enable-mscclpp"))

    assert decision.applied == SETTINGS
    assert decision.path is not None
    assert decision.path.is_nccl is False
    assert any("does not carry" in warning for warning in decision.warnings)


def marked(settings: Mapping[str, str], **changes: str) -> dict[str, str]:
    """The environment that an earlier route leaves."""
    marker = format_marker(settings_digest(settings), settings)
    return {**settings, MARKER: marker, **changes}


def test_resolve_after_another_route_takes_our_values_for_ours() -> None:
    decision = decide(environ=marked(SETTINGS))

    assert decision == decide()


def test_resolve_after_another_route_keeps_what_the_operator_changed_since() -> None:
    decision = decide(environ=marked(SETTINGS, NCCL_ALGO="allreduce:Tree"))

    assert decision.kept_from_operator == {"NCCL_ALGO": "allreduce:Tree"}
    assert decision.removed == ()


def test_resolve_after_a_route_under_another_profile_replaces_all_of_it() -> None:
    old = {"NCCL_ALGO": "allreduce:Tree", "NCCL_NTHREADS": "256"}

    decision = decide(environ=marked(old))

    assert decision.applied == SETTINGS
    assert decision.kept_from_operator == {}
    assert decision.removed == ("NCCL_NTHREADS",)


def test_resolve_without_a_profile_takes_an_earlier_ones_values_out() -> None:
    decision = decide(environ=marked(SETTINGS), active=NONE_ACTIVE)

    assert decision.removed == tuple(sorted(SETTINGS))


def test_resolve_takes_nothing_out_by_a_marker_that_names_what_is_not_ours() -> None:
    environ = {MARKER: format_marker("0" * 16, ["PATH", "NCCL_DEBUG"]), "NCCL_DEBUG": "INFO"}

    assert decide(environ={**environ, "PATH": "/bin"}, active=NONE_ACTIVE).removed == ()


def test_resolve_sets_nothing_that_the_catalogue_forbids() -> None:
    hostile = {**SETTINGS, "LD_PRELOAD": "/x.so", "NCCL_DEBUG": "INFO", "PATH": "/x"}

    decision = decide(active=state(replace(PROFILE, settings=hostile)), environ={})

    assert decision.applied == SETTINGS


def test_resolve_of_an_empty_profile_is_applied_and_sets_nothing() -> None:
    decision = decide(active=state(replace(PROFILE, settings={})))

    assert decision.is_applied
    assert decision.applied == {}


def without_keys(settings: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name not in names}
