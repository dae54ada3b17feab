"""``--url``: a server that somebody else started is measured, looked at, and left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nccltune.bench.host_lock import SEARCH, host_lock, host_lock_path
from nccltune.errors import BusyError, ServerError, UsageProblem
from nccltune.live.scanner import find_servers
from nccltune.sglang.endpoints import Endpoint
from nccltune.store import activate, save_candidate
from nccltune.verify import running
from nccltune.verify.model import RankState
from nccltune.verify.record import newest_records, record_paths
from nccltune.verify.running import measure_running, servers_at
from tests.support.launching import is_alive
from tests.support.standin_sglang.program import (
    free_port,
    read_records,
    running_server,
    standin_environ,
    wait_until_up,
)
from tests.support.verifying import FOLK, QUICK_LOAD, verify_command

HAND_SET = {"SPT_NOENV": "1", "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
HAND_SET_BARE = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
IN_EFFECT = {"NCCL_ALGO": RankState.IN_EFFECT, "NCCL_PROTO": RankState.IN_EFFECT}


def environ_of(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


@contextmanager
def two_nodes(folder: Path, first: dict[str, str], second: dict[str, str]) -> Iterator[int]:
    """A server over two "nodes" of this host, each with an environment of its own."""
    port, meeting = free_port(), f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        for rank, own in enumerate((first, second)):
            node = ("--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", meeting)
            process = subprocess.Popen(
                verify_command(folder, *node, port=port + rank),
                env=standin_environ(environ_of(SPT_NOENV="1", **own)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            wait_until_up(port + rank, process)
        yield port


@contextmanager
def server_on(folder: Path, host: str, port: int, environ: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        verify_command(folder, "--host", host, port=port),
        env=standin_environ(environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until_up(port, process, host=host)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_running_server_is_measured_and_left_alone(tmp_path: Path) -> None:
    with running_server(tmp_path, environ=environ_of(**HAND_SET)) as server:
        record = measure_running(server.url, QUICK_LOAD, profile=FOLK)

        assert all(is_alive(int(str(one["pid"]))) for one in read_records(server.record_path))
        assert server.process.poll() is None

    (boot,) = record.boots
    assert [run.tokens for run in boot.runs] == [20, 20]
    assert boot.seen.ranks == {"TP0": IN_EFFECT, "TP1": IN_EFFECT}
    assert boot.seen.version == "0.5.15.post1"
    assert record.url == server.url
    assert "sglang" in " ".join(record.launch)
    assert record.arms[0].num_steps == 2
    assert not record.problems
    assert record.is_finished
    assert [one.id for one in newest_records()] == [record.id]


def test_launch_is_kept_with_what_its_config_file_set(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("cuda-graph-max-bs: 7\n", encoding="utf-8")
    with running_server(tmp_path, "--config", str(config), environ=environ_of()) as server:
        record = measure_running(server.url, QUICK_LOAD)

    argv = record.arms[0].argv
    assert "--config" not in argv
    assert any(word.startswith("--cuda-graph-max-bs") and word.endswith("=7") for word in argv)


def test_two_nodes_on_one_host_are_one_server(tmp_path: Path) -> None:
    with two_nodes(tmp_path, HAND_SET_BARE, HAND_SET_BARE) as port:
        record = measure_running(f"http://127.0.0.1:{port}", QUICK_LOAD, profile=FOLK)

    assert record.boots[0].seen.ranks == {"TP0": IN_EFFECT, "TP1": IN_EFFECT}
    assert record.notes == ()


def test_rank_of_the_other_node_that_was_started_without_the_profile_is_found(
    tmp_path: Path,
) -> None:
    without = {"NCCL_ALGO": "Ring"}
    with two_nodes(tmp_path, HAND_SET_BARE, without) as port:
        record = measure_running(f"http://localhost:{port}", QUICK_LOAD, profile=FOLK)

    ranks = record.boots[0].seen.ranks
    assert ranks["TP0"] == IN_EFFECT
    assert ranks["TP1"] == {"NCCL_ALGO": RankState.IN_EFFECT, "NCCL_PROTO": RankState.LOST}


def test_node_whose_peer_is_gone_says_so(tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--nnodes", "2", "--dist-init-addr", "127.0.0.1:9", environ=environ_of()
    ) as server:
        record = measure_running(server.url, QUICK_LOAD, profile=FOLK)

    assert record.notes == ("1 of its 2 nodes can be seen from here",)


def test_other_server_of_this_host_is_not_mixed_in(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, environ=environ_of(SPT_NOENV="1")),
        running_server(tmp_path, environ=environ_of(**HAND_SET)) as server,
    ):
        record = measure_running(server.url, QUICK_LOAD, profile=FOLK)

    assert record.boots[0].seen.ranks == {"TP0": IN_EFFECT, "TP1": IN_EFFECT}


def test_other_server_on_another_address_of_the_same_port_is_not_mixed_in(
    tmp_path: Path,
) -> None:
    port = free_port()
    with (
        server_on(tmp_path, "127.0.0.2", port, environ_of(SPT_NOENV="1")),
        server_on(tmp_path, "127.0.0.1", port, environ_of(**HAND_SET)),
    ):
        record = measure_running(f"http://127.0.0.1:{port}", QUICK_LOAD, profile=FOLK)
        lost = measure_running(f"http://127.0.0.2:{port}", QUICK_LOAD, profile=FOLK)
        nowhere = servers_at(Endpoint("127.0.0.3", port), find_servers())

    assert record.boots[0].seen.ranks == {"TP0": IN_EFFECT, "TP1": IN_EFFECT}
    states = {state for keys in lost.boots[0].seen.ranks.values() for state in keys.values()}
    assert states == {RankState.LOST}
    assert nowhere.servers == ()


def test_where_several_servers_share_an_address_none_is_taken_for_it(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, environ=environ_of(SPT_NOENV="1")) as one,
        running_server(tmp_path, environ=environ_of(SPT_NOENV="1")) as other,
    ):
        shared = frozenset({"1"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running, "sockets_at", lambda *_: shared)
            patch.setattr(running, "sockets_of", lambda *_: shared)
            pids = (one.process.pid, other.process.pid)
            mine = [each for each in find_servers() if each.pid in pids]
            found = servers_at(Endpoint(port=1), mine)

    assert found.servers == ()
    assert found.problem.startswith("several servers listen at http://127.0.0.1:1 (processes ")


@pytest.mark.parametrize("key", ["sesame", ""])
def test_key_of_a_running_server_is_sent_and_kept_nowhere(tmp_path: Path, key: str) -> None:
    with running_server(tmp_path, "--api-key", "sesame", environ=environ_of()) as server:
        if key:
            record = measure_running(server.url, QUICK_LOAD, api_key=key)
            assert not record.problems
            (path,) = record_paths()
            assert "sesame" not in path.read_text()
        else:
            with pytest.raises(ServerError, match="wants a key") as caught:
                measure_running(server.url, QUICK_LOAD)
            assert caught.value.code == "wants_key"


def test_environment_that_a_title_wiped_is_unreadable_never_guessed(tmp_path: Path) -> None:
    environ = environ_of(NCCL_PROTO="LL", NCCL_ALGO="Ring")
    with running_server(tmp_path, environ=environ) as server:
        record = measure_running(server.url, QUICK_LOAD, profile=FOLK)

    states = {state for keys in record.boots[0].seen.ranks.values() for state in keys.values()}
    assert states == {RankState.UNREADABLE}


def test_active_profile_is_expected_where_none_is_named(tmp_path: Path) -> None:
    save_candidate(FOLK)
    activate(FOLK.name, reason="manual")
    # A hook in this interpreter would bring the profile in.
    environ = environ_of(SPT_NOENV="1", NCCLTUNE_HOOK="0")
    with running_server(tmp_path, environ=environ) as server:
        record = measure_running(server.url, QUICK_LOAD)

    assert record.arms[0].profile == FOLK
    states = {state for keys in record.boots[0].seen.ranks.values() for state in keys.values()}
    assert states == {RankState.LOST}


def test_without_any_profile_ranks_are_named_and_nothing_is_expected(tmp_path: Path) -> None:
    with running_server(tmp_path, environ=environ_of(SPT_NOENV="1")) as server:
        record = measure_running(server.url, QUICK_LOAD)

    assert record.boots[0].seen.ranks == {"TP0": {}, "TP1": {}}


# --- no number that did not happen


def test_answer_that_is_not_as_asked_is_a_problem(tmp_path: Path) -> None:
    with running_server(tmp_path, environ=environ_of(), answer="zero_tokens") as server:
        record = measure_running(server.url, QUICK_LOAD)
        assert server.process.poll() is None

    (problem,) = record.problems
    assert problem.code == "zero_tokens"
    assert record.boots == ()
    assert not record.is_finished


def test_rank_that_is_killed_meanwhile_is_named(tmp_path: Path) -> None:
    with running_server(tmp_path, environ=environ_of(), step_ms=20) as server:

        def kill(text: str) -> None:
            if text.startswith("run 1"):
                records = read_records(server.record_path)
                (pid,) = (int(str(one["pid"])) for one in records if one.get("tp_rank") == 1)
                os.kill(pid, signal.SIGKILL)

        record = measure_running(server.url, QUICK_LOAD, on_progress=kill)

    assert record.problems[0].code == "server_died"
    assert record.problems[0].message.startswith("rank TP1 ended in the middle")


# --- refused


@pytest.mark.parametrize(
    "url", ["127.0.0.1:30000", "ftp://127.0.0.1:30000", "http://", "x", "http://127.0.0.1:1/v1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        measure_running(url, QUICK_LOAD)
    assert caught.value.code == "bad_url"


def test_nobody_at_the_address_is_refused() -> None:
    with pytest.raises(ServerError, match="connection refused") as caught:
        measure_running(f"http://127.0.0.1:{free_port()}", QUICK_LOAD)
    assert caught.value.code == "no_answer"
    assert not list(newest_records())


@pytest.mark.parametrize(
    ("status", "content"), [(404, b"no"), (200, b"<html>"), (200, b"{}"), (200, b'{"version": 1}')]
)
def test_address_of_something_else_is_refused(status: int, content: bytes) -> None:
    with other_server(status, content) as url, pytest.raises(ServerError) as caught:
        measure_running(url, QUICK_LOAD)

    assert caught.value.code == "not_sglang"
    assert url in str(caught.value)
    assert not list(newest_records())


@contextmanager
def other_server(status: int, content: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_running_server_is_not_disturbed_beside_a_search(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, environ=environ_of()) as server,
        host_lock(host_lock_path(), SEARCH),
        pytest.raises(BusyError),
    ):
        measure_running(server.url, QUICK_LOAD)
