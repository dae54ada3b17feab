"""The stand-in SGLang against what is known of the real one: tests are worth what it is worth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nccltune.live.procfs import read_environ
from nccltune.live.scanner import find_servers
from nccltune.sglang.command import parse_launch
from nccltune.sglang.defaults import base_environment, writes_for
from nccltune.sglang.log_stages import LogReader, Mark, Stage
from tests.support.standin_sglang.program import (
    Running,
    free_port,
    module_command,
    read_records,
    running_server,
    serve_command,
    standin_environ,
)

LOGS = Path(__file__).resolve().parents[1] / "data" / "sglang-logs"
PROFILE = {"NCCL_PROTO": "allreduce:LL", "NCCL_NTHREADS": "128"}


def rank_environs(server: Running) -> dict[str, dict[str, str]]:
    """Return what each process says of its own environment."""
    return {
        f"{record['role']}{record.get('tp_rank', '')}": record["environ"]  # type: ignore[misc]
        for record in server.records()
    }


def post(server: Running, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        content: bytes = answer.read()
        return content


def stages_of(log: bytes, ranks: tuple[str, ...]) -> list[tuple[Stage, Mark, str]]:
    found = [
        (line.event.stage, line.event.mark, line.event.subject)
        for line in LogReader().feed(log)
        if line.event is not None
        and line.event.stage is not None
        and line.event.mark is not Mark.STEP
        and line.rank in ranks
    ]
    own = [each for each in found if each[0] not in (Stage.READY, Stage.WARM_UP)]
    return [each for idx, each in enumerate(own) if each not in own[:idx]]


def test_standin_logs_the_stages_of_the_real_server_in_their_order(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        log = server.log_path.read_bytes()

    real = (LOGS / "tp2.log").read_bytes()
    assert stages_of(log, ("", "TP0")) == stages_of(real, ("", "TP0"))


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.5.15.post1", "0.5.18", "0.5.23"])
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--enable-symm-mem",),
        ("--enable-nccl-nvls",),
        ("--enable-deterministic-inference",),
        ("--disable-cuda-graph",),
    ],
    ids=lambda flags: " ".join(flags) or "plain",
)
def test_standin_writes_what_sglang_writes(
    tmp_path: Path, version: str, flags: tuple[str, ...]
) -> None:
    record = tmp_path / "record.jsonl"
    operator = {"NCCL_ALGO": "Ring", "NCCL_CUMEM_ENABLE": "1"}
    argv = serve_command(*flags, port=free_port())
    # It dies on its way, for its environment is all that is asked here.
    wishes = {"version": version, "record": str(record), "fail": "nccl_init"}
    environ = {**standin_environ(**wishes), **operator}

    subprocess.run(argv, env=environ, capture_output=True, timeout=30.0, check=False)

    expected = dict(operator)
    for write in writes_for(parse_launch(argv), version, operator):
        if write.is_forced or write.variable not in operator:
            expected[write.variable] = write.value
    ranks = [entry for entry in read_records(record) if entry["role"] == "rank"]
    assert ranks
    for rank in ranks:
        own: dict[str, str] = rank["environ"]  # type: ignore[assignment]
        seen = {name: value for name, value in own.items() if name in expected}
        assert seen == expected


def test_standin_hands_the_environment_to_spawned_ranks(tmp_path: Path) -> None:
    environ = {**os.environ, **PROFILE}
    with running_server(tmp_path, environ=environ) as server:
        environs = rank_environs(server)

    assert environs.keys() == {"parent", "rank0", "rank1", "detokenizer"}
    expected = {**PROFILE, **base_environment("0.5.15.post1")}
    for name in ("rank0", "rank1"):
        assert expected.items() <= environs[name].items()


def test_standin_looks_like_sglang_in_procfs_and_hides_its_environment(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        (found,) = [each for each in find_servers() if each.pid == server.process.pid]
        readings = [read_environ(rank.process) for rank in found.ranks]

    assert [rank.name for rank in found.ranks] == ["TP0", "TP1"]
    assert [reading.values for reading in readings] == [None, None]


def test_standin_with_spt_noenv_shows_what_its_ranks_were_given(tmp_path: Path) -> None:
    environ = {**os.environ, **PROFILE, "SPT_NOENV": "1"}
    with running_server(tmp_path, environ=environ) as server:
        (found,) = [each for each in find_servers() if each.pid == server.process.pid]
        values = [read_environ(rank.process).values for rank in found.ranks]

    for each in values:
        assert each is not None
        assert {**PROFILE, "NCCL_CUMEM_ENABLE": "0"}.items() <= each.items()


_TITLE_PROBE = """
import json, os, sys
if sys.argv[1] == "own":
    sys.modules["setproctitle"] = None
