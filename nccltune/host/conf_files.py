"""NCCL's own configuration files, read exactly as NCCL reads them.

Grammar and order of precedence are those of NCCL's ``src/misc/param.cc`` (read at v2.28.9).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from nccltune.seen_files import OWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nccltune.seen_files import SeenFiles

ETC_CONF_PATH = Path("/etc/nccl.conf")
CONF_FILE_VARIABLE = "NCCL_CONF_FILE"
HOME_CONF_NAME = ".nccl.conf"

VALUE_LIMIT_BYTES = 1023
"""NCCL copies names and values into 1024-byte buffers and cuts the rest off without a word."""

_LIMIT_BYTES = 16 << 20

NEUTRAL_VALUES: Mapping[str, str] = MappingProxyType(
    {
        # A file that cannot be opened fails init, as an empty name does; this one has no graphs.
        "NCCL_GRAPH_FILE": "/dev/null",
        # Where NCCL looks by itself; an empty name would switch that look-up off.
        "NCCL_TOPO_FILE": "/var/run/nvidia-topologyd/virtualTopology.xml",
        # An empty name matches no network and init fails; inside one host no network is used.
        "NCCL_NET": "Socket",
        # An empty list silences the log altogether.
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV",
        # An empty name matches no kernel; this one stands for all.
        "NCCL_SYM_KERNEL": "^",
    }
)
"""What stands for unset in variables that NCCL does not ignore when they are empty (v2.28.9)."""


@dataclass(frozen=True, slots=True)
class ConfFile:
    """One configuration file that NCCL opens.

    Attributes:
        settings: what NCCL puts into its environment from this file, unless the name is set
            already. Names and values are NCCL's reading of them, blanks, quotes and comments
            included.
        problems: for people, what NCCL reads differently from what was probably meant.
    """

    path: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_conf_files(
    environ: Mapping[str, str],
    home: Path | None,
    etc_path: Path = ETC_CONF_PATH,
    files: SeenFiles = OWN,
    limit_bytes: int = _LIMIT_BYTES,
) -> list[ConfFile]:
    """Read the files that NCCL opens in a process with this environment, the strongest first.

    The environment itself is stronger than all of them. ``NCCL_CONF_FILE`` replaces the file in the
    home folder, and ``/etc/nccl.conf`` is always read.

    Args:
        environ: of the process that loads NCCL.
        home: its home folder: that of the user database up to NCCL 2.29, ``$HOME`` from 2.30.3;
            None where it has none.
        etc_path: of the host's own file.
        files: as the process sees them.
        limit_bytes: of a file; one that is larger is not read.

    Returns:
        Files that exist. A file that ``NCCL_CONF_FILE`` names is there even when it does not, with
        that as its problem.
    """
    named = environ.get(CONF_FILE_VARIABLE)
    if named:
        first: ConfFile | None = _read_named(Path(named), files, limit_bytes)
    else:
        first = None if home is None else _read(home / HOME_CONF_NAME, files, limit_bytes)
    return [file for file in (first, _read(etc_path, files, limit_bytes)) if file is not None]


def effective_settings(
    files: Iterable[ConfFile], environ: Mapping[str, str]
) -> dict[str, tuple[str, Path]]:
    """Return what the files really set: value and file by name."""
    effective: dict[str, tuple[str, Path]] = {}
    for file in files:
        for name, value in file.settings.items():
            if name not in environ:
                effective.setdefault(name, (value, file.path))
    return effective


def neutral_settings(names: Iterable[str]) -> dict[str, str]:
    """Return settings that keep a file from setting these names, and mean the same to NCCL as none.

    NCCL never overwrites a variable that exists, and takes nearly every empty one for unset.
    """
    return {name: NEUTRAL_VALUES.get(name, "") for name in names}


def parse_conf(content: bytes) -> tuple[dict[str, str], tuple[str, ...]]:
    """Read one file's content as NCCL does.

    Returns:
        Settings, the first of a name only, and problems with their line numbers.
    """
    settings: dict[str, str] = {}
    problems: list[str] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.startswith(b"#"):
            continue
        text = line.split(b"\0", maxsplit=1)[0]
        name_bytes, separator, value_bytes = text.partition(b"=")
        if not separator or not name_bytes:
            if text.strip():
                problems.append(f"line {number}: no NAME=VALUE, ignored by NCCL: {_shown(text)}")
            continue
        name = os.fsdecode(name_bytes[:VALUE_LIMIT_BYTES])
        value = os.fsdecode(value_bytes[:VALUE_LIMIT_BYTES])
        doubts = [*_name_doubts(name), *_value_doubts(value)]
        if max(len(name_bytes), len(value_bytes)) > VALUE_LIMIT_BYTES:
            doubts.append(f"NCCL cuts it to {VALUE_LIMIT_BYTES} bytes")
        if name in settings:
            doubts.append("ignored, an earlier line sets it")
        problems += [f"line {number}: {doubt}: {_shown(text)}" for doubt in doubts]
        settings.setdefault(name, value)
    return settings, tuple(problems)


def _name_doubts(name: str) -> list[str]:
    if name.split(maxsplit=1)[:1] == ["export"] and name != "export":
        return ["'export' becomes part of the name"]
    if name != name.strip():
        return ["blanks around the name become part of it"]
    if not name.startswith("NCCL_"):
        return ["not an NCCL variable, yet set for the whole process"]
    return []


def _value_doubts(value: str) -> list[str]:
    doubts = []
    if value.endswith("\r"):
        doubts.append("the carriage return becomes part of the value (until NCCL 2.30)")
    value = value.removesuffix("\r")
    if "#" in value:
        doubts.append("the comment becomes part of the value")
    elif value != value.strip():
        doubts.append("blanks around the value become part of it")
    if value.strip()[:1] in ("'", '"'):
        doubts.append("the quotes become part of the value")
    return doubts


def _shown(text: bytes) -> str:
    return repr(os.fsdecode(text)[:120])


def _read_named(path: Path, files: SeenFiles, limit_bytes: int) -> ConfFile:
    if str(path).startswith("~"):
        return ConfFile(path, problems=(f"{CONF_FILE_VARIABLE}: NCCL does not expand '~'",))
    read = _read(path, files, limit_bytes)
    if read is None:
        problem = f"{CONF_FILE_VARIABLE} names a file that does not exist; NCCL says nothing"
        return ConfFile(path, problems=(problem,))
    return read


def _read(path: Path, files: SeenFiles, limit_bytes: int) -> ConfFile | None:
    try:
        content = files.read(path, limit_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return ConfFile(path, problems=(f"cannot be read ({error.strerror}); NCCL says nothing",))
    settings, problems = parse_conf(content)
    return ConfFile(path, MappingProxyType(settings), problems)
