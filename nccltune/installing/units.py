"""systemd units as they are installed: with this host's paths, and drop-ins for other units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nccltune.errors import FileError, UsageProblem

UNIT_NAMES = ("nccltuned.service", "nccltuned.socket", "sglang@.service")
DROPIN_SOURCE = "sglang-dropin.conf"
DROPIN_NAME = "50-nccltune.conf"
SHIPPED_PROGRAM_DIR = "/usr/local/bin/"

_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]*)?\.service")
_SETTING = re.compile(r"\s*([A-Za-z]+)\s*=\s*(.*)", re.DOTALL)
_PREFIXES = re.compile(r"[@\-:+!|]*")


def render_unit(text: str, program_dir: Path) -> str:
    """Put the place of nccltune's programs into a shipped unit."""
    return text.replace(SHIPPED_PROGRAM_DIR, f"{escaped(program_dir)}/")


def escaped(path: Path) -> str:
    r"""Write a path as a unit's command wants it.

    >>> escaped(Path("/opt/100%/my venv/bin"))
    '/opt/100%%/my\\\\x20venv/bin'
    """
    return "".join(
        "%%" if char == "%" else rf"\x{ord(char):02x}" if char in " \t\"'\\" else char
        for char in str(path)
    )


def is_of_ours(text: str, shipped: str) -> bool:
    """Tell whether a unit file began as this shipped one."""
    return text.partition("\n")[0] == shipped.partition("\n")[0]


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


def dropin_text(name: str, folders: Sequence[Path], shipped: str, program_dir: Path) -> str:
    """Return the drop-in that puts ``nccltune run --`` in front of a unit's own command.

    Args:
        name: of the unit.
        folders: where units are looked for, the strongest first.
        shipped: text of the shipped drop-in.
        program_dir: where nccltune's programs are.

    Raises:
        UsageProblem: there is no such unit.
        FileError: a command that cannot be wrapped.
    """
    path, line, command = _command_of(name, folders)
    prefix = _PREFIXES.match(command)
    marks = prefix[0] if prefix else ""
    rest = command[len(marks) :].lstrip()
    if "@" in marks:
        reason = "ExecStart=@ gives the program another name, which nccltune cannot pass on"
        raise FileError(path, reason, line=line, text=command)
    if re.search(r"\bnccltune\s+(run|launch)\b", rest):
        reason = "starts under nccltune already"
        raise FileError(path, reason, line=line, text=command, code="already_wrapped")
    head = render_unit(shipped, program_dir).rpartition("ExecStart=")[0]
    return f"{head}ExecStart={marks}{escaped(program_dir)}/nccltune run -- {rest}\n"


def _command_of(name: str, folders: Sequence[Path]) -> tuple[Path, int, str]:
    """Return a unit's one effective command, with its place."""
    files = list(_files_of(name, folders))
    if not files:
        where = ", ".join(str(folder) for folder in folders[:1])
        raise UsageProblem(f"no unit {name} in {where} or below /usr/lib", code="no_such_unit")
    commands: list[tuple[Path, int, str]] = []
    for path in files:
        for line, setting, value in _settings(path):
            if setting == "ExecStart":
                commands = [*commands, (path, line, value)] if value else []
    if len(commands) != 1:
        count = len(commands) or "no"
        raise FileError(files[0], f"has {count} ExecStart lines, and one is wanted")
    return commands[0]


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


def _settings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and value of every setting; a line that ends in a backslash goes on."""
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
            yield begun, match[1], match[2]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", code="cannot_read") from None
