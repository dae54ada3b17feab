"""Servers against the active profile: which verdict, which words, which way out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nccltune.host.facts import HostFacts
from nccltune.inject.marker import MARKER, format_marker, settings_digest
from nccltune.live.drift import KeyState, Verdict
from nccltune.live.scanner import Server, find_servers
from nccltune.live.servers import (
    MAX_USER_S,
    Context,
    ServerReport,
    report_server,
    report_servers,
)
from nccltune.profile import Profile
from nccltune.store import ActiveState, LaunchRecord, Policy
from tests.support.command_line import FINGERPRINT
from tests.support.fake_proc import BOOT_ID, TICKS, FakeProc
from tests.support.standin_sglang.program import EAGLE3_FLAGS

SETTINGS = {"NCCL_ALGO": "allreduce:ring", "NCCL_CUMEM_ENABLE": "1"}
DIGEST = settings_digest(SETTINGS)
APPLIED = {MARKER: format_marker(DIGEST, SETTINGS), **SETTINGS}
LAUNCH = [
    *("python3", "-m", "sglang.launch_server", "--model-path", "/m", "--tp", "2"),
    *EAGLE3_FLAGS,
    *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
]


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def add_server(
    proc: FakeProc,
    *rank_environs: Mapping[str, str] | None,
    argv: list[str] = LAUNCH,
    launched: Mapping[str, str] = APPLIED,
) -> None:
    proc.add(100, argv, environ=launched)
    for idx, environ in enumerate(rank_environs):
        proc.add_rank(101 + idx, f"TP{idx}", parent=100, environ=environ)


def context_of(proc: FakeProc) -> Context:
    """Return a context in which ``mine`` is active, and fits the host."""
    active = ActiveState(Profile("mine", SETTINGS), "mine", None, Path("/x"))
    host = HostFacts(FINGERPRINT, "sm90"), ""
    return Context(active, Policy(), (), lambda *_: host, lambda *_: None, proc.root)


def judged(
    proc: FakeProc,
    *,
    active: ActiveState | None = None,
    records: tuple[LaunchRecord, ...] = (),
    fingerprint: bool = False,
    has_gpus: bool = True,
    home: str | None = None,
) -> ServerReport:
    made_on = FINGERPRINT.to_json() if fingerprint else None
    profile = Profile("mine", SETTINGS, fingerprint=made_on)
    default = ActiveState(profile, "mine", None, Path("/x"), activated_at="2020-01-01T00:00:00")
    host = (HostFacts(FINGERPRINT, "sm90"), "") if has_gpus else (None, "no driver")
    context = Context(
        active or default,
        Policy(),
        records,
        lambda *_: host,
        lambda *_: None,
        proc.root,
        home=Path(home) if home else None,
    )
    [report] = report_servers(find_servers(proc.root), context)
    return report


def states(report: ServerReport) -> list[list[KeyState]]:
    return [[key.state for key in rank.keys] for rank in report.ranks]


def test_report_of_a_server_that_has_everything_is_in_effect(proc: FakeProc) -> None:
    add_server(proc, APPLIED, APPLIED)

    report = judged(proc)

    assert report.verdict is Verdict.IN_EFFECT
    assert report.expected == report.started_under == "mine"
    assert [rank.pid for rank in report.ranks] == [101, 102]
    assert report.fix == ""


def test_report_of_a_server_that_lost_one_key_in_one_rank_names_it(proc: FakeProc) -> None:
    short = {name: value for name, value in APPLIED.items() if name != "NCCL_ALGO"}
    add_server(proc, APPLIED, short)

    report = judged(proc)

    assert report.verdict is Verdict.NOT_IN_EFFECT
    assert states(report) == [[KeyState.IN_EFFECT] * 2, [KeyState.LOST, KeyState.IN_EFFECT]]
    assert "gone in its ranks: NCCL_ALGO" in report.reason
    assert "nccltune run" in report.fix


def test_report_of_a_server_that_no_route_touched_is_lost_and_says_so(proc: FakeProc) -> None:
    add_server(proc, {"NCCL_CUMEM_ENABLE": "0"}, launched={"PATH": "/bin"})

    report = judged(proc)

    assert report.verdict is Verdict.NOT_IN_EFFECT
    assert "no route of nccltune took part" in report.reason
    assert report.started_under == ""


def test_report_of_a_server_older_than_the_activation_says_so(proc: FakeProc) -> None:
    add_server(proc, {"A": "1"}, launched={})
    profile = Profile("mine", SETTINGS)
    active = ActiveState(profile, "mine", None, Path("/x"), activated_at="2999-01-01T00:00:00")

    assert "before the profile was activated" in judged(proc, active=active).reason


def test_report_names_the_servers_own_home_where_it_is_another(proc: FakeProc) -> None:
    add_server(proc, {"A": "1"}, launched={"NCCLTUNE_HOME": "/srv/tuned"})

    assert "started with NCCLTUNE_HOME=/srv/tuned, and" in judged(proc, home="/x").reason
    assert "NCCLTUNE_HOME" not in judged(proc, home="/srv/tuned/").reason
    assert "NCCLTUNE_HOME" not in judged(proc).reason


def test_report_of_a_server_under_another_profile_says_which(proc: FakeProc) -> None:
    old = {"NCCL_ALGO": "allreduce:tree"}
    environ = {MARKER: format_marker(settings_digest(old), old), **old}
    add_server(proc, environ, launched=environ)

    report = judged(proc)

    assert report.verdict is Verdict.NOT_IN_EFFECT
    assert f"another profile, {settings_digest(old)}" in report.reason


def test_report_takes_name_and_route_from_the_record(proc: FakeProc) -> None:
    add_server(proc, APPLIED)
    record = LaunchRecord("launch", 100, TICKS, BOOT_ID, "", "c", "mine", DIGEST, dict(SETTINGS))

    report = judged(proc, records=(record,))

    assert report.route == "launch"
    assert report.ranks[0].keys[0].source == "profile mine, set by nccltune launch"


def test_report_of_a_server_that_changes_a_value_in_its_children_is_not_lost(
    proc: FakeProc,
) -> None:
    add_server(proc, {**APPLIED, "NCCL_CUMEM_ENABLE": "0"})

    report = judged(proc)

    assert report.verdict is Verdict.PARTLY
    assert states(report) == [[KeyState.IN_EFFECT, KeyState.OVERRIDDEN_BY_SGLANG]]


def test_report_under_a_flag_that_forces_a_value_names_the_flag(proc: FakeProc) -> None:
    forced = {**APPLIED, "NCCL_ALGO": "allreduce:tree"}
    add_server(proc, forced, argv=[*LAUNCH, "--enable-deterministic-inference"])

    key = judged(proc).ranks[0].keys[0]

    assert key.state is KeyState.OVERRIDDEN_BY_SGLANG
    assert "--enable-deterministic-inference" in key.note


def test_report_of_a_value_of_the_operators_leaves_it(proc: FakeProc) -> None:
    mark = {MARKER: format_marker(DIGEST, ["NCCL_CUMEM_ENABLE"])}
    environ = {**APPLIED, **mark, "NCCL_ALGO": "Tree"}
    add_server(proc, environ, launched=environ)

    report = judged(proc)

    assert report.verdict is Verdict.PARTLY
    assert report.ranks[0].keys[0].state is KeyState.SET_BY_OPERATOR


def test_report_of_ranks_that_cannot_be_read_is_unknown_and_says_why(proc: FakeProc) -> None:
    add_server(proc, None, None)

    report = judged(proc)

    assert report.verdict is Verdict.UNREADABLE
    assert all("SPT_NOENV" in rank.problem for rank in report.ranks)
    assert "SPT_NOENV=1" in report.fix


@pytest.mark.parametrize(
    "argv",
    [
        [word for word in LAUNCH if word != "--disable-custom-all-reduce"],
        [*LAUNCH, "--enable-torch-symm-mem"],
    ],
    ids=["custom", "torch_symm_mem"],
)
def test_report_of_a_launch_that_bypasses_nccl_claims_nothing(
    proc: FakeProc, argv: list[str]
) -> None:
    add_server(proc, APPLIED, argv=argv)

    report = judged(proc)

    assert report.verdict is Verdict.BYPASSED
    assert "nothing is claimed" in report.reason
    assert report.fix


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["python3", "-m", "sglang.launch_server", "--model-path", "/m", "--tp", "2"], "EAGLE-3"),
        (["--tp" if w == "--tp" else "1" if w == "2" else w for w in LAUNCH], "size 1"),
        ([*LAUNCH, "--nnodes", "2"], "2 nodes"),
    ],
    ids=["plain", "one_gpu", "two_nodes"],
)
def test_report_of_a_launch_that_the_policy_leaves_alone_expects_nothing(
    proc: FakeProc, argv: list[str], word: str
) -> None:
    add_server(proc, {"A": "1"}, argv=argv, launched={})

    report = judged(proc)

    assert report.verdict is Verdict.NOTHING_EXPECTED
    assert report.expected is None
    assert word in report.reason


def test_report_of_a_launch_that_was_forced_by_a_person_is_held_to_it(proc: FakeProc) -> None:
    add_server(proc, APPLIED, argv=[*LAUNCH, "--nnodes", "2"])

    assert judged(proc, fingerprint=True, has_gpus=False).verdict is Verdict.IN_EFFECT


def test_report_on_a_host_that_the_profile_does_not_fit_expects_nothing(proc: FakeProc) -> None:
    add_server(proc, {"A": "1"}, launched={})

    report = judged(proc, fingerprint=True, has_gpus=False)

    assert report.verdict is Verdict.NOTHING_EXPECTED
    assert "no driver" in report.reason


def test_report_with_a_profile_that_is_broken_expects_nothing_and_says_why(
    proc: FakeProc,
) -> None:
    add_server(proc, APPLIED)
    active = ActiveState(None, "mine", "/x: is empty", Path("/x"))

    report = judged(proc, active=active)

    assert report.verdict is Verdict.NOTHING_EXPECTED
    assert "/x: is empty" in report.reason
    assert f"started under {DIGEST}" in report.reason


def test_report_of_a_server_without_ranks_is_starting(proc: FakeProc) -> None:
    add_server(proc)

    assert judged(proc).verdict is Verdict.STARTING


def test_report_of_ranks_whose_launcher_is_gone_expects_nothing(proc: FakeProc) -> None:
    proc.add_rank(101, "TP0", parent=1, environ=APPLIED)

    report = judged(proc)

    assert report.command == ()
    assert report.verdict is Verdict.NOTHING_EXPECTED
    assert "gone" in report.reason


ENDINGS = {
    "ending": lambda proc, pid: proc.begin_to_end(pid),
    "ended": lambda proc, pid: proc.remove(pid),
    "zombie": lambda proc, pid: proc.add(pid, [], state="Z"),
    "another": lambda proc, pid: proc.add(pid, ["bash"], ticks=TICKS + 1),
    "amid_exec": lambda proc, pid: proc.begin_exec(pid),
}
"""What can have become of a rank between the scan and the look at its environment."""

end_of_ranks = pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)


@end_of_ranks
def test_report_of_a_server_judges_the_ranks_that_it_still_has(
    proc: FakeProc, end: Callable[[FakeProc, int], None]
) -> None:
    add_server(proc, APPLIED, APPLIED)
    servers = find_servers(proc.root)
    end(proc, 102)

    [report] = report_servers(servers, context_of(proc))

    assert report.verdict is Verdict.IN_EFFECT
    assert [rank.pid for rank in report.ranks] == [101]


@end_of_ranks
def test_report_of_a_server_whose_ranks_have_ended_is_not_unreadable(
    proc: FakeProc, end: Callable[[FakeProc, int], None]
) -> None:
    add_server(proc, APPLIED, APPLIED)
    servers = find_servers(proc.root)
    end(proc, 101)
    end(proc, 102)

    [report] = report_servers(servers, context_of(proc))

    assert (report.verdict, report.ranks, report.fix) == (Verdict.STARTING, (), "")
    assert "it is ending" in report.reason


@end_of_ranks
@pytest.mark.parametrize("has_root", [True, False])
def test_report_of_a_server_that_has_ended_as_a_whole_is_none(
    proc: FakeProc, end: Callable[[FakeProc, int], None], *, has_root: bool
) -> None:
    add_server(proc, APPLIED)
    if not has_root:
        proc.remove(100)
    servers = find_servers(proc.root)
    end(proc, 101)
    if has_root:
        proc.begin_to_end(100)

    assert report_servers(servers, context_of(proc)) == ()


def test_report_hides_secrets_of_the_command(proc: FakeProc) -> None:
    add_server(proc, APPLIED, argv=[*LAUNCH, "--api-key", "hunter2"])

    assert "hunter2" not in " ".join(judged(proc).command)


def test_report_of_one_users_servers_takes_no_time_from_anybody_elses(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (100, 110, 120, 130):
        proc.add(pid, LAUNCH, environ={}, ticks=pid)
    strangers = {100, 110, 120}
    monkeypatch.setattr(
        "nccltune.live.servers.read_uid", lambda pid, _root: 54321 if pid in strangers else 0
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    now_s = [0.0]
    order: list[int] = []

    def look(server: Server, context: Context) -> ServerReport:
        order.append(server.pid)
        now_s[0] += MAX_USER_S
        return report_server(server, context)

    monkeypatch.setattr("nccltune.live.servers.report_server", look)
    active = ActiveState(Profile("mine", SETTINGS), "mine", None, Path("/x"))
    context = Context(active, Policy(), (), lambda *_: (None, ""), lambda *_: None, proc.root)

    found = report_servers(find_servers(proc.root), context, lambda: now_s[0])

    assert order == [130, 100, 110]
    assert [report.pid for report in found] == [100, 110, 120, 130]
    assert found[2].verdict is Verdict.UNREADABLE
    assert "user 54321 take too long" in found[2].reason
