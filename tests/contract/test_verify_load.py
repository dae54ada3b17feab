"""The load of a verify against servers: the stand-in's every fault, and scripted ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.errors import ServerError
from nccltune.sglang.endpoints import Endpoint, endpoint_at
from nccltune.verify.load.client import Limits, fetch
from nccltune.verify.load.rounds import SHORT_FOR_EACH_LONG, TTFT_TOKENS, LoadPlan, measure
from tests.support.standin_sglang.program import free_port, running_server

if TYPE_CHECKING:
    from tests.conftest import Require

PLAN = LoadPlan(
    run_count=2, tokens=12, warm_up_count=1, ttft_repetitions=2, deadline_s=20.0, stall_s=10.0
)
LONG_COUNT = 2 + 1
SHORT_COUNT = 2 * SHORT_FOR_EACH_LONG + 1
"""Requests of a guard prompt under PLAN: one that does not count before those that do."""
IMPATIENT = LoadPlan(run_count=1, tokens=12, deadline_s=20.0, stall_s=0.3)

Send = Callable[[bytes], None]


def event(tokens: int, *, is_last: bool = False, **meta: object) -> bytes:
    reason = {"type": "length", "length": tokens} if is_last else None
    counts = {"prompt_tokens": 8, "completion_tokens": tokens, "finish_reason": reason, **meta}
    return b"data: " + json.dumps({"text": "a", "meta_info": counts}).encode() + b"\n\n"


def answer(send: Send, wanted: int, *, first: int = 1, pause_s: float = 0.002, **meta: Any) -> None:
    """Send a whole answer, a token at a time after the first few; ``meta`` is that of the last."""
    for tokens in range(first, wanted):
        send(event(tokens))
        time.sleep(pause_s)
    send(event(wanted, is_last=True, **meta) + b"data: [DONE]\n\n")


@dataclass
class Scripted:
    """A server whose streams a test writes.

    Attributes:
        stream: sends the answer to one request, given its body and what sends bytes.
        requests: lines of all that was asked, in order; bodies of ``/generate`` in ``bodies``.
    """

    stream: Callable[[dict[str, Any], Send], None] = lambda body, send: answer(
        send, body["sampling_params"]["max_new_tokens"]
    )
    info: dict[str, Any] = field(default_factory=dict)
    health_status: int = 200
    flush_status: int = 200
    api_key: str = ""
    requests: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def running(self, context: ssl.SSLContext | None = None) -> Iterator[Endpoint]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # as every server that streams

            def do_GET(self) -> None:
                script.requests.append(self.path.partition("?")[0])
                if self.path.startswith("/flush_cache"):
                    self._answer(script.flush_status, b"")
                elif self.path == "/server_info":
                    self._answer(200, json.dumps(script.info).encode())
                else:
                    self._answer(script.health_status if self.path == "/health" else 404, b"")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers.get("Authorization", "") != script.expected:
                    self._answer(401, b'{"error": "Unauthorized"}')
                    return
                script.requests.append(self.path)
                script.bodies.append(body)
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with suppress(OSError):
                    script.stream(body, self._piece)
                    self._piece(b"")
                self.close_connection = True

            def _piece(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
            if context is not None:
                listening.socket = context.wrap_socket(listening.socket, server_side=True)
            thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield Endpoint(
                    port=listening.server_port,
                    is_tls=context is not None,
                    api_key=self.api_key,
                )
            finally:
                listening.shutdown()
                thread.join()

    @property
    def expected(self) -> str:
        return f"Bearer {self.api_key}" if self.api_key else ""


class Gate:
    """Holds streams open until a test lets them go, and counts those that waited in vain."""

    def __init__(self, stream_count: int) -> None:
        self._everyone = threading.Barrier(stream_count, timeout=10.0)
        self._open = threading.Event()
        self.late_count = 0

    def is_chosen(self) -> bool:
        """Wait for all streams, and pick one of them."""
        return self._everyone.wait() == 0

    def wait(self) -> None:
        # Shorter than the client's own limit, so that only giving up ends the wait sooner.
        self.late_count += not self._open.wait(0.8 * PLAN.stall_s)

    def open(self) -> None:
        self._open.set()


def error_of(endpoint: Endpoint, plan: LoadPlan = PLAN) -> ServerError:
    with pytest.raises(ServerError) as raised:
        measure(endpoint, plan)
    return raised.value


def test_measure_returns_what_the_server_did(tmp_path: Path) -> None:
    told: list[str] = []
    with running_server(tmp_path, step_ms=2, prefill_ms=3, prefill_token_us=2) as server:
        found = measure(endpoint_at(server.url), PLAN, told.append)

    assert [len(run.streams) for run in found.runs] == [1, 1]
    for run in found.runs:
        assert (run.tokens, run.accept_length) == (12, 2.0)
        assert run.accept_rate == pytest.approx(0.5)
        assert run.ms_per_verify is not None
        # Lower bounds only: the stand-in never is ahead of its time.
        assert run.ms_per_verify > 1.0
        assert run.ttft_ms > 3.0
        assert run.duration_s > 0.012
    assert len(found.ttft_short_ms) == SHORT_COUNT - 1
    assert len(found.ttft_long_ms) == LONG_COUNT - 1
    assert min(found.ttft_long_ms) > 3.0 + 2 * 2
    assert found.remarks == ()
    assert told[:3] == ["warm-up 1 of 1", "run 1 of 2", "run 2 of 2"]


def test_measure_without_speculation_has_a_step_for_each_token(tmp_path: Path) -> None:
    with running_server(tmp_path, "--speculative-algorithm", "NONE") as server:
        found = measure(endpoint_at(server.url), PLAN)

    stream = found.runs[0].streams[0]
    assert (stream.verify_count, stream.accept_length) == (None, None)
    assert found.runs[0].ms_per_verify == pytest.approx(1e3 * stream.decode_s / 11)


def test_answer_in_one_chunk_has_no_step_time_and_is_no_run(tmp_path: Path) -> None:
    with running_server(tmp_path, answer="one_chunk") as server:
        error = error_of(endpoint_at(server.url))

    assert error.code == "cannot_be_timed"
    assert "all 12 tokens came in one piece" in str(error)


def held_back(body: dict[str, Any], send: Send) -> None:
    """Answer as through a proxy that keeps all but the last chunk, and then lets go."""
    wanted = body["sampling_params"]["max_new_tokens"]
    time.sleep(0.01)
    send(b"".join(event(tokens) for tokens in range(1, wanted)))
    time.sleep(0.002)
    send(event(wanted, is_last=True) + b"data: [DONE]\n\n")


def drained(body: dict[str, Any], send: Send) -> None:
    """Answer as through a proxy that keeps everything until the end, and is read piece by piece."""
    time.sleep(0.5)
    answer(send, body["sampling_params"]["max_new_tokens"], pause_s=0.0005)


@pytest.mark.parametrize("stream", [held_back, drained])
def test_chunks_that_came_in_bursts_are_no_number(
    stream: Callable[[dict[str, Any], Send], None],
) -> None:
    plan = replace(PLAN, warm_up_count=0)
    with Scripted(stream).running() as endpoint:
        error = error_of(endpoint, plan)

    assert error.code == "bursts"
    assert "chunks came in bursts: 11 decode steps" in str(error)


def test_server_that_speculates_and_counts_no_verify_steps_is_no_number() -> None:
    script = Scripted(info={"speculative_algorithm": "EAGLE3"})
    with script.running() as endpoint:
        error = error_of(endpoint)

    assert error.code == "no_verify_count"
    assert len(script.bodies) == PLAN.warm_up_count + 1  # the first run that counts is the last


def test_stream_whose_tokens_never_end_is_stopped_at_once() -> None:
    sent: list[int] = []

    def stream(body: dict[str, Any], send: Send) -> None:
        for tokens in range(1, 100_000):
            send(event(tokens))
            sent.append(tokens)
            time.sleep(0.0005)

    with Scripted(stream).running() as endpoint:
        error = error_of(endpoint)

    assert error.code == "more_tokens"
    assert "more tokens than were asked for" in str(error)
    assert max(sent) < 10_000


def test_answer_is_quoted_shortly_and_in_one_line() -> None:
    def stream(body: dict[str, Any], send: Send) -> None:
        error = {"message": "\x1b[31mboo\x07\n" + "x" * 5000}
        send(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")

    with Scripted(stream).running() as endpoint:
        error = error_of(endpoint)

    assert str(error).isprintable()
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        ("error_200", "error_in_stream", "the request was aborted"),
        ("http_500", "bad_status", "status 500"),
        ("fewer_tokens", "fewer_tokens", "6 tokens where 12 were asked for"),
        ("zero_tokens", "zero_tokens", "0 tokens where 12 were asked for"),
        ("no_usage", "no_usage", "does not say how many tokens"),
        ("nan_stop", "nan_stop", "NaN happened"),
        ("drop", "dropped", "with 5 of 12 tokens"),
        ("stall_stream", "stalled", "nothing came for 0.3 s, with 5 of 12 tokens"),
    ],
)
def test_answer_that_is_not_as_asked_is_no_number(
    tmp_path: Path, answer: str, code: str, told: str
) -> None:
    plan = IMPATIENT if answer == "stall_stream" else PLAN
    with running_server(tmp_path, answer=answer) as server:
        error = error_of(endpoint_at(server.url), plan)

    assert (error.code, error.exit_code) == (code, 8)
    assert told in str(error)


@pytest.mark.parametrize(
    ("status", "told"), [(503, "it still starts"), (404, "not that of SGLang")]
)
def test_server_that_is_not_up_is_not_measured(status: int, told: str) -> None:
    script = Scripted(health_status=status)
    with script.running() as endpoint:
        error = error_of(endpoint)

    assert error.code == "unhealthy"
    assert told in str(error)
    assert "/generate" not in script.requests


def test_nobody_there_is_no_number() -> None:
    assert error_of(Endpoint(port=free_port())).code == "no_answer"


def test_prompts_are_the_same_for_every_server_and_caches_are_flushed_between() -> None:
    scripts = (Scripted(), Scripted())
    for script in scripts:
        with script.running() as endpoint:
            measure(endpoint, PLAN)

    first, second = (script.bodies for script in scripts)
    assert first == second
    assert len({body["text"] for body in first}) == len(first) == 3 + SHORT_COUNT + LONG_COUNT
    assert [body["sampling_params"] for body in first[:3]] == [
        {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    ] * 3
    assert all(body["sampling_params"]["max_new_tokens"] == TTFT_TOKENS for body in first[3:])
    asked = [each for each in scripts[0].requests if each in ("/flush_cache", "/generate")]
    assert asked == ["/flush_cache", "/generate"] * len(first)


@pytest.mark.parametrize("status", [400, 404])
def test_server_that_cannot_be_flushed_is_measured(status: int) -> None:
    with Scripted(flush_status=status).running() as endpoint:
        assert len(measure(endpoint, PLAN).runs) == 2


def test_long_prompt_that_came_from_the_cache_is_no_number() -> None:
    def stream(body: dict[str, Any], send: Send) -> None:
        answer(send, body["sampling_params"]["max_new_tokens"], cached_tokens=4)

    with Scripted(stream).running() as endpoint:
        error = error_of(endpoint)

    assert error.code == "cached_prompt"
    assert "50 % of the long prompt" in str(error)


def test_first_long_prompt_does_not_count() -> None:
    def stream(body: dict[str, Any], send: Send) -> None:
        cached = 8 if body["text"].startswith("Book 1. ") else 0
        answer(send, body["sampling_params"]["max_new_tokens"], cached_tokens=cached)

    with Scripted(stream).running() as endpoint:
        assert len(measure(endpoint, PLAN).ttft_long_ms) == 2


def one_token_a_word(body: dict[str, Any], send: Send) -> None:
    wanted = body["sampling_params"]["max_new_tokens"]
    answer(send, wanted, prompt_tokens=len(body["text"].split()))


@pytest.mark.parametrize(
    ("info", "words", "remark"),
    [
        ({}, 4000, ""),
        ({"context_length": None, "max_req_input_len": "much"}, 4000, ""),
        ({"context_length": 8192, "max_total_num_tokens": 65536}, 4000, ""),
        ({"context_length": 2000, "max_total_num_tokens": 65536}, 1600, "up to 2000"),
        ({"context_length": 8192, "max_req_input_len": 1000}, 800, "up to 1000"),
    ],
)
def test_long_prompt_fits_the_server(info: dict[str, Any], words: int, remark: str) -> None:
    script = Scripted(one_token_a_word, info=info)
    with script.running() as endpoint:
        found = measure(endpoint, PLAN)

    assert {len(body["text"].split()) for body in script.bodies[-LONG_COUNT:]} == {words}
    assert len(found.remarks) == bool(remark)
    assert all(remark in each for each in found.remarks)


def test_long_prompt_is_cut_by_the_servers_own_tokenizer() -> None:
    def stream(body: dict[str, Any], send: Send) -> None:
        wanted = body["sampling_params"]["max_new_tokens"]
        answer(send, wanted, prompt_tokens=2 * len(body["text"].split()))

    script = Scripted(stream)
    with script.running() as endpoint:
        measure(endpoint, PLAN)

    assert {len(body["text"].split()) for body in script.bodies[-LONG_COUNT:]} == {2000}


def test_streams_of_a_round_run_at_the_same_time() -> None:
    together = threading.Barrier(4, timeout=10.0)

    def stream(body: dict[str, Any], send: Send) -> None:
        if body["sampling_params"]["max_new_tokens"] != TTFT_TOKENS:
            together.wait()
        answer(send, body["sampling_params"]["max_new_tokens"])

    script = Scripted(stream, info={"max_running_requests": 3})
    with script.running() as endpoint:
        found = measure(endpoint, replace(PLAN, concurrency=4))

    assert [len(run.streams) for run in found.runs] == [4, 4]
    assert [run.tokens for run in found.runs] == [48, 48]
    for run in found.runs:
        assert run.duration_s >= max(each.duration_s for each in run.streams)
    assert len({body["text"] for body in script.bodies}) == 3 * 4 + SHORT_COUNT + LONG_COUNT
    assert "4 streams were sent at once and the server runs 3" in found.remarks[0]


def test_one_failing_stream_ends_the_round_at_once() -> None:
    gate = Gate(3)

    def stream(body: dict[str, Any], send: Send) -> None:
        send(event(1))
        if gate.is_chosen():
            raise ConnectionResetError
        gate.wait()

    with Scripted(stream).running() as endpoint:
        error = error_of(endpoint, replace(PLAN, concurrency=3))
        gate.open()

    assert gate.late_count == 0
    assert error.code == "dropped"
    assert "with 1 of 12 tokens" in str(error)


def test_reason_that_the_server_gave_is_better_than_how_it_broke_off() -> None:
    def stream(body: dict[str, Any], send: Send) -> None:
        send(b'data: {"error": {"message": "scheduler died"}}\n\n')
        raise ConnectionResetError

    with Scripted(stream).running() as endpoint:
        error = error_of(endpoint)

    assert error.code == "error_in_stream"
    assert "scheduler died" in str(error)


def test_stream_that_ends_without_its_end_mark_was_dropped() -> None:
    with Scripted(lambda _body, send: send(event(12, is_last=True))).running() as endpoint:
        error = error_of(endpoint)

    assert error.code == "dropped"
    assert "without its end mark, with 12 of 12 tokens" in str(error)


def test_stream_that_drips_ends_at_the_deadline() -> None:
    stop = threading.Event()

    def stream(body: dict[str, Any], send: Send) -> None:
        while not stop.wait(0.02):
            send(b":")

    with Scripted(stream).running() as endpoint:
        error = error_of(endpoint, LoadPlan(deadline_s=0.3, stall_s=5.0))
        stop.set()

    assert error.code == "too_slow"


def test_html_is_no_stream() -> None:
    with Scripted(lambda _body, send: send(b"<html>\n")).running() as endpoint:
        assert error_of(endpoint).code == "bad_stream"


def test_api_key_is_sent_and_its_lack_is_told() -> None:
    script = Scripted(api_key="secret")
    with script.running() as endpoint:
        assert measure(endpoint, PLAN).runs
        error = error_of(replace(endpoint, api_key=""))

    assert error.code == "bad_status"
    assert "--api-key" in str(error)
    assert "secret" not in str(error)


@pytest.fixture
def tls_context(tmp_path: Path, require: Require) -> ssl.SSLContext:
    require(shutil.which("openssl"), "openssl is not installed")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=somewhere.else", "-keyout", key, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def test_tls_server_is_measured_and_given_up_as_others(tls_context: ssl.SSLContext) -> None:
    gate = Gate(2)

    def stream(body: dict[str, Any], send: Send) -> None:
        if gate.is_chosen():
            send(b"rubbish\n")
        gate.wait()

    with Scripted().running(tls_context) as endpoint:
        assert [run.tokens for run in measure(endpoint, PLAN).runs] == [12, 12]
    with Scripted(stream).running(tls_context) as endpoint:
        error = error_of(endpoint, replace(PLAN, concurrency=2))
        gate.open()

    assert gate.late_count == 0
    assert error.code == "bad_stream"


@pytest.fixture
def prompt_switching() -> Iterator[list[float]]:
    """Take what a server saw of the interval, and check that it is short then and only then."""
    before_s = sys.getswitchinterval()
    seen_s: list[float] = []
    sys.setswitchinterval(0.004)
    try:
        yield seen_s
        assert sys.getswitchinterval() == pytest.approx(0.004)
        assert max(seen_s) < 0.001
    finally:
        sys.setswitchinterval(before_s)


def test_interrupt_ends_all_streams(prompt_switching: list[float]) -> None:
    thread_count = threading.active_count()
    gate = Gate(3)

    def stream(body: dict[str, Any], send: Send) -> None:
        prompt_switching.append(sys.getswitchinterval())
        send(event(1))
        if gate.is_chosen():
            os.kill(os.getpid(), signal.SIGINT)
        gate.wait()

    with Scripted(stream).running() as endpoint:
        with pytest.raises(KeyboardInterrupt):
            fetch(endpoint, ["a", "b", "c"], tokens=5, limits=Limits(20.0, PLAN.stall_s))
        gate.open()

    assert gate.late_count == 0
    assert threading.active_count() == thread_count
