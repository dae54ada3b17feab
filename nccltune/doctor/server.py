"""What the interpreter that runs the server would load, asked of that interpreter itself."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PROBE_TIMEOUT_S = 90.0
"""A cold torch on a slow disk takes its time; ten times what was seen on a warm one."""

_PROBE_PATH = Path(__file__).with_name("server_probe.py")
_MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """One NCCL that the server loads.

    Attributes:
        path: the file; as it was asked for where it could not be loaded.
        version: None where the library did not tell.
        problem: why it cannot be loaded; empty where it can.
    """

    path: str
    version: str | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """One interpreter.

    Attributes:
        torch_problem: why torch cannot be imported there; empty where it can, or is not installed.
        torch_nccl: the NCCL that torch brings, which the server's eager collectives run on.
        chosen_nccl: the NCCL that SGLANG_NCCL_SO_PATH names, for captured all-reduces; else None.
        wheels: NCCL wheels by their metadata, which need not be what is loaded.
        plugins: what SGLang calls when it starts: value of each entry point by its name.
    """

    executable: str
    python_version: str = ""
    sglang_version: str | None = None
    torch_version: str | None = None
    torch_problem: str = ""
    torch_nccl: NcclLibrary | None = None
    chosen_nccl: NcclLibrary | None = None
    wheels: Mapping[str, str] = field(default_factory=dict)
    plugins: Mapping[str, str] = field(default_factory=dict)

    @property
    def graph_nccl(self) -> NcclLibrary | None:
        """The NCCL of the captured all-reduces, those that a profile is for."""
        return self.torch_nccl if self.chosen_nccl is None else self.chosen_nccl

    @property
    def nccl_version(self) -> str | None:
        """Version of ``graph_nccl``; None where it is not known."""
        return None if self.graph_nccl is None else self.graph_nccl.version


class ProbeError(Exception):
    """The interpreter gave no answer; the text says why, in one line."""


def probe_server(
    python: Path, environ: Mapping[str, str], *, timeout_s: float = PROBE_TIMEOUT_S
) -> ProbedServer:
    """Ask an interpreter what it would load.

    Args:
        python: the interpreter.
        environ: the environment that the server would be started in.
        timeout_s: how long it may take; whatever it started ends with it.

    Raises:
        ProbeError: it is no interpreter, does not answer in time, or answers nonsense.
    """
    content, problem = _run_probe(python, environ, timeout_s)
    try:
        answer = json.loads(content)
    except ValueError:
        raise ProbeError(f"{python} {problem or 'gave no answer'}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("executable"), str):
        raise ProbeError(f"{python} gave an answer that makes no sense")
    return _facts(answer)


def _run_probe(python: Path, environ: Mapping[str, str], timeout_s: float) -> tuple[bytes, str]:
    """Return what the probe wrote, and what was wrong with it."""
    reader, writer = os.pipe()
    source = _PROBE_PATH.read_text(encoding="utf-8")
    try:
        # As a text and not as a file, whose folder would be searched for modules first.
        process = subprocess.Popen(
            [str(python), "-c", source, str(writer)],
            env=dict(environ),
            pass_fds=(writer,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        os.close(reader)
        raise ProbeError(f"{python} cannot be started ({error.strerror})") from None
    finally:
        os.close(writer)
    deadline_s = time.monotonic() + timeout_s
    try:
        content = _read_until(reader, deadline_s)
        _, complaint = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        return b"", f"did not answer within {timeout_s:g} s"
    finally:
        os.close(reader)
        _end(process)
    last = complaint.decode(errors="replace").strip().splitlines()[-1:]
    return content, f"failed: {last[0]}" if last else f"ended with {process.returncode}"


def _read_until(descriptor: int, deadline_s: float) -> bytes:
    content = b""
    while len(content) < _MAX_ANSWER_BYTES:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise TimeoutError
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            break
        content += chunk
    return content


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # not fetched yet, so that the number is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _facts(answer: Mapping[str, object]) -> ProbedServer:
    plugins = answer.get("plugins")
    entries = plugins if isinstance(plugins, list) else []
    return ProbedServer(
        executable=str(answer["executable"]),
        python_version=str(answer.get("python_version") or ""),
        sglang_version=_text(answer, "sglang_version"),
        torch_version=_text(answer, "torch_version"),
        torch_problem=_text(answer, "torch_problem") or "",
        torch_nccl=_library(answer.get("torch_nccl")),
        chosen_nccl=_library(answer.get("chosen_nccl")),
        wheels=_texts(answer.get("wheels")),
        plugins={str(e["name"]): str(e["value"]) for e in entries if {"name", "value"} <= e.keys()},
    )


def _text(answer: Mapping[str, object], key: str) -> str | None:
    value = answer.get(key)
    return value if isinstance(value, str) else None


def _texts(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _library(value: object) -> NcclLibrary | None:
    if not isinstance(value, dict):
        return None
    path = _text(value, "path") or ""
    return NcclLibrary(path, _text(value, "version"), _text(value, "problem") or "")
