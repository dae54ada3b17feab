"""What ``nccltune status`` says, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nccltune.cli.status as status
from nccltune.cli.envelope import Answer, plain
from nccltune.errors import ExitCode, UsageProblem
from nccltune.host.fingerprint import MatchKind
from nccltune.live.drift import KeyReport, KeyState, Verdict
from nccltune.live.procfs import Process
from nccltune.live.profile_standing import LiveProfile
from nccltune.live.published import Published
from nccltune.live.scanner import Server
from nccltune.live.servers import RankReport, ServerReport
from nccltune.live.stock import Stock
from nccltune.sglang.allreduce_path import AllReducePath, PathVerdict

PROFILE = LiveProfile(
    name="mine",
    digest="a" * 16,
    settings={"NCCL_ALGO": "allreduce:ring"},
    path="/state/profiles/mine.json",
    how="manual",
    action="activate",
    activated_at="2026-11-29T12:00:00+00:00",
    match=MatchKind.IDENTICAL,
)


def key(state: KeyState = KeyState.IN_EFFECT, actual: str | None = "allreduce:ring") -> KeyReport:
    source = "profile mine, set by nccltune run" if state is KeyState.IN_EFFECT else ""
    note = "" if state is KeyState.IN_EFFECT else "why it is so"
    return KeyReport("NCCL_ALGO", "allreduce:ring", actual, state, source, note)


def server(verdict: Verdict = Verdict.IN_EFFECT, *keys: KeyReport, **changes: Any) -> ServerReport:
    ranks = tuple(RankReport(101 + idx, f"TP{idx}", (each,)) for idx, each in enumerate(keys))
    report = ServerReport(
        pid=100,
        uid=0,
        command=("sglang", "serve", "--model-path", "/models/a b"),
        started_at="2026-11-29T12:30:00+00:00",
        verdict=verdict,
        ranks=ranks,
        route="run",
        started_under="mine",
        expected="mine",
        reason="profile mine is expected",
    )
    return replace(report, **changes)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``answered(stock)``: what the command answers to it."""

    def ask(stock: Stock, published: Published | None = None, *arguments: str) -> Answer:
        found = [Server(Process(100, 1, 1, 1, ("sglang", "serve")), (), is_launch=True)]
        monkeypatch.setattr(status, "find_servers", lambda: found)
        monkeypatch.setattr(status, "take_stock", lambda _servers: stock)
        monkeypatch.setattr(status, "read_published", lambda: published)
        answer = status.command.main(list(arguments), standalone_mode=False)
        assert isinstance(answer, Answer)
        json.dumps(plain(answer.data))
        return answer

    return ask


def shown(answer: Answer) -> str:
    parts = list(answer.show())
    assert all(isinstance(part, str) for part in parts)
    return "\n".join(map(str, parts))


def test_status_with_everything_in_effect_exits_0_and_names_the_source(answered: Any) -> None:
    answer = answered(Stock(PROFILE, (server(Verdict.IN_EFFECT, key(), key()),)))

    text = shown(answer)
    assert answer.exit_code is ExitCode.DONE
    assert answer.errors == ()
    assert "TP0 (pid 101), TP1 (pid 102)" in text
    assert "from profile mine, set by nccltune run" in text
    assert "activated 2026-11-29 12:00:00 UTC by hand" in text
    assert "'/models/a b'" in text


def test_status_with_a_key_lost_exits_3_and_names_pid_rank_key_expected_and_actual(
    answered: Any,
) -> None:
    lost = key(KeyState.LOST, None)
    answer = answered(Stock(PROFILE, (server(Verdict.NOT_IN_EFFECT, key(), lost),)))

    [complaint] = answer.errors
    assert answer.exit_code is ExitCode.NO
    assert complaint.code == "lost"
    assert complaint.message == (
        "server 100, rank TP1 (pid 102): NCCL_ALGO is not set, expected allreduce:ring: "
        "why it is so"
    )
    assert "LOST in TP1 (pid 102): expected allreduce:ring, actual not set" in shown(answer)


@pytest.mark.parametrize("rank_count", [2, 4, 8])
def test_status_names_what_several_ranks_lost_in_one_line_a_variable(
    answered: Any, rank_count: int
) -> None:
    names = [f"NCCL_{letter}" for letter in "FEDCBA"]
    lost = tuple(replace(key(KeyState.LOST, None), key=name) for name in names)
    other = replace(lost[-1], actual="Tree")
    ranks = [RankReport(101 + idx, f"TP{idx}", lost) for idx in range(rank_count)]
    ranks[-1] = replace(ranks[-1], keys=(*lost[:-1], other))
    report = server(Verdict.NOT_IN_EFFECT, ranks=tuple(ranks))

    answer = answered(Stock(PROFILE, (report,)))

    messages = [complaint.message for complaint in answer.errors]
    which = [f"TP{idx} (pid {101 + idx})" for idx in range(rank_count)]
    plural = "s" if rank_count > 2 else ""
    assert [message.split(": ")[1].split(" is ")[0] for message in messages] == [*names, "NCCL_A"]
    assert all(each.startswith(f"server 100, ranks {', '.join(which)}: ") for each in messages[:-2])
    assert messages[-2].startswith(f"server 100, rank{plural} {', '.join(which[:-1])}: ")
    assert messages[-1].startswith(f"server 100, rank {which[-1]}: NCCL_A is Tree")


def test_status_json_has_every_key_of_every_rank(answered: Any) -> None:
    answer = answered(Stock(PROFILE, (server(Verdict.NOT_IN_EFFECT, key(KeyState.LOST, "x")),)))

    [found] = answer.data["servers"]
    [rank] = found["ranks"]
    assert (found["pid"], found["verdict"], found["route"]) == (100, "not_in_effect", "run")
    assert (rank["pid"], rank["rank"]) == (101, "TP0")
    assert rank["keys"] == [
        {
            "key": "NCCL_ALGO",
            "expected": "allreduce:ring",
            "actual": "x",
            "state": "lost",
            "source": None,
            "note": "why it is so",
        }
    ]


