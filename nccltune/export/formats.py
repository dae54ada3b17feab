"""How each reader wants a setting spelled, so that it gets back exactly the value meant.

Readers differ where it hurts: quotes are a part of the value for Docker and for NCCL, and are taken
off by systemd and a shell; a ``$`` starts a substitution for some and is a character for others.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_BARE_FOR_SYSTEMD = re.compile(r"[A-Za-z0-9_.,:/+@^=-]+")
_ESCAPED_BY_SYSTEMD = re.compile(r'(["\\`$])')


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One kind of file.

    Attributes:
        reader: who reads it, for people.
        usage: how it is put to use; shown in its head.
        write: spells one setting, over one line or several.
        opening: what stands before the settings.
        empty: what stands for no settings at all.
        is_environment: whether the settings end up in the environment of the process, where they
            can be seen; NCCL keeps those of its own files to itself.
    """

    name: str
    reader: str
    usage: str
    write: Callable[[str, str], str]
    opening: str = ""
    empty: str = ""
    is_environment: bool = True


def format_lines(settings: Mapping[str, str], export: ExportFormat) -> Iterator[str]:
    """Yield the lines that carry the settings, in alphabetical order."""
    if not settings:
        yield from filter(None, [export.empty])
        return
    yield from filter(None, [export.opening])
    for name, value in sorted(settings.items()):
        yield from export.write(name, value).split("\n")


def _plain(name: str, value: str) -> str:
    """Docker and NCCL take everything after the first ``=`` as it stands."""
    return f"{name}={value}"


def _shell(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"


def _systemd(name: str, value: str) -> str:
    if _BARE_FOR_SYSTEMD.fullmatch(value):
        return f"{name}={value}"
    escaped = _ESCAPED_BY_SYSTEMD.sub(r"\\\1", value)
    return f'{name}="{escaped}"'


def _kubernetes(name: str, value: str) -> str:
    # Kubernetes replaces $(NAME) in values, and takes $$ for a $ that is meant as one.
    return f"  - name: {name}\n    value: {json.dumps(value.replace('$', '$$'))}"


_FORMATS = (
    ExportFormat(
        "env",
        "whatever reads lines of NAME=VALUE",
        "give FILE to a reader that takes blanks and ; in a value as they stand",
        _plain,
    ),
    ExportFormat(
        "docker", "docker and podman --env-file", "docker run --env-file FILE ... IMAGE", _plain
    ),
    ExportFormat(
        "k8s",
        "Kubernetes",
        "put the list below into the container's entry in the pod's spec",
        _kubernetes,
        opening="env:",
        empty="env: []",
    ),
    ExportFormat("shell", "a POSIX shell", ". FILE, before the server is started", _shell),
    ExportFormat(
        "systemd",
        "systemd",
        "EnvironmentFile=/absolute/path/of/FILE in the [Service] section of the unit",
        _systemd,
    ),
    ExportFormat(
        "nccl-conf",
        "NCCL 2.23.4 and later",
        "NCCL_CONF_FILE=/absolute/path/of/FILE in the server's environment; it replaces "
        "~/.nccl.conf, and every variable of the environment is stronger",
        _plain,
        is_environment=False,
    ),
)

EXPORTS: Mapping[str, ExportFormat] = MappingProxyType({each.name: each for each in _FORMATS})
"""Formats by the name that the command line gives them."""
