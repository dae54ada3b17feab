"""Which Python interpreter runs the server of a launch command: its libraries are what counts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nccltune.host.server_python import find_python
from nccltune.sglang.argv import split_launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ELSEWHERE = frozenset(
    {
        "apptainer", "chroot", "crictl", "docker", "kubectl", "nerdctl", "nsenter", "podman",
        "singularity", "srun", "ssh",
    }
)  # fmt: skip
_CHOOSERS = frozenset(
    {"conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "poetry", "rye", "uv"}
)
_GIVE_PYTHON = "name the server's interpreter with --python PATH"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What was found.

    Attributes:
        path: None where it is not known.
        problem: why not, in words; empty where there is a path.
        fix: what to do about that.
    """

    path: Path | None
    problem: str = ""
    fix: str = ""


def find_interpreter(argv: Sequence[str], environ: Mapping[str, str]) -> Interpreter:
    """Find the interpreter of a launch.

    Raises:
        UsageProblem: not an SGLang launch.
    """
    start, _ = split_launch(tuple(argv))
    wrapper = [PurePath(token).name for token in argv[:start]]
    if away := next((name for name in wrapper if name in _ELSEWHERE), None):
        problem = f"{away} starts the server somewhere else, with an interpreter of that place"
        return Interpreter(None, problem, "run nccltune doctor there")
    if chooser := next((name for name in wrapper if name in _CHOOSERS), None):
        return Interpreter(None, f"{chooser} chooses the server's interpreter", _GIVE_PYTHON)
    found = find_python(argv, environ)
    if found is None:
        problem = "the launch command leads to no Python interpreter on this host"
        return Interpreter(None, problem, _GIVE_PYTHON)
    # Not resolved: an interpreter knows its environment by the link that it is called through.
    return Interpreter(Path(found).absolute())


def own_interpreter() -> Interpreter:
    """Return this interpreter if it could run a server: often both are installed together."""
    # Loaded here: it is slow, and not needed where an interpreter is named.
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("sglang")
    except PackageNotFoundError:
        problem = "no interpreter of a server is named, and this one has no SGLang"
        fix = "name it with --python PATH, or give the launch command after --"
        return Interpreter(None, problem, fix)
    return Interpreter(Path(sys.executable))
