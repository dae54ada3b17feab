from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.support.hosts import REPOSITORY, STANDIN_MODULE


@pytest.mark.parametrize("module", [STANDIN_MODULE, "no_such_module"], ids=["fine", "broken"])
def test_rank_server_whose_launcher_was_killed_ends_without_a_word(module: str) -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        ended = subprocess.run(
            [sys.executable, "-m", "nccltune.bench.server", str(theirs.fileno()), module],
            pass_fds=[theirs.fileno()],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (0, "")
