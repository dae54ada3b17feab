"""The HTTP side: health in all its phases, information, and generation."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

from sglang.srt import wishes
from sglang.srt.generation import Speed, Step, run_steps, speculation, text_of
from sglang.version import __version__, is_at_least

if TYPE_CHECKING:
    from sglang.srt.arguments import ServerArgs

logger = logging.getLogger(__name__)


class Web:
    """State that every request sees."""

    def __init__(self, server_args: ServerArgs, infos: list[dict[str, Any]]) -> None:
        self.args = server_args
        environ = cast("dict[str, str]", infos[0].get("environ", {})) if infos else {}
        self.speed = Speed.of_boot(server_args.num_steps, environ)
        self.is_up = threading.Event()
        self.is_listening = threading.Event()
        self.is_leaving = False
        self.running_count = 0
        self.token_total = self.verify_total = 0
        self.started_s = time.perf_counter()
        self._lock = threading.Lock()
        self._server: Server | None = None

    def bind(self) -> bool:
        """Take the port, or say what uvicorn says when it is taken."""
        host, port = self.args.host, self.args.port
        logger.info("INFO:     Started server process [%s]", os.getpid())
        logger.info("INFO:     Waiting for application startup.")
        logger.info("INFO:     Application startup complete.")
        try:
            self._server = Server((host, port), Handler, self)
        except OSError as error:
            logger.error(  # noqa: TRY400 - as uvicorn words it
                "ERROR:    [Errno %s] error while attempting to bind on address (%r, %s): "
                "address already in use",
                error.errno,
                host,
                port,
            )
            return False
        logger.info("INFO:     Uvicorn running on http://%s:%s (Press CTRL+C to quit)", host, port)
        return True

    def serve(self) -> None:
        """Answer until the process ends."""
        assert self._server is not None
        self.is_listening.set()
        self._server.serve_forever(poll_interval=0.05)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request in while it lasts."""
        with self._lock:
            self.running_count += 1
        try:
            yield
        finally:
            with self._lock:
                self.running_count -= 1

    def add(self, step: Step) -> None:
        """Add a finished request to the totals."""
        with self._lock:
            self.token_total += step.token_count
            self.verify_total += step.verify_count


