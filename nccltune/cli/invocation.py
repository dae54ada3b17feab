"""What was typed, before and after it is parsed."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS_WITH_VERBS = ("profile", "recording")
END_OF_OPTIONS = "--"


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of the program.

    Attributes:
        command: the verb, as the envelope names it; what was typed in its place when there is none.
        wants_json: looked for before parsing, so that early failures speak JSON too.
        has_stray_launch: a server's launch command seems to stand before ``--``.
    """

    arguments: tuple[str, ...]
    command: str
    wants_json: bool
    has_stray_launch: bool

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Invocation:
        """Read what can be told without parsing."""
        own, _ = _split(arguments)
        words = [word for word in own if not word.startswith("-")][:2]
        command = " ".join(words if words and words[0] in VERBS_WITH_VERBS else words[:1])
        return cls(
            arguments=tuple(arguments),
            command=command,
            wants_json="--json" in own,
            has_stray_launch=any("sglang" in word for word in own),
        )

    def without(self, flag: str) -> Invocation:
        """Return the same call without one of its own flags."""
        own, launch = _split(self.arguments)
        return replace(self, arguments=(*(word for word in own if word != flag), *launch))

    def format_again(self, *flags: str, **values: object) -> str:
        """Write the same call with further flags and other values, to be copied into a shell.

        Secrets of the launch command are left for the reader to put back.
        """
        # Most commands have nothing to repeat, and do without this.
        from nccltune.live.server_facts import redacted

        own, launch = _split(self.arguments)
        for name, value in values.items():
            own = [*_without(own, f"--{name}"), f"--{name}", str(value)]
        added = [flag for flag in flags if flag not in own]
        return " ".join(_quote(word) for word in ("nccltune", *own, *added, *redacted(launch)))


def _quote(word: str) -> str:
    """Quote a word for a shell, one of bytes that are no text too."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (
        chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(word)
    )
    return f"$'{''.join(shown)}'"


def _without(words: list[str], option: str) -> list[str]:
    """Leave out an option that takes one value, in both of its spellings."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if not is_value and word != option and not word.startswith(f"{option}="):
            kept.append(word)
        is_value = word == option and not is_value
    return kept


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the program's own arguments from the launch command, whose ``--`` goes with it."""
    own = list(arguments)
    end = own.index(END_OF_OPTIONS) if END_OF_OPTIONS in own else len(own)
    return own[:end], own[end:]
