from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import pytest

from nccltune.inject.apart import ApartError, Errand, end, receive, start
from tests.support.launching import is_alive


@contextmanager
def errand(work: Callable[[], Mapping[str, object]]) -> Iterator[Errand]:
    """A child at work, of which nothing is left."""
    child = start(work)
    try:
        yield child
    finally:
        end([child])
        with pytest.raises(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)


def fail() -> NoReturn:
    raise ValueError("no such thing")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError


def hang() -> Mapping[str, object]:
    threading.Event().wait()
    return {}


def test_receive_returns_what_the_work_returned() -> None:
    answer = {"text": "\udcff" + "x" * 300_000, "list": [1, None, True]}

    with errand(lambda: answer) as child:
        assert receive(child, 10.0) == answer


def test_receive_of_work_that_raised_says_what() -> None:
    with errand(fail) as child, pytest.raises(ApartError, match="ValueError: no such thing"):
        receive(child, 10.0)


def test_receive_of_work_that_returns_what_json_cannot_hold_says_so() -> None:
    with errand(lambda: {"x": object()}) as child, pytest.raises(ApartError, match="TypeError"):
        receive(child, 10.0)


def test_receive_of_work_that_left_says_so() -> None:
    def leave() -> NoReturn:
        os._exit(0)

    with errand(leave) as child, pytest.raises(ApartError, match="without an answer"):
        receive(child, 10.0)


def test_a_child_that_crashed_ends_by_its_signal() -> None:
    child = start(die)
    with pytest.raises(ApartError):
        receive(child, 10.0)

    assert end([child]) == {child.pid: "SIGTERM"}


def test_a_child_that_hangs_is_given_up_and_killed() -> None:
    with errand(hang) as child, pytest.raises(ApartError, match=r"no answer within 0\.01 s"):
        receive(child, 0.01)


def test_another_child_can_take_the_answer() -> None:
    with errand(lambda: {"gpus": 8}) as first, errand(lambda: receive(first, 10.0)) as second:
        assert receive(second, 10.0) == {"gpus": 8}


def test_end_leaves_alone_who_has_the_number_of_a_child_that_is_gone() -> None:
    receiving, sending = os.pipe()
    os.close(sending)
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    stranger = int(parent.stdout.readline())
    try:
        assert end([Errand(stranger, receiving)]) == {}
        assert is_alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)
        parent.communicate()


@pytest.fixture
def ignored_child_ends() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ignored_child_ends")
def test_work_learns_how_its_own_children_end_where_its_caller_does_not() -> None:
    def work() -> Mapping[str, object]:
        return {"status": subprocess.run(["sh", "-c", "exit 7"], check=False).returncode}

    with errand(work) as child:
        assert receive(child, 10.0) == {"status": 7}
