"""What was typed, before and after it is parsed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
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

    def format_again(self, *flags: str, **values: object) -> str:
        """Write the same call with further flags and other values, to be copied into a shell."""
        own, launch = _split(self.arguments)
        for name, value in values.items():
            own = [*_without(own, f"--{name}"), f"--{name}", str(value)]
        added = [flag for flag in flags if flag not in own]
        return shlex.join(["nccltune", *own, *added, *launch])


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
