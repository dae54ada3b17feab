"""What the catalogue knows about one NCCL variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

Check = Callable[[str], str | None]
"""Takes a value; returns why it is refused (what NCCL would do, and what to write), or None."""


class Kind(StrEnum):
    """What this tool may do with a variable."""

    SEARCHED = "searched"
    """The search proposes values for it; a profile may hold it."""
    INJECTABLE = "injectable"
    """A person may put it into a profile; the search never proposes it."""
    FORBIDDEN = "forbidden"
    """Never set by this tool, whatever a profile says."""


class ReadAt(StrEnum):
    """When NCCL looks at a variable, and with it what a changed value needs to be seen."""

    COMM_INIT = "every communicator init"
    CACHED = "first use, then kept for the life of the loaded library"
    STATIC = "first use, then kept for the life of the loaded library, even with NCCL_NO_CACHE"
    LOAD = "when the library or a plugin is loaded"
    NEVER = "never"
    UNKNOWN = "not looked up"


@dataclass(frozen=True, slots=True)
class Variable:
    """One NCCL variable. Facts were read at NCCL 2.28.9 unless a version is named.

    Attributes:
        summary: its effect on small all-reduces, in one sentence.
        reason: why it is of this kind.
        domain: the accepted values in words.
        default: what NCCL does when it is not set.
        unit: of the value, empty for names and switches.
        since: first version that has it; empty where not looked up.
        until: first version that no longer has it; empty while it exists.
        sglang: what SGLang writes to it by itself; empty for never.
        pinned: why a search leaves it as the launch has it, even where it could vary it.
        choices: what the search may propose, beside leaving it unset; None if not searched.
        check: refuses what NCCL would silently change or misread; None if never set.
    """

    name: str
    kind: Kind
    summary: str
    reason: str
    domain: str = ""
    default: str = ""
    unit: str = ""
    read_at: ReadAt = ReadAt.UNKNOWN
    since: str = ""
    until: str = ""
    sglang: str = ""
    pinned: str = ""
    choices: tuple[str, ...] | None = None
    check: Check | None = None

    def exists_in(self, version: str) -> bool:
        """Tell whether this NCCL version reads the variable, as far as it was looked up.

        >>> Variable("X", Kind.FORBIDDEN, "", "", since="2.29.2").exists_in("2.28.9")
        False
        """
        wanted = _numbers(version)
        if self.since and wanted < _numbers(self.since):
            return False
        return not (self.until and wanted >= _numbers(self.until))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")[0].split("."))
