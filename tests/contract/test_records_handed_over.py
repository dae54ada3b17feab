"""Launches whose user may not write into the store: every route hands its record to the service."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nccltune.live.launch_inbox import INBOX_NAME
from nccltune.paths import state_dir
from nccltune.store import LaunchRecord, activate, save_candidate
from nccltuned.inbox import Inbox
from tests.support.launch_host import FLAGS, REPOSITORY, LaunchHost, make_host

HOOK = """
import sys
sys.path.insert(0, {hook!r})
sys.argv = ["/site/sglang/launch_server.py", *sys.argv[1:]]
import nccltune_hook
nccltune_hook.load()
"""


@pytest.fixture
def host(tmp_path: Path) -> LaunchHost:
    """A host with an active profile and a store that takes no records, whoever runs the tests."""
    host = make_host(tmp_path / "host")
    save_candidate(host.profile())
    activate("kimi", reason="manual")
    (state_dir() / "launches.jsonl").mkdir()
    return host


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    found = Inbox(tmp_path / INBOX_NAME)
    found.open()
    yield found
    found.close()


def start(route: str, host: LaunchHost, **variables: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "nccltune", route, "--", *host.command]
    if route == "hook":
        words = ["-c", HOOK.format(hook=str(REPOSITORY / "hook")), *FLAGS]
        variables["NCCLTUNE_ANY_HOST"] = "1"  # it would look for a driver in procfs
    return subprocess.run(
        [sys.executable, *words],
        env=host.environ(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("route", ["run", "launch", "hook"])
def test_record_that_the_store_refuses_reaches_the_service(
    host: LaunchHost, inbox: Inbox, route: str
) -> None:
    text = host.sglang.read_text(encoding="utf-8")
    slow = text.replace("sys.exit(", "import time\ntime.sleep(1)\nsys.exit(")
    host.sglang.write_text(slow, encoding="utf-8")
    taken: list[LaunchRecord] = []
    # As the service does, at once: a record is of a process that is there.
    with ThreadPoolExecutor() as pool:
        variables = {"NCCLTUNE_RUN_DIR": str(inbox.path.parent), "NCCL_MAX_CTAS": "4"}
        running = pool.submit(lambda: start(route, host, **variables))
        while not running.done():
            if select.select([inbox.descriptor], [], [], 0.05)[0]:
                taken.extend(inbox.take())
    done = running.result()

    (record,) = taken
    assert (record.route, record.profile_name) == (route, "kimi")
    assert record.pid > 0
    assert record.kept == {"NCCL_MAX_CTAS": ""}  # the value is the operator's own
    assert "not on record" not in done.stderr


@pytest.mark.parametrize("route", ["run", "launch", "hook"])
def test_record_that_nobody_takes_costs_the_launch_nothing(
    host: LaunchHost, tmp_path: Path, route: str
) -> None:
    done = start(route, host, NCCLTUNE_RUN_DIR=str(tmp_path / "nowhere"))

    assert "profile kimi is applied" in done.stderr
    assert done.returncode == 0