class Server(ThreadingHTTPServer):
    """A server that knows the state."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[Handler], web: Web) -> None:
        self.web = web
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Take a client that went away as normal."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    @property
    def web(self) -> Web:
        return cast("Server", self.server).web

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/health", "/health_generate"):
            self._health(path)
        elif not self._has_key():
            self._answer(401, {"error": "Unauthorized"})
        elif path == "/ready" and is_at_least(0, 5, 20):
            self._answer(200 if self.web.is_up.is_set() else 503)
        elif path in ("/model_info", "/get_model_info"):
            self._answer(
                200, {"model_path": self.web.args.text("model_path"), "is_generation": True}
            )
        elif path in ("/server_info", "/get_server_info"):
            self._answer(200, self._server_info())
        elif path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "standin", "object": "model"}]})
        elif path == "/flush_cache":
            self._answer(200)
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        if not self._has_key():
            self._answer(401, {"error": "Unauthorized"})
        elif self.path == "/flush_cache":
            self._answer(200)
        elif self.path == "/generate":
            with self.web.running():
                self._generate(body)
        else:
            self._answer(404, {"detail": "Not Found"})

    def _has_key(self) -> bool:
        key = self.web.args.text("api_key", "")
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def _health(self, path: str) -> None:
        if self.web.is_leaving or not self.web.is_up.is_set():
            self._answer(503 if self.web.args.integer("node_rank", 0) == 0 else 200)
            return
        is_quick = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") == "false"
        if not (is_quick and path == "/health"):
            wishes.pause(wishes.number("HEALTH_S"))
        self._answer(503 if wishes.text("ANSWER") == "unhealthy" else 200)

    def _server_info(self) -> dict[str, object]:
        web = self.web
        state: dict[str, object] = {"last_gen_throughput": 0.0, "memory_usage": {"weight": 10.46}}
        if web.args.is_speculative and web.verify_total:
            state["avg_spec_accept_length"] = web.token_total / web.verify_total
        return {
            **web.args.as_dict(),
            "status": "ready",
            "max_total_num_tokens": 65536,
            "internal_states": [{**web.args.as_dict(), **state}],
            "version": __version__,
        }

    def _generate(self, body: dict[str, Any]) -> None:
        fault = wishes.text("ANSWER")
        if fault == "http_500":
            self._answer(500, {"error": {"message": "internal error"}})
            return
        sampling = body.get("sampling_params") or {}
        wanted = int(sampling.get("max_new_tokens", 128))
        ids = body.get("input_ids")
        prompt_tokens = len(ids) if ids is not None else len(str(body.get("text", "")).split())
        if fault == "fewer_tokens":
            wanted = max(1, wanted // 2)
        elif fault == "zero_tokens":
            wanted = 0
        logger.info(
            "Prefill batch, #new-seq: 1, #new-token: %s, #cached-token: 0, token usage: 0.00, "
            "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: False, "
            "input throughput (token/s): 697.48",
            prompt_tokens,
        )
        if body.get("stream"):
            self._stream(fault, prompt_tokens, wanted)
        else:
            began_s = time.perf_counter()
            *_, last = run_steps(self.web.speed, prompt_tokens, wanted)
            self.web.add(last)
            self._answer(200, self._chunk(last, prompt_tokens, wanted, began_s))

    def _stream(self, fault: str, prompt_tokens: int, wanted: int) -> None:
        self._begin(200, "text/event-stream; charset=utf-8")
        began_s = time.perf_counter()
        if fault == "error_200":
            error = {"message": "the request was aborted", "type": "invalid_request_error"}
            self._event({"error": {**error, "code": 400, "retryable": False}})
            self._end_stream()
            return
        last = Step(0, 0)
        for idx, last in enumerate(run_steps(self.web.speed, prompt_tokens, wanted)):
            is_last = last.token_count >= wanted
            if fault == "drop" and idx == 3:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault == "stall_stream" and idx == 3:
                wishes.hang()
            if is_last or fault != "one_chunk":
                self._event(self._chunk(last, prompt_tokens, wanted, began_s))
        self.web.add(last)
        self._log_decode(last, began_s)
        self._end_stream()

    def _chunk(self, step: Step, prompt_tokens: int, wanted: int, began_s: float) -> object:
        is_last = step.token_count >= wanted
        fault = wishes.text("ANSWER")
        reason: dict[str, object] | None = None
        if is_last:
            reason = {"type": "length", "length": wanted}
            if fault in ("fewer_tokens", "zero_tokens"):
                reason = {"type": "stop", "matched": 2}
            elif fault == "nan_stop":
                reason = {"type": "stop", "matched": "NaN happened"}
        meta: dict[str, object] = {
            "id": uuid.uuid4().hex,
            "finish_reason": reason,
            "prompt_tokens": prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": step.token_count,
            "cached_tokens": 0,
        }
        if is_last:
            meta["e2e_latency"] = time.perf_counter() - began_s
            if self.web.args.is_speculative and step.verify_count:
                meta.update(speculation(step, self.web.args.num_steps))
        if fault == "no_usage":
            for name in ("prompt_tokens", "completion_tokens"):
                del meta[name]
        count = step.token_count
        return {"text": text_of(count), "output_ids": [100] * count, "meta_info": meta}

    def _log_decode(self, step: Step, began_s: float) -> None:
        speculative = ""
        if step.verify_count and self.web.args.is_speculative:
            length = step.token_count / step.verify_count
            rate = (length - 1.0) / self.web.args.num_steps
            speculative = f"accept len: {length:.2f}, accept rate: {rate:.2f}, "
        elapsed_s = max(1e-6, time.perf_counter() - began_s)
        logger.info(
            "Decode batch, #running-req: 1, #token: %s, token usage: 0.00, %scuda graph: True, "
            "gen throughput (token/s): %.2f, #queue-req: 0",
            step.token_count,
            speculative,
            step.token_count / elapsed_s,
        )

    def _event(self, content: object) -> None:
        self._piece(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _end_stream(self) -> None:
        self._piece(b"data: [DONE]\n\n")
        self._piece(b"")

    def _piece(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _answer(self, status: int, content: object = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Write the access line on stdout, as uvicorn does."""
        del size
        if wishes.is_set("QUIET"):
            return
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        host, port = self.client_address[:2]
        status = {200: "OK", 404: "Not Found", 500: "Internal Server Error"}.get(int(code), "")
        status = "Service Unavailable" if int(code) == 503 else status
        sys.stdout.write(
            f'[{moment}] INFO:     {host}:{port} - "{self.requestline}" {int(code)} {status}\n'
        )
        sys.stdout.flush()
