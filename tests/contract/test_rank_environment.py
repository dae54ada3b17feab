"""Ranks load the NCCL and CUDA libraries that the launch names, in an interpreter of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nccltune.bench.host import FROM_LAUNCH, FROM_THIS_PROCESS, rank_environ
from tests.support.hosts import REPOSITORY, standin_plan

if TYPE_CHECKING:
    from pathlib import Path

BROKEN = {"CUDA_HOME": "/broken"}
"""With this a stand-in rank finds no NCCL."""


@pytest.mark.parametrize(
    ("before", "outer", "is_measured"),
    [
        ("", {}, True),
        ("", BROKEN, False),
        ("env CUDA_HOME=/broken", {}, False),
        ("env -i CUDA_HOME=/broken", {}, False),
        ("env CUDA_HOME=/usr/local/cuda", BROKEN, True),
        ("env -u CUDA_HOME", BROKEN, True),
        ("env -i", BROKEN, True),
    ],
)
def test_ranks_load_what_the_server_would_load(
    before: str, outer: dict[str, str], is_measured: bool, tmp_path: Path
) -> None:
    bench = "tests.support.standin_cli bench --json --launches 1 --payload 43008:122"
    server = "python3 -m sglang.launch_server --model-path /m --tp 2"
    done = subprocess.run(
        [sys.executable, "-m", *f"{bench} -- {before} {server}".split()],
        cwd=REPOSITORY,
        env={**os.environ, **outer, "STANDIN_GPUS": "2", "NCCLTUNE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [error["code"] for error in json.loads(done.stdout)["errors"]]

    assert errors == ([] if is_measured else ["rank_server_failed"])


@pytest.mark.parametrize("name", sorted(FROM_LAUNCH | FROM_THIS_PROCESS))
def test_each_variable_comes_from_one_side_only(name: str) -> None:
    own, launch, neither = {name: "own"}, {name: "launch"}, dict[str, str]()

    def found(environ: dict[str, str], launch_environ: dict[str, str] | None) -> str | None:
        plan = standin_plan(2)
        return rank_environ(
            {}, plan, 0, {}, environ=environ, launch_environ=launch_environ, conf_names=()
        ).get(name)

    is_launch = name in FROM_LAUNCH
    assert found(own, launch) == ("launch" if is_launch else "own")
    assert found(own, neither) == (None if is_launch else "own")
    assert found(neither, launch) == ("launch" if is_launch else None)
    assert found(own, None) == "own"


def test_what_chooses_a_library_is_the_launchs_and_what_python_needs_is_ours() -> None:
    assert {"LD_LIBRARY_PATH", "SGLANG_NCCL_SO_PATH"} <= FROM_LAUNCH
    assert {"HOME", "PATH", "PYTHONPATH", "VIRTUAL_ENV"} <= FROM_THIS_PROCESS
    assert not FROM_LAUNCH & FROM_THIS_PROCESS
