"""The script in front of servers: a server starts whatever has become of nccltune."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Require

START = Path(__file__).parents[2] / "systemd/nccltune-start"
SHELLS = ("dash", "bash")
ECHO = ("/bin/sh", "-c", 'printf "<%s>" "$@"; exit 7', "sh", "a  b", "c\nd", "$HOME `id` $(id)", "")
ECHOED = "<a  b><c\nd><$HOME `id` $(id)><>"


@pytest.fixture(params=SHELLS)
def start(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The words that run the script, under each shell that a host may have as /bin/sh."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"no {request.param} here")
    return shell, str(START)


def run(
    *words: str | Path, environ: dict[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [str(word) for word in words],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


def fake_python(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("verb", ["run", "launch"])
def test_becomes_nccltune_with_every_word_as_it_is(verb: str, start: tuple[str, str]) -> None:
    done = run(*start, sys.executable, verb, "--policy", "all", "--", *ECHO)

    assert (done.returncode, done.stdout) == (7, ECHOED)
    assert "WITHOUT" not in done.stderr
    assert "no profile" in done.stderr  # said by nccltune itself


def test_command_has_the_process_of_the_script_and_its_input(start: tuple[str, str]) -> None:
    words = [*start, sys.executable, "run", "--", "/bin/sh", "-c", "echo $$; cat; kill -TERM $$"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        told, _ = process.communicate("input", timeout=60)

    assert told == f"{process.pid}\ninput"
    assert process.returncode == -15


def test_python_variables_reach_the_server_and_not_nccltune(
    start: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('not the real one')\n")
    given = {"PYTHONHOME": "/nowhere", "PYTHONHASHSEED": "abc", "PYTHONPATH": str(tmp_path)}
    show = ["/bin/sh", "-c", 'echo "$PYTHONHOME $PYTHONHASHSEED $PYTHONPATH"']

    for verb in ("run", "launch"):
        done = run(*start, sys.executable, verb, "--", *show, environ=given, cwd=tmp_path)

        assert done.stdout == f"/nowhere abc {tmp_path}\n"
        assert "WITHOUT" not in done.stderr


FAULTS = {
    "gone": (None, "no {}, or it lacks a library"),
    "closed": ("not a program", "may not run {}"),
    "broken": ("echo Traceback >&2; exit 1", "status 1"),
    # What 'run' alone needs may be broken where the version can still be told.
    "broken-verb": ('case "$*" in *--version) exit 0 ;; esac; exit 1', "status 1"),
    "killed": ("kill -SEGV $$", "status 139"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", ["run", "launch"])
def test_server_starts_whatever_has_become_of_nccltune(
    verb: str, fault: str, start: tuple[str, str], tmp_path: Path
) -> None:
    text, reason = FAULTS[fault]
    python = tmp_path / "a python"
    if text is not None:
        fake_python(python, text).chmod(0o644 if fault == "closed" else 0o755)

    done = run(*start, python, verb, "--policy", "all", "--", *ECHO)

    assert (done.returncode, done.stdout) == (7, ECHOED)
    (line,) = done.stderr.splitlines()
    assert line.startswith("nccltune-start: WARNING: nccltune does not work here (")
    assert reason.format(python) in line
    assert "the command starts WITHOUT it" in line


def test_nccltune_that_cannot_be_ended_costs_a_limited_time(
    start: tuple[str, str], tmp_path: Path
) -> None:
    hurried = tmp_path / "start"
    hurried.write_text(START.read_text().replace("limit_s=30\n", "limit_s=0.3\n"))
    pid_file = tmp_path / "pid"
    hang = f"trap '' TERM; echo $$ >{pid_file}; while :; do sleep 0.05; done"

    done = run(start[0], hurried, fake_python(tmp_path / "python", hang), "run", "--", *ECHO)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)  # it is left behind, and no more

    assert (done.returncode, done.stdout) == (7, ECHOED)
    assert "no answer within 0.3 s" in done.stderr


def test_required_profile_is_not_left_out(start: tuple[str, str], tmp_path: Path) -> None:
    done = run(*start, tmp_path / "gone", "run", "--require-profile", "--", *ECHO)
    other = run(*start, tmp_path / "gone", "run", "--", *ECHO, "--require-profile")

    assert (done.returncode, done.stdout) == (3, "")
    assert "--require-profile is given: not started" in done.stderr
    assert other.returncode == 7


@pytest.mark.parametrize(
    "words", [(), ("p",), ("p", "run"), ("p", "run", "--"), ("p", "search", "--", "a")]
)
def test_words_without_a_command_are_refused(words: tuple[str, ...]) -> None:
    done = run(START, *words)

    assert done.returncode == 125
    assert done.stderr.startswith("nccltune-start: usage: ")


def test_server_starts_where_nobody_reads_and_nothing_is_on_the_path(
    start: tuple[str, str], tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [*start, str(tmp_path / "gone"), "run", "--", *ECHO]
    found = subprocess.run(
        words,
        env={"PATH": "/nowhere"},
        stdout=subprocess.PIPE,
        stderr=writing,
        text=True,
        check=False,
        restore_signals=True,
    )
    os.close(writing)
    tuned = run(*start, sys.executable, "run", "--", *ECHO, environ={"PATH": "/nowhere"})

    assert (found.returncode, found.stdout) == (7, ECHOED)
    assert (tuned.returncode, "WITHOUT" in tuned.stderr) == (7, False)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Listens in place of systemd; returns where, and what it hears."""
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))

        def listen() -> None:
            while text := receive(listener):
                heard.append(text)

        thread = threading.Thread(target=listen)
        thread.start()
        yield str(listener.getsockname()), heard
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", str(listener.getsockname()))
        thread.join()


def receive(listener: socket.socket) -> str:
    """Receive one message; the sender waits until what it has passed along is closed."""
    content, descriptors, _, _ = socket.recv_fds(listener, 4096, 4)
    for descriptor in descriptors:
        os.close(descriptor)
    return content.decode()


@pytest.mark.system
@pytest.mark.parametrize("verb", ["launch", "run"])
def test_systemd_hears_of_the_start_where_launch_would_have_told_it(
    verb: str, tmp_path: Path, manager: tuple[str, list[str]], require: Require
) -> None:
    require(shutil.which("systemd-notify"), "systemd-notify is not installed")
    address, heard = manager
    show = ["/bin/sh", "-c", 'echo "${NOTIFY_SOCKET-none} ${WATCHDOG_USEC-none}"']
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"}

    done = run(START, tmp_path / "gone", verb, "--", *show, environ=environ)

    # A server behind "run" speaks for itself, as it does without nccltune.
    assert done.stdout == ("none none\n" if verb == "launch" else f"{address} 1000000\n")
    said = [line for text in heard for line in text.splitlines()]
    wanted = {"READY=1", "WATCHDOG_USEC=0"} if verb == "launch" else set()
    assert wanted <= set(said)
    assert bool(said) is bool(wanted)
