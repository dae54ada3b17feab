"""How many descriptors the service takes, and when it has too few for one more start."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from nccltune.sdnotify import Notifier
from nccltuned.descriptors import RESERVE, has_room, raise_limit
from nccltuned.service import Config, Service


def set_limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """Let this process seem to have other limits, and return where new ones are noted."""
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: taken.append(limits))
    return taken


@pytest.mark.parametrize(
    ("soft", "hard", "taken"),
    [
        (1024, 4096, [(4096, 4096)]),
        (1024, 2**20, [(65536, 2**20)]),
        (1024, resource.RLIM_INFINITY, [(65536, resource.RLIM_INFINITY)]),
        (4096, 4096, []),
        (2**20, 2**20, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_limit_is_raised_as_far_as_it_is_any_use(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, taken: list[tuple[int, int]]
) -> None:
    found = set_limits(monkeypatch, soft, hard)
    raise_limit()

    assert found == taken


def test_room_ends_before_the_last_descriptors_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as short as it gets
    for more, expected in ((RESERVE + 3, True), (RESERVE - 3, False), (0, False)):
        set_limits(monkeypatch, taken + more, taken + more)
        assert has_room() is expected
    set_limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert has_room()


def test_service_gives_up_a_look_in_need_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nccltuned.service.NEED_WAIT_S", 0.0)
    service = Service(Config(tmp_path, tmp_path, "off"), Notifier.from_environ({}))
    for _ in range(2):
        with service._giving_up_in_need():
            raise OSError(errno.EMFILE, "too many open files")
    with pytest.raises(OSError, match="broken"), service._giving_up_in_need():
        raise OSError(errno.EIO, "broken")

    assert caplog.text.count("nothing can be looked at for now") == 1
