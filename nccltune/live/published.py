"""Where ``nccltuned`` publishes what it knows, and how to read it: a cache that may be missing.

Schema history of ``nccltune.active`` (``active.json``):
    1: first version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nccltune.live.procfs import PROC_ROOT, read_process
from nccltune.regular_files import read_regular

SCHEMA = "nccltune.active/1"
ENV_NAME = "active.env"
JSON_NAME = "active.json"
METRICS_NAME = "metrics.sock"
RUN_DIR_VARIABLE = "NCCLTUNE_RUN_DIR"
SYSTEM_RUN_DIR = Path("/run/nccltune")
_MAX_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Published:
    """What a running service has published.

    Attributes:
        data: the whole document.
    """

    pid: int
    path: Path
    data: Mapping[str, Any] = field(default_factory=dict)


def run_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder to publish in: ``$NCCLTUNE_RUN_DIR``, systemd's, root's or this user's."""
    variables = os.environ if environ is None else environ
    for name in (RUN_DIR_VARIABLE, "RUNTIME_DIRECTORY"):
        given = variables.get(name, "").split(":")[0]
        if given.startswith("/"):
            return Path(given)
    return SYSTEM_RUN_DIR if os.geteuid() == 0 else _own_run_dir(variables)


def _own_run_dir(variables: Mapping[str, str]) -> Path:
    own = variables.get("XDG_RUNTIME_DIR", "")
    # No folder of this user's own in the place where everybody may write: it could be anybody's.
    return Path(own if own.startswith("/") else f"/run/user/{os.geteuid()}") / "nccltune"


def read_published(
    environ: Mapping[str, str] | None = None, root: Path = PROC_ROOT
) -> Published | None:
    """Read what a service that still runs has published; None where none runs, or none tells."""
    variables = os.environ if environ is None else environ
    for folder in _candidates(variables):
        path = folder / JSON_NAME
        try:
            data = json.loads(read_regular(path, _MAX_BYTES))
            own = data["nccltuned"]
            process = read_process(own["pid"], root)
            is_known = data["schema"] == SCHEMA
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if is_known and process is not None and process.started_ticks == own["started_ticks"]:
            return Published(process.pid, path, data)
    return None


def _candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield where a service may publish: this user's choice, else the system's and this user's."""
    if variables.get(RUN_DIR_VARIABLE, "").startswith("/"):
        yield Path(variables[RUN_DIR_VARIABLE])
        return
    yield SYSTEM_RUN_DIR
    if os.geteuid() != 0:
        yield _own_run_dir(variables)