@pytest.mark.parametrize("state", [KeyState.OVERRIDDEN_BY_SGLANG, KeyState.SET_BY_OPERATOR])
def test_status_with_what_others_chose_to_set_exits_0(answered: Any, state: KeyState) -> None:
    answer = answered(Stock(PROFILE, (server(Verdict.PARTLY, key(state, "Tree")),)))

    assert answer.exit_code is ExitCode.DONE
    assert "actual Tree" in shown(answer)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.UNREADABLE, "unreadable"),
        (Verdict.BYPASSED, "nccl_bypassed"),
        (Verdict.STARTING, "starting"),
    ],
)
def test_status_that_cannot_tell_exits_4(answered: Any, verdict: Verdict, code: str) -> None:
    answer = answered(Stock(PROFILE, (server(verdict, key(KeyState.UNREADABLE, None)),)))

    assert answer.exit_code is ExitCode.UNKNOWN
    assert [each.code for each in answer.errors] == [code]


def test_status_of_a_bypassed_launch_names_the_flag_that_would_change_it(answered: Any) -> None:
    path = PathVerdict(AllReducePath.CUSTOM, False, "custom carries it", "--disable-custom")
    answer = answered(
        Stock(PROFILE, (server(Verdict.BYPASSED, key(), path=path, fix="--disable-custom"),))
    )

    assert "--disable-custom" in answer.errors[0].message
    assert "custom carries it" in shown(answer)
    assert "nothing is claimed" in shown(answer)


def test_status_with_one_no_and_one_unknown_is_a_no(answered: Any) -> None:
    servers = (server(Verdict.UNREADABLE, key()), server(Verdict.NOT_IN_EFFECT, key()))

    assert answered(Stock(PROFILE, servers)).exit_code is ExitCode.NO


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"problem": "/x.json:3: not JSON: the file ends too early", "match": None}, "too early"),
        ({"match": MatchKind.FOREIGN, "differing": ("gpu_names",)}, "another kind of host"),
        ({"match": None, "is_host_unknown": True, "unknown": "no driver"}, "no driver"),
        ({"name": None, "problem": "state.json: is empty", "match": None}, "state.json: is empty"),
    ],
    ids=["broken", "foreign", "unknown_host", "broken_state"],
)
def test_status_with_a_profile_that_is_not_used_exits_3_and_says_why(
    answered: Any, changes: dict[str, Any], words: str
) -> None:
    answer = answered(Stock(replace(PROFILE, advice="nccltune search", **changes), ()))

    assert answer.exit_code is ExitCode.NO
    assert answer.errors[0].code == "profile_not_used"
    assert words in answer.errors[0].message
    assert "NOT USED" in shown(answer)


def test_status_with_a_stale_profile_warns_and_exits_0(answered: Any) -> None:
    stale = replace(
        PROFILE, match=MatchKind.EQUIVALENT, stale=("the driver",), advice="nccltune verify -- CMD"
    )
    answer = answered(Stock(stale, ()))

    assert answer.exit_code is ExitCode.DONE
    assert "the driver" in answer.warnings[0]
    assert "nccltune verify" in answer.warnings[0]


def test_status_without_a_profile_and_servers_exits_0(answered: Any) -> None:
    answer = answered(Stock(LiveProfile(name=None, previous="mine"), ()))

    assert answer.exit_code is ExitCode.DONE
    assert "none, mine was before" in shown(answer)
    assert "none is running" in shown(answer)


def test_status_after_a_roll_back_says_so_without_the_service(answered: Any) -> None:
    rolled = replace(PROFILE, name=None, action="rollback", how="daemon")

    assert "ROLLED BACK 2026-11-29 12:00:00 UTC by nccltuned" in shown(answered(Stock(rolled, ())))


def test_status_shows_what_the_service_knows(answered: Any) -> None:
    data = {
        "nccltuned": {"version": "1", "state_folder": "/elsewhere"},
        "failed_starts": {"count": 2, "rollback_after": 3, "last": "nccl"},
        "rollbacks": [
            {
                "profile_name": "bad",
                "returned_to": None,
                "at": "2026-11-29T11:00:00+00:00",
                "failure_count": 3,
                "ending": "nccl",
            }
        ],
    }
    answer = answered(Stock(PROFILE, ()), Published(77, Path("/run/x"), data))

    text = shown(answer)
    assert "running, pid 77, for the profiles in /elsewhere" in text
    assert "2 of 3, the last one: nccl" in text
    assert "bad to no profile, 2026-11-29 11:00:00 UTC, after 3 failed starts (nccl)" in text
    assert answer.data["nccltuned"]["is_running"] is True


def test_status_without_the_service_says_that_launches_do_not_need_it(answered: Any) -> None:
    answer = answered(Stock(PROFILE, ()))

    assert "do not need it" in shown(answer)
    assert answer.data["nccltuned"] == {"is_running": False}


def test_status_shows_no_control_characters_of_other_users(answered: Any) -> None:
    hostile = server(Verdict.IN_EFFECT, key(actual="\x1b[2J"), command=("sglang", "\x1b[31m\n"))

    assert "\x1b" not in shown(answered(Stock(PROFILE, (hostile,))))


def test_status_of_one_server_takes_its_pid(answered: Any) -> None:
    assert answered(Stock(PROFILE, ()), None, "--pid", "100").exit_code is ExitCode.DONE
    with pytest.raises(UsageProblem, match="--pid 7"):
        answered(Stock(PROFILE, ()), None, "--pid", "7")
