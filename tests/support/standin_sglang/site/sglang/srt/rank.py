"""One scheduler process: loads, captures, reports ready, and then waits to be killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt import lines, wishes
from sglang.srt.plugins import load_plugins
from sglang.srt.processes import kill_itself_when_parent_died, set_title

if TYPE_CHECKING:
    from sglang.srt.arguments import ServerArgs

NCCL_VERSION = "2.28.9"
logger = logging.getLogger(__name__)


class Ring(NamedTuple):
    """The neighbours of a rank. The parent keeps all ends, so that a dead rank makes peers wait."""

    previous: Connection
    following: Connection


def run_scheduler(server_args: ServerArgs, tp_rank: int, pipe: Connection, ring: Ring) -> None:
    """Live as one rank."""
    load_plugins()
    kill_itself_when_parent_died()
    prefix = f" TP{tp_rank}" if server_args.tp_size > 1 else ""
    set_title(f"sglang::scheduler{prefix.replace(' ', '_')}")
    lines.configure_logger(server_args.text("log_level", "info"), prefix)
    parent = os.getppid()
    wishes.record("rank", tp_rank=tp_rank)
    try:
        Rank(server_args, tp_rank, ring).start()
        pipe.send({"status": "ready", "environ": dict(os.environ)})
    except Exception:  # noqa: BLE001 - whatever it is, the parent hears of it
        logger.error("Scheduler hit an exception: %s", traceback.format_exc())  # noqa: TRY400
        os.kill(parent, signal.SIGQUIT)
        wishes.hang()
    _serve(pipe)


def run_detokenizer() -> None:
    """Live as the detokenizer."""
    kill_itself_when_parent_died()
    set_title("sglang::detokenizer")
    wishes.record("detokenizer")
    wishes.hang()


def _serve(pipe: Connection) -> None:
    """Wait for the word to die by some signal, or for the end of the parent."""
    with contextlib.suppress(EOFError, OSError):
        number = pipe.recv()
        os.kill(os.getpid(), number)
    wishes.hang()


class Rank:
    """The way to readiness."""

    def __init__(self, server_args: ServerArgs, tp_rank: int, ring: Ring) -> None:
        self._args = server_args
        self._ring = ring
        self._rank = tp_rank
        self._is_first = tp_rank == server_args.tp_ranks[0]
        self._is_failing = tp_rank == int(wishes.number("FAIL_RANK", server_args.tp_ranks[-1]))
        self._stage_s = wishes.number("STAGE_S")

    def start(self) -> None:
        """Go through every stage, target model first."""
        self._init(is_draft=False)
        self._load("LlamaForCausalLM")
        if self._args.is_speculative:
            self._init(is_draft=True)
            self._load("LlamaForCausalLMEagle3")
        if self._fails("oom_kv"):
            raise RuntimeError(
                "Not enough memory. Please try to increase --mem-fraction-static. "
                "Current value: mem_fraction_static=0.5"
            )
        self._meet()
        for _ in range(2 if self._args.is_speculative else 1):
            logger.info(
                "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 65536, "
                "K size: 3.81 GB, V size: 3.81 GB"
            )
            logger.info("Memory pool end. avail mem=119.04 GB")
        self._capture_all()
        if not self._is_first:
            return
        logger.info(
            "max_total_num_tokens=65536, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            "max_running_requests=%s, context_len=8192, available_gpu_mem=119.12 GB",
            self._args.integer("max_running_requests", 48),
        )

    def _meet(self) -> None:
        """Wait for every other rank, as each collective does."""
        for _ in range(2):
            if self._is_first:
                self._ring.following.send(True)
            self._ring.previous.recv()
            if not self._is_first:
                self._ring.following.send(True)

    def _fails(self, kind: str) -> bool:
        return self._is_failing and wishes.fails(kind)

    def _init(self, *, is_draft: bool) -> None:
        begin, end = lines.init_words()
        logger.info(begin)
        if not is_draft and self._args.tp_size > 1:
            if wishes.fails("nccl_hang"):
                wishes.hang()
            if self._is_first:
                logger.info("sglang is using nccl==%s", NCCL_VERSION)
                sys.stdout.write(f"NCCL version {NCCL_VERSION}+cuda13.0\n")
            self._tell_nccl_settings()
            if self._fails("nccl_init"):
                raise RuntimeError(
                    "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
                )
        if not is_draft and self._is_first and wishes.is_set("STRAY"):
            subprocess.Popen(
                [sys.executable, "-c", _STRAY, str(wishes.text("STRAY"))], start_new_session=True
            )
        wishes.pause(self._stage_s)
        self._meet()
        logger.info(end)

    def _tell_nccl_settings(self) -> None:
        """Say what NCCL_DEBUG=INFO makes NCCL say of its environment."""
        if os.environ.get("NCCL_DEBUG") != "INFO":
            return
        who = f"{socket.gethostname()}:{os.getpid()}:{os.getpid()} [{self._rank}] NCCL INFO"
        for name, value in sorted(os.environ.items()):
            if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG"):
                sys.stdout.write(f"{who} {name} set by environment to {value}.\n")
        sys.stdout.flush()

    def _load(self, architecture: str) -> None:
        logger.info("Load weight begin. avail mem=138.31 GB")
        wishes.pause(wishes.number("SILENCE_S"))
        if self._fails("die_loading"):
            raise ValueError("There is no safetensors file in /models/target")
        if self._fails("killed_loading"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fails("segfault_loading"):
            os.kill(os.getpid(), signal.SIGSEGV)
        count = 10**6 if wishes.fails("endless_progress") else int(wishes.number("SHARDS", 4))
        if self._is_first and count:
            for _ in lines.follow_shards(count):
                wishes.pause(0.02 if count == 10**6 else self._stage_s / count)
        else:
            wishes.pause(self._stage_s)
        self._meet()
        logger.info(
            "Load weight end. elapsed=0.24 s, type=%s, avail mem=127.86 GB, mem usage=10.46 GB.",
            architecture,
        )

    def _capture_all(self) -> None:
        if not self._args.is_speculative:
            self._capture("target decode", 1)
            return
        draft_tokens = self._args.num_steps + 1
        self._capture("target verify", draft_tokens)
        if self._args.num_steps > 1:
            self._capture("draft decode", 1)
        self._capture("draft extend", draft_tokens)

    def _capture(self, name: str, tokens: int) -> None:
        sizes = self._args.capture_sizes
        logger.info(
            "Capture %s CUDA graph begin. backend=full, num_tokens_per_bs=%s, bs=%s, "
            "avail mem=119.24 GB",
            name,
            tokens,
            sizes,
        )
        if self._is_first:
            for idx, _ in enumerate(lines.follow_captures(sizes)):
                wishes.pause(self._stage_s / len(sizes))
                self._fail_in_capture(idx)
        else:
            wishes.pause(self._stage_s)
            self._fail_in_capture(0)
        self._meet()
        logger.info(
            "Capture %s CUDA graph end. elapsed=6.36 s, mem usage=0.05 GB, avail mem=119.19 GB.",
            name,
        )

    def _fail_in_capture(self, idx: int) -> None:
        if wishes.fails("stall_capture") and idx >= int(wishes.number("STALL_AT")):
            wishes.hang()
        if self._fails("oom_capture"):
            raise RuntimeError(
                "Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.00 GiB. "
                "GPU 0 has a total capacity of 139.72 GiB of which 512.00 MiB is free.\n"
                + lines.CAPTURE_FAILED_ADVICE
            )


_STRAY = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(3600)
"""
