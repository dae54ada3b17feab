"""Units of the operator, and the drop-in that puts nccltune in front of their command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nccltune.errors import FileError, UsageProblem
from nccltune.installing.units import (
    START_NAME,
    UNIT_NAMES,
    UnitPaths,
    render_unit,
    start_words,
)

DROPIN_SOURCE = "sglang-dropin.conf"
DROPIN_NAME = "50-nccltune.conf"

_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]*)?\.service")
_SETTING = re.compile(r"\s*([A-Za-z]+)\s*=\s*(.*)", re.DOTALL)
_PREFIXES = re.compile(r"[@\-:+!|]*")
_OURS = re.compile(rf"\bnccltune\s+(run|launch)\b|\b{START_NAME}\s")
_OWN_FILES = ("RootDirectory", "RootImage", "NoExecPaths")
"""Settings under which nccltune may not be there or not be run, which no script can mend."""

_YES = ("1", "yes", "y", "true", "t", "on")


class _Setting(NamedTuple):
    """One line of a unit's section ``[Service]``."""

    path: Path
    line: int
    name: str
    value: str

    def problem(self, reason: str, **details: str) -> FileError:
        return FileError(
            self.path, f"{self.name}= {reason}", line=self.line, text=self.value, **details
        )


@dataclass(frozen=True, slots=True)
class WrappedUnit:
    """A unit of the operator.

    Attributes:
        name: with ``.service``.
        prefix: what stands before its program, such as ``-``.
        command: the rest of its one effective ``ExecStart=``.
        user: whom the command runs as; empty for root.
    """

    name: str
    prefix: str
    command: str
    user: str


def read_unit(given: str, folders: Sequence[Path]) -> WrappedUnit:
    """Read a unit with its drop-ins, ours left out.

    Args:
        given: its name, ``.service`` added where it is missing.
        folders: where units are looked for, the strongest first.

    Raises:
        UsageProblem: there is no such unit, or it is one of nccltune's.
        FileError: its command cannot be wrapped.
    """
    name = unit_name(given)
    files = list(_files_of(name, folders))
    if not files:
        where = ", ".join(str(folder) for folder in folders[:1])
        raise UsageProblem(f"no unit {name} in {where} or below /usr/lib", code="no_such_unit")
    commands: list[_Setting] = []
    others: dict[str, _Setting] = {}
    for setting in (each for path in files for each in _settings(path)):
        if setting.name == "ExecStart":
            commands = [*commands, setting] if setting.value else []
        else:
            others[setting.name] = setting
    if len(commands) != 1:
        count = len(commands) or "no"
        raise FileError(files[0], f"has {count} ExecStart lines, and one is wanted")
    for confining in filter(None, map(others.get, _OWN_FILES)):
        if confining.value:
            raise confining.problem("may keep nccltune's files from this server, which then fails")
    prefix, command = _split(commands[0])
    return WrappedUnit(name, prefix, command, _user(prefix, others))


def unit_name(given: str) -> str:
    """Return the name of a service unit, ``.service`` added where it is missing.

    Raises:
        UsageProblem: no name of a service.
    """
    name = given if given.endswith(".service") else f"{given}.service"
    if not _UNIT_NAME.fullmatch(name) or name in UNIT_NAMES or name.startswith("sglang@"):
        raise UsageProblem(
            f"--unit {given}: name a service of yours, such as kimi.service; the units of nccltune "
            "have the profile already",
            code="bad_unit",
        )
    return name


def dropin_text(unit: WrappedUnit, shipped: str, paths: UnitPaths) -> str:
    """Return the drop-in that puts nccltune in front of a unit's own command.

    Args:
        unit: of the operator.
        shipped: text of the shipped drop-in.
        paths: where nccltune is.
    """
    head = render_unit(shipped, paths).rpartition("ExecStart=")[0]
    start = start_words(paths, is_expanded=":" not in unit.prefix)
    return f"{head}ExecStart={unit.prefix}{start} run -- {unit.command}\n"


def _split(setting: _Setting) -> tuple[str, str]:
    """Part a command from the marks before it."""
    prefix = _PREFIXES.match(setting.value)
    marks = prefix[0] if prefix else ""
    rest = setting.value[len(marks) :].lstrip()
    if "@" in marks:
        raise setting.problem("@ gives the program another name, which nccltune cannot pass on")
    if _OURS.search(rest):
        raise setting.problem("starts under nccltune already", code="already_wrapped")
    return marks, rest


def _user(prefix: str, settings: Mapping[str, _Setting]) -> str:
    """Return whom a command runs as; for a user that systemd makes up, one with as few rights."""
    values = {name: each.value for name, each in settings.items()}
    if set(prefix) & set("+!"):  # these leave User= aside
        return ""
    if values.get("DynamicUser", "").lower() in _YES:
        return "nobody"
    return values.get("User", "")


def _files_of(name: str, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield a unit's file and its drop-ins, in the order in which they count, ours left out."""
    template = re.sub(r"@.*(?=\.service$)", "@", name)
    names = tuple(dict.fromkeys((name, template)))
    found = [folder / each for each in names for folder in folders if (folder / each).is_file()]
    if not found:
        return
    yield found[0]
    dropins: dict[str, Path] = {}
    for each in reversed(names):
        for folder in reversed(folders):
            for path in (folder / f"{each}.d").glob("*.conf"):
                dropins[path.name] = path
    yield from (dropins[key] for key in sorted(dropins) if key != DROPIN_NAME)


def _settings(path: Path) -> Iterator[_Setting]:
    """Yield every setting of a service; a line that ends in a backslash goes on."""
    section, pending, begun = "", "", 0
    for number, line in enumerate(_lines(path), start=1):
        if line.lstrip()[:1] in ("#", ";"):
            continue
        if not pending:
            begun = number
        if line.endswith("\\"):
            pending += f"{line[:-1]} "
            continue
        whole, pending = (pending + line).strip(), ""
        if whole.startswith("["):
            section = whole
        elif section == "[Service]" and (match := _SETTING.fullmatch(whole)):
            yield _Setting(path, begun, match[1], match[2])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", code="cannot_read") from None
