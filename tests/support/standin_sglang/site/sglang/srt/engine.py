"""Starts the tree: environment, ranks, detokenizer, HTTP side; ends it as SGLang does."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING

from sglang.srt import lines, wishes
from sglang.srt.environment import set_environment
from sglang.srt.plugins import load_plugins
from sglang.srt.processes import kill_process_tree
from sglang.srt.rank import Ring, run_detokenizer, run_scheduler
from sglang.srt.web import Web

if TYPE_CHECKING:
    from sglang.srt.arguments import ServerArgs

WATCH_INTERVAL_S = 0.1  # 1 s in SGLang
logger = logging.getLogger(__name__)


@dataclass
class Children:
    """The processes of one server."""

    names: list[str] = field(default_factory=list)
    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    infos: list[dict[str, object]] = field(default_factory=list)
    rings: list[Ring] = field(default_factory=list)


def run_server(server_args: ServerArgs) -> None:
    """Serve until a signal or a dead child ends it."""
    lines.configure_logger(server_args.text("log_level", "info"))
    set_environment(server_args)
    signal.signal(signal.SIGQUIT, _on_sigquit_while_launching)
    multiprocessing.set_start_method("spawn", force=True)
    load_plugins()
    wishes.record("parent", argv=sys.argv)
    logger.info("server_args=%r", server_args)
    children = _start_children(server_args)
    logger.info("No HuggingFace chat template found")
    _wait_for_schedulers(children)
    _serve(server_args, children)


def _start_children(server_args: ServerArgs) -> Children:
    links = [multiprocessing.Pipe(duplex=False) for _ in server_args.tp_ranks]
    rings = [Ring(links[idx - 1][0], sending) for idx, (_, sending) in enumerate(links)]
    children = Children(rings=rings)
    for idx, tp_rank in enumerate(server_args.tp_ranks):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=run_scheduler, args=(server_args, tp_rank, there, rings[idx])
        )
        with _without_lost_variables(tp_rank):
            process.start()
        there.close()
        children.names.append(f"scheduler_{idx}")
        children.processes.append(process)
        children.pipes.append(here)
    if server_args.integer("node_rank", 0) == 0:
        process = multiprocessing.Process(target=run_detokenizer)
        process.start()
        children.names.append("detokenizer")
        children.processes.append(process)
    return children


@contextmanager
def _without_lost_variables(tp_rank: int) -> Iterator[None]:
    """Start a rank without the variables of STANDIN_SGLANG_LOSE, as if they had been lost."""
    only = wishes.text("LOSE_RANK")
    is_chosen = not only or int(only) == tp_rank
    names = wishes.text("LOSE").split(",") if is_chosen else []
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _wait_for_schedulers(children: Children) -> None:
    for rank, pipe in enumerate(children.pipes):
        while not pipe.poll(0.1):
            _check_alive(children)
        try:
            children.infos.append(pipe.recv())
        except EOFError:
            raise _died(rank, children.processes[rank]) from None


def _check_alive(children: Children) -> None:
    for rank, (process, _) in enumerate(zip(children.processes, children.pipes, strict=False)):
        if not process.is_alive():
            raise _died(rank, process)


def _died(rank: int, process: BaseProcess) -> RuntimeError:
    process.join(timeout=10)
    return RuntimeError(
        f"Rank {rank} scheduler died during initialization (exit code: {process.exitcode}). "
        "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
        "Run `dmesg -T | grep -i oom` to check."
    )


def _on_sigquit_while_launching(_number: int, _frame: FrameType | None) -> None:
    logger.error("Received sigquit from a child process. It usually means the child failed.")
    kill_process_tree(os.getpid(), include_parent=True)


def _serve(server_args: ServerArgs, children: Children) -> None:
    web = Web(server_args, children.infos)
    if not web.bind():
        sys.exit(1)

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        logger.warning(
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
        )
        if not wishes.is_set("IGNORE_TERM"):
            web.is_leaving = True
            threading.Thread(target=_leave, args=(web,), daemon=True).start()

    def on_sigquit(_number: int, _frame: FrameType | None) -> None:
        logger.error(
            "SIGQUIT received. signum=None, frame=None. It usually means one child failed."
        )
        logger.info("No live scheduler processes found; skipping py-spy and CUDA coredump.")
        kill_process_tree(os.getpid(), include_parent=True)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGQUIT, on_sigquit)
    threading.Thread(target=_watch, args=(children, web), daemon=True).start()
    threading.Thread(target=_die_later, args=(children, web), daemon=True).start()
    threading.Thread(target=_warm_up, args=(server_args, web), daemon=True).start()
    try:
        web.serve()
    except KeyboardInterrupt:
        logger.info("INFO:     Shutting down")
        logger.info("INFO:     Finished server process [%s]", os.getpid())


def _leave(web: Web) -> None:
    """End as SGLang does after SIGTERM: by killing its tree and itself."""
    wishes.pause(wishes.number("DRAIN_S"))
    while web.running_count:
        time.sleep(0.01)
    logger.info(
        "Gracefully exiting... Remaining number of requests 0. Remaining requests "
        "remaining_rids=[]."
    )
    kill_process_tree(os.getpid(), include_parent=True)


def _watch(children: Children, web: Web) -> None:
    while not web.is_leaving:
        for process, name in zip(children.processes, children.names, strict=True):
            if not process.is_alive() and process.exitcode:
                logger.error(
                    "Subprocess %s (pid=%s) crashed with exit code %s. "
                    "Triggering SIGQUIT for cleanup...",
                    name,
                    process.pid,
                    process.exitcode,
                )
                os.kill(os.getpid(), signal.SIGQUIT)
                return
        time.sleep(WATCH_INTERVAL_S)


def _die_later(children: Children, web: Web) -> None:
    """Kill a rank some time after the server is up, where a test asks for it."""
    delay_s = wishes.number("DIE_AFTER_S", -1.0)
    if delay_s < 0:
        return
    web.is_up.wait()
    time.sleep(delay_s)
    children.pipes[-1].send(signal.SIGKILL)


def _warm_up(server_args: ServerArgs, web: Web) -> None:
    """Be 503 for a while, then up, and say so."""
    web.is_listening.wait()
    if server_args.integer("node_rank", 0) > 0:
        web.is_up.set()
        return
    wishes.pause(wishes.number("STARTING_S"))
    if wishes.fails("warmup"):
        try:
            raise TimeoutError("Read timed out. (read timeout=600)")  # noqa: TRY301
        except TimeoutError:
            logger.error("Initialization failed. warmup error: %s", traceback.format_exc())  # noqa: TRY400
            kill_process_tree(os.getpid(), include_parent=True)
    if wishes.fails("never_up"):
        return
    web.is_up.set()
    logger.info("The server is fired up and ready to roll!")
