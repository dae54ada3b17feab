"""``nccltune status`` on real process trees: the ranks' own environment, whoever asks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.cli.envelope import Answer, plain
from nccltune.cli.status import command
from nccltune.doctor import Sources, read_case
from nccltune.doctor.store_checks import check_store
from nccltune.errors import ExitCode
from nccltune.live.procfs import read_process
from nccltune.live.scanner import find_servers
from nccltune.live.stock import take_stock
from nccltune.profile import Profile
from nccltune.store import activate, deactivate, profiles_dir, save_candidate
from nccltuned.child import call_in_child
from tests.support.command_line import FINGERPRINT
from tests.support.fake_nvml import nvswitch_host
from tests.support.service import PYTHONPATH, run_command, started, wait_for
from tests.support.standin_sglang.program import free_port, serve_command, wait_until_up

if TYPE_CHECKING:
    from tests.conftest import Require

SETTINGS = {"NCCL_ALGO": "allreduce:ring", "NCCL_CUMEM_ENABLE": "1", "NCCL_NTHREADS": "256"}
BYPASS = ("--enforce-disable-flashinfer-allreduce-fusion", "--enable-mscclpp")


@pytest.fixture(autouse=True)
def active_profile() -> None:
    save_candidate(Profile("mine", SETTINGS))
    activate("mine", reason="manual")


@contextmanager
def server(
    folder: Path,
    *flags: str,
    is_tuned: bool = True,
    tp: int = 2,
    environ: Mapping[str, str] | None = None,
    wishes: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Start a stand-in server, wait until it is up, and give its process id."""
    port = free_port()
    make = run_command if is_tuned else serve_command
    words = make(*flags, port=port, tp=tp)
    with started(folder, words, wishes, environ={**os.environ, **(environ or {})}) as process:
        wait_until_up(port, process)
        yield process.pid


def ask(pid: int) -> Answer:
    answer = command.main(["--pid", str(pid)], standalone_mode=False)
    assert isinstance(answer, Answer)
    return answer


def data_of(answer: Answer) -> dict[str, Any]:
    """Return the one server as scripts get it."""
    data = json.loads(json.dumps(plain(answer.data)))
    [found] = data["servers"]
    assert isinstance(found, dict)
    return found


def states(answer: Answer) -> dict[str, list[str]]:
    """Return what became of each variable, rank by rank."""
    found: dict[str, list[str]] = {}
    for rank in data_of(answer)["ranks"]:
        for key in rank["keys"]:
            found.setdefault(key["key"], []).append(key["state"])
    return found


def test_status_of_a_tuned_server_judges_every_rank_whatever_the_caller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(tmp_path) as pid:
        monkeypatch.setenv("NCCL_ALGO", "something else")

        answer = ask(pid)

    assert answer.exit_code is ExitCode.DONE
    assert states(answer) == {name: ["in_effect"] * 2 for name in SETTINGS}
    found = data_of(answer)
    assert (found["route"], found["started_under"]) == ("run", "mine")
    assert found["ranks"][0]["keys"][0]["source"] == "profile mine, set by nccltune run"


def test_status_of_a_server_started_with_an_empty_environment_is_the_same(tmp_path: Path) -> None:
    home = os.environ["NCCLTUNE_HOME"]
    bare = {"NCCLTUNE_HOME": home, "PATH": os.environ["PATH"]}
    port = free_port()
    with started(tmp_path, run_command(port=port), environ=bare) as process:
        wait_until_up(port, process)

        assert ask(process.pid).exit_code is ExitCode.DONE


def test_status_of_a_server_that_lost_one_key_in_one_rank_exits_3_and_names_it(
    tmp_path: Path,
) -> None:
    with server(tmp_path, wishes={"lose": "NCCL_ALGO", "lose_rank": "1"}) as pid:
        answer = ask(pid)

    rank = data_of(answer)["ranks"][1]
    assert answer.exit_code is ExitCode.NO
    assert states(answer)["NCCL_ALGO"] == ["in_effect", "lost"]
    [complaint] = answer.errors
    assert f"rank TP1 (pid {rank['pid']}): NCCL_ALGO is not set, expected allreduce:ring" in (
        complaint.message
    )


def test_status_of_a_server_that_writes_over_a_key_says_that_sglang_did(tmp_path: Path) -> None:
    with server(tmp_path, wishes={"set": "NCCL_CUMEM_ENABLE=0"}) as pid:
        answer = ask(pid)

    assert answer.exit_code is ExitCode.DONE
    assert states(answer)["NCCL_CUMEM_ENABLE"] == ["overridden_by_sglang"] * 2
    assert data_of(answer)["verdict"] == "partly"