from sglang.srt.processes import set_title
os.environ["NCCL_SET_LATER"] = "1"
set_title("sglang::scheduler_TP0")
read = lambda name: list(open(f"/proc/self/{name}", "rb").read())
child = os.popen("echo $FOO $NCCL_SET_LATER").read()
print(json.dumps([read("cmdline"), read("environ"), read("comm"), child]))
"""


@pytest.mark.parametrize("noenv", ["", "1"])
def test_standin_title_is_as_setproctitle_sets_it(noenv: str) -> None:
    pytest.importorskip("setproctitle")
    # The same length of everything in both, for the areas are compared byte by byte.
    environ = {**standin_environ({"FOO": "bar", "PATH": os.environ["PATH"]}), "SPT_NOENV": noenv}
    shown = [
        json.loads(subprocess.check_output([sys.executable, "-c", _TITLE_PROBE, how], env=environ))
        for how in ("own", "lib")
    ]

    assert shown[0] == shown[1]
    assert shown[0][3] == "bar 1\n"
    assert (set(shown[0][1]) == {0}) is (noenv == "")


@pytest.mark.parametrize("make_command", [serve_command, module_command])
def test_standin_starts_both_ways(tmp_path: Path, make_command: Any) -> None:
    argv = make_command(port=free_port())
    done = subprocess.run(
        argv, env=standin_environ(fail="usage"), capture_output=True, timeout=30.0, check=False
    )

    assert done.returncode == 2
    assert b"unrecognized arguments" in done.stderr


def test_standin_streams_as_sglang_does(tmp_path: Path) -> None:
    body = {"text": "a b c", "stream": True, "sampling_params": {"max_new_tokens": 9}}
    with running_server(tmp_path) as server:
        answer = post(server, body).decode()

    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    last = chunks[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": 9}
    assert last["spec_accept_length"] == pytest.approx(9 / last["spec_verify_ct"])
    assert chunks[-1]["text"].startswith(chunks[0]["text"])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("error_200", {"error"}),
        ("fewer_tokens", {4}),
        ("zero_tokens", {0}),
        ("no_usage", {None}),
        ("one_chunk", {9}),
    ],
)
def test_standin_answers_wrongly_on_demand(
    tmp_path: Path, answer: str, expected: set[object]
) -> None:
    body = {"input_ids": [1, 2], "stream": True, "sampling_params": {"max_new_tokens": 9}}
    with running_server(tmp_path, answer=answer) as server:
        text = post(server, body).decode()

    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    last = chunks[-1]
    found = "error" if "error" in last else last["meta_info"].get("completion_tokens")
    assert {found} == expected
    if answer == "one_chunk":
        assert len(chunks) == 1


def test_standin_runs_at_the_speed_that_its_environment_gives_it(tmp_path: Path) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 101}}
    factors = '{"NCCL_PROTO=allreduce:LL": 0.25}'

    def latency_s(environ: dict[str, str]) -> float:
        with running_server(tmp_path, environ=environ, step_ms=2, factors=factors) as server:
            meta = json.loads(post(server, body))["meta_info"]
        assert meta["spec_verify_ct"] == 50
        return float(meta["e2e_latency"])

    plain, tuned = latency_s(dict(os.environ)), latency_s({**os.environ, **PROFILE})

    assert plain >= 0.1
    assert tuned < plain


@pytest.fixture
def plugin_site(tmp_path: Path) -> Path:
    site = tmp_path / "plugins"
    info = site / "probe-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nprobe = probe:hook\n")
    (site / "probe.py").write_text(
        "import os\ndef hook():\n    os.environ.setdefault('NCCL_PROBE', str(os.getpid()))\n"
    )
    return site


def test_standin_loads_plugins_before_its_ranks(tmp_path: Path, plugin_site: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(plugin_site)}
    with running_server(tmp_path, environ=environ) as server:
        environs = rank_environs(server)

    assert {environ["NCCL_PROBE"] for environ in environs.values()} == {str(server.process.pid)}


@pytest.mark.parametrize(
    "more", [{"SGLANG_PLUGINS": "another"}, {"STANDIN_SGLANG_VERSION": "0.5.10"}]
)
def test_standin_leaves_plugins_out_where_sglang_does(
    tmp_path: Path, plugin_site: Path, more: dict[str, str]
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(plugin_site), **more}
    with running_server(tmp_path, environ=environ) as server:
        environs = rank_environs(server)

    assert all("NCCL_PROBE" not in environ for environ in environs.values())


def test_standin_goes_on_where_a_plugin_fails(tmp_path: Path, plugin_site: Path) -> None:
    (plugin_site / "probe.py").write_text("def hook():\n    raise RuntimeError('no luck')\n")
    environ = {**os.environ, "PYTHONPATH": str(plugin_site)}
    with running_server(tmp_path, environ=environ) as server:
        log = server.log_path.read_text()

    assert "Failed to execute general plugin: probe" in log
