"""systemd units as they are installed: with this host's paths in place of the shipped ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from nccltune.errors import UsageProblem
from nccltune.paths import HOME_VARIABLE, SYSTEM_STATE_DIR

UNIT_NAMES = ("nccltuned.service", "nccltuned.socket", "sglang@.service")
START_NAME = "nccltune-start"
"""The script in front of every server, kept apart from nccltune's own environment."""

START_PATH = Path("/usr/local/sbin") / START_NAME
SHIPPED_PROGRAM_DIR = "/usr/local/bin/"
_SHIPPED_START = f"{START_PATH} /usr/bin/python3 "
_SHIPPED_HOME = f"Environment={HOME_VARIABLE}={SYSTEM_STATE_DIR}"
_SHIPPED_STATE = "StateDirectory=nccltune"


@dataclass(frozen=True, slots=True)
class UnitPaths:
    """What units name.

    Attributes:
        program_dir: where ``nccltune`` and ``nccltuned`` are.
        state_dir: the state folder in force.
        start_path: where the script in front of servers goes.
        python: the interpreter that nccltune is installed for.
    """

    program_dir: Path
    state_dir: Path
    start_path: Path = START_PATH
    python: Path = field(default_factory=lambda: Path(sys.executable))


def render_unit(text: str, paths: UnitPaths) -> str:
    """Put this host's paths into a shipped unit or drop-in.

    Raises:
        UsageProblem: the state folder's name holds what no line of a unit can.
    """
    text = text.replace(_SHIPPED_START, f"{start_words(paths)} ")
    text = text.replace(SHIPPED_PROGRAM_DIR, f"{escaped(paths.program_dir)}/")
    folder = str(paths.state_dir)
    if not folder.isprintable():
        raise UsageProblem(
            f"{HOME_VARIABLE}={folder!r}: no unit can name this folder; choose another",
            code="bad_home",
        )
    if paths.state_dir == SYSTEM_STATE_DIR:
        return text
    settings = {
        _SHIPPED_HOME: f"Environment={_quoted(f'{HOME_VARIABLE}={folder}')}",
        # In place of the one folder below /var/lib that systemd makes, and lets the service write.
        _SHIPPED_STATE: f"ReadWritePaths={_quoted(folder)}",
    }
    lines = [settings.get(line, line) for line in text.splitlines()]
    remarked = [x.replace(str(SYSTEM_STATE_DIR), folder) if x[:1] == "#" else x for x in lines]
    return "\n".join([*remarked, ""])


def start_words(paths: UnitPaths, *, is_expanded: bool = True) -> str:
    """Return the script and its first argument, as the command of a unit begins.

    Args:
        paths: where they are.
        is_expanded: whether systemd puts variables into this command, which ``:`` keeps it from.
    """
    python = escaped(paths.python)
    return f"{escaped(paths.start_path)} {python.replace('$', '$$') if is_expanded else python}"


def escaped(path: Path) -> str:
    r"""Write a path as a unit's command wants it.

    >>> escaped(Path("/opt/100%/my venv/bin"))
    '/opt/100%%/my\\x20venv/bin'
    """
    return "".join(
        "%%" if char == "%" else rf"\x{ord(char):02x}" if char in " \t\n\"'\\" else char
        for char in str(path)
    )


def _quoted(text: str) -> str:
    r"""Write one word of a setting, in the way that all settings of words read.

    >>> _quoted("A=/srv/my 100%"), _quoted("/srv/a")
    ('"A=/srv/my 100%%"', '/srv/a')
    """
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if set(text) & set(" \\\"'") else text


def is_of_ours(text: str, shipped: str) -> bool:
    """Tell whether a file began as this shipped one, by its first comment."""
    return _first_comment(text) == _first_comment(shipped)


def _first_comment(text: str) -> str:
    first, _, rest = text.partition("\n")
    return rest.partition("\n")[0] if first.startswith("#!") else first