def test_status_of_a_deterministic_server_names_the_flag(tmp_path: Path) -> None:
    with server(tmp_path, "--enable-deterministic-inference") as pid:
        answer = ask(pid)

    assert states(answer)["NCCL_ALGO"] == ["overridden_by_sglang"] * 2
    notes = [key["note"] for key in data_of(answer)["ranks"][0]["keys"]]
    assert "--enable-deterministic-inference" in notes[0]


def test_status_of_values_that_the_operator_set_leaves_them(tmp_path: Path) -> None:
    with server(tmp_path, environ={"NCCL_ALGO": "Tree"}) as pid:
        answer = ask(pid)

    assert answer.exit_code is ExitCode.DONE
    assert states(answer)["NCCL_ALGO"] == ["set_by_operator"] * 2
    assert states(answer)["NCCL_NTHREADS"] == ["in_effect"] * 2


def test_status_of_a_server_that_no_route_started_is_lost(tmp_path: Path) -> None:
    with server(tmp_path, is_tuned=False, environ={"SPT_NOENV": "1"}) as pid:
        answer = ask(pid)

    assert answer.exit_code is ExitCode.NO
    assert set(states(answer)["NCCL_ALGO"]) == {"lost"}
    assert "no route of nccltune took part" in data_of(answer)["reason"]


def test_status_of_ranks_whose_titles_wiped_their_environment_exits_4(tmp_path: Path) -> None:
    exported = {**SETTINGS, "SPT_NOENV": ""}
    with server(tmp_path, is_tuned=False, environ=exported) as pid:
        answer = ask(pid)

    assert answer.exit_code is ExitCode.UNKNOWN
    assert set(states(answer)["NCCL_ALGO"]) == {"unreadable"}
    assert [error.code for error in answer.errors] == ["unreadable"]
    assert "SPT_NOENV=1" in answer.errors[0].message


def _has_ended(pid: int) -> bool:
    return read_process(pid) is None


def test_status_of_a_server_that_is_being_stopped_is_no_warning(tmp_path: Path) -> None:
    with server(tmp_path) as pid:
        servers = [each for each in find_servers() if each.pid == pid]
        ranks = [rank.process.pid for rank in servers[0].ranks]
        # The server itself must not see that its ranks end, or it would end with them.
        os.kill(pid, signal.SIGSTOP)
        found = []
        for end in (*ranks, pid):
            os.kill(end, signal.SIGKILL)
            wait_for(partial(_has_ended, end), "ended")
            found.append([(s.verdict, len(s.ranks)) for s in take_stock(servers).servers])

    assert found == [[("in_effect", 1)], [("starting", 0)], []]


def test_status_of_a_launch_that_bypasses_nccl_claims_nothing(tmp_path: Path) -> None:
    with server(tmp_path, *BYPASS, tp=4) as pid:
        answer = ask(pid)

    assert answer.exit_code is ExitCode.UNKNOWN
    found = data_of(answer)
    assert found["verdict"] == "bypassed"
    assert found["all_reduce_path"]["path"] == "mscclpp"
    assert "leave out --enable-mscclpp" in answer.errors[0].message


def test_status_of_a_launch_that_the_policy_leaves_alone_is_calm(tmp_path: Path) -> None:
    with server(tmp_path, tp=1) as pid:
        answer = ask(pid)

    assert answer.exit_code is ExitCode.DONE
    assert data_of(answer)["verdict"] == "nothing_expected"


def test_status_of_a_server_under_an_earlier_profile_says_to_restart(tmp_path: Path) -> None:
    with server(tmp_path) as pid:
        save_candidate(Profile("newer", {"NCCL_ALGO": "allreduce:tree"}))
        activate("newer", reason="manual")

        answer = ask(pid)

    assert answer.exit_code is ExitCode.NO
    assert "it was started under another profile, mine" in data_of(answer)["reason"]
    assert "restart" in answer.errors[0].message


def test_status_after_the_profile_was_switched_off_expects_nothing(tmp_path: Path) -> None:
    with server(tmp_path) as pid:
        deactivate()

        answer = ask(pid)

    assert answer.exit_code is ExitCode.DONE
    assert data_of(answer)["verdict"] == "nothing_expected"
    assert data_of(answer)["started_under"] == "mine"


