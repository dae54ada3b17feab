"""What holds for every test: state in a temporary folder, a clean environment, no network."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# A check started in the background ignores SIGINT, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_SYSTEM = os.environ.get("NCCLTUNE_REQUIRE_SYSTEM") == "1"

Require = Callable[[object, str], None]


@pytest.fixture(autouse=True)
def isolated_environment(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the developer's state, and settings of a tuned host, out of every test."""
    for name in list(os.environ):
        if name.startswith(("NCCL", "SGLANG_")) or name == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("isolated")
    (home / "nccltune").mkdir()
    monkeypatch.setenv("NCCLTUNE_HOME", str(home / "nccltune"))
    monkeypatch.setenv("HOME", str(home))
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(home / kind.lower()))


def is_loopback(host: object) -> bool:
    """Tell whether a socket address stays on this machine."""
    if not isinstance(host, str):
        return host is None
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail every test that looks up or reaches another machine."""

    def guard(real: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: socket.socket, address: Any) -> Any:
            is_network = self.family in (socket.AF_INET, socket.AF_INET6)
            if is_network and not is_loopback(address[0]):
                pytest.fail(f"the test tried to reach {address}; only loopback is allowed")
            return real(self, address)

        return guarded

    real_lookup = socket.getaddrinfo

    def guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_loopback(host):
            pytest.fail(f"the test tried to look up {host!r}; only loopback is allowed")
        return real_lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guard(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guard(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", guarded_lookup)


@pytest.fixture
def require() -> Require:
    """Return ``require(condition, reason)``: without the condition the test skips.

    Where NCCLTUNE_REQUIRE_SYSTEM=1 promises a machine that has everything, it fails instead.
    """

    def check(condition: object, reason: str) -> None:
        if condition:
            return
        if REQUIRE_SYSTEM:
            pytest.fail(f"NCCLTUNE_REQUIRE_SYSTEM=1, but {reason}")
        pytest.skip(reason)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn every other skip of a ``system`` test into a failure too, where none may skip."""
    report = yield
    is_plain_skip = report.skipped and not hasattr(report, "wasxfail")
    if REQUIRE_SYSTEM and is_plain_skip and item.get_closest_marker("system"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"NCCLTUNE_REQUIRE_SYSTEM=1, but the test was skipped: {reason}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip device tests where they cannot run, and say what is missing."""
    if not Path("/dev/nvidia0").exists():
        missing = "no NVIDIA GPU on this machine"
    elif find_spec("torch") is None:
        missing = "torch is not installed (extra: bench)"
    else:
        return
    for item in items:
        if item.get_closest_marker("device"):
            item.add_marker(pytest.mark.skip(reason=missing))