def _truncate(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8")[:40], encoding="utf-8")


def _make_foreign(path: Path) -> None:
    path.unlink()
    save_candidate(Profile("mine", SETTINGS, fingerprint=FINGERPRINT.to_json()))


def _give_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (Path.unlink, "cannot be read"),
        (_truncate, "cut short"),
        (_make_foreign, "not known to fit"),
        (_give_away, "belongs to user"),
    ],
    ids=["deleted", "truncated", "foreign", "other_owner"],
)
def test_status_with_a_profile_that_came_to_harm_says_so_while_servers_start(
    tmp_path: Path, require: Require, harm: Any, word: str
) -> None:
    require(harm is not _give_away or os.geteuid() == 0, "only root can give a file away")
    harm(profiles_dir() / "mine.json")
    with server(tmp_path) as pid:
        answer = ask(pid)
        [found] = [each for each in find_servers() if each.pid == pid]
        assert len(found.ranks) == 2

    assert answer.exit_code is ExitCode.NO
    assert answer.errors[0].code == "profile_not_used"
    assert word in answer.errors[0].message
    assert data_of(answer)["verdict"] == "nothing_expected"


def test_status_by_a_user_who_may_not_read_the_ranks_exits_4(
    tmp_path: Path, require: Require, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(os.geteuid() == 0, "only root can become another user")
    # A folder that the other user can enter, which pytest's own is not.
    home = Path(tempfile.mkdtemp(prefix="nccltune-status-"))
    home.chmod(0o755)
    monkeypatch.setenv("NCCLTUNE_HOME", str(home))

    def ask_as_nobody(pid: int) -> dict[str, Any]:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        answer = ask(pid)
        return {"exit_code": int(answer.exit_code), "message": answer.errors[0].message}

    try:
        save_candidate(Profile("mine", SETTINGS))
        activate("mine", reason="manual")
        with server(tmp_path) as pid:
            assert ask(pid).exit_code is ExitCode.DONE
            call = call_in_child(lambda: ask_as_nobody(pid), timeout_s=30.0)
            while not call.feed():
                pass
            found = call.answer()
    finally:
        shutil.rmtree(home)

    assert isinstance(found, dict)
    assert found["exit_code"] == 4
    assert "may not read another user's process" in found["message"]


@pytest.mark.parametrize("closed", ["", "state.json", "profiles", "profiles/mine.json", ".."])
def test_status_of_a_store_that_this_user_may_not_read_advises_what_helps(
    require: Require, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    require(os.geteuid() == 0, "only root can become another user")
    outer = Path(tempfile.mkdtemp(prefix="nccltune-status-"))
    home = outer / "home"
    home.mkdir()
    monkeypatch.setenv("NCCLTUNE_HOME", str(home))

    def ask_as_nobody() -> dict[str, Any]:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        answer = command.main([], standalone_mode=False)
        assert isinstance(answer, Answer)
        words = "serve /nowhere/model --tp 2 --speculative-algorithm EAGLE3"
        launch = ("/nowhere/sglang", *words.split())
        sources = Sources(dict(os.environ), nvml=nvswitch_host(2))
        case = read_case(sources, python=Path("/nowhere/python"), argv=launch)
        checks = {each.id: each.fix for each in check_store(case)}
        data = json.loads(json.dumps(plain(answer.data)))
        messages = [each.message for each in answer.errors if each.code == "profile_not_used"]
        return {
            "advice": data["active"]["advice"],
            "message": messages[0] if messages else "",
            "shown": "\n".join(map(str, answer.show())),
            "doctor": [checks["active_profile"], checks["profile_for_launch"]],
            "policy": checks.get("policy"),
        }

    def ask() -> dict[str, Any]:
        call = call_in_child(ask_as_nobody, timeout_s=30.0)
        while not call.feed():
            pass
        found = call.answer()
        assert isinstance(found, dict)
        return found

    path = (home / closed).resolve()
    try:
        save_candidate(Profile("mine", SETTINGS))
        activate("mine", reason="manual")
        right = "into" if path.is_dir() else "read"
        for each in (outer, *outer.rglob("*")):
            each.chmod(0o755)
        before = ask()
        path.chmod(0)
        found = ask()
    finally:
        shutil.rmtree(outer)

    advice = (
        f"let user nobody {right} {path}, which belongs to root, or set NCCLTUNE_HOME to a folder"
    )
    assert (before["advice"] or "").count("NCCLTUNE_HOME") == 0
    assert found["advice"].startswith(advice)
    assert found["doctor"] == [found["advice"]] * 2
    assert found["policy"] in (None, found["advice"])
    assert f"; {advice}" in found["message"]
    assert f"to do           {advice}" in found["shown"]


@pytest.mark.parametrize("more", ["", "--json"], ids=["people", "json"])
def test_status_loads_nothing_heavy(more: str) -> None:
    code = (
        f"import sys; from nccltune.cli import main; main('status {more}'.split()); "
        "heavy = {'torch', 'optuna', 'numpy', 'rich', 'httpx'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )

    *answer, loaded = done.stdout.splitlines()
    assert "active profile" in answer[0] or "nccltune.cli/1" in answer[0]
    assert loaded == "[]"
