"""What the words in front of SGLang do to the environment that a launch is given. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from nccltune.sglang.argv import env_effects, split_launch

_OWN_ENVIRONMENT = frozenset({"sudo", "su", "doas", "runuser", "ssh", "srun", "docker", "podman"})


@dataclass(frozen=True, slots=True)
class Way:
    """What becomes of an environment between us and SGLang.

    Attributes:
        emptied_by: the word of ``env`` that keeps all of it out; empty where none does.
        unset: variables that ``env`` takes out.
        strangers: programs that may start the server in an environment of their own.
    """

    emptied_by: str
    unset: frozenset[str]
    strangers: tuple[str, ...]

    @classmethod
    def of(cls, argv: Sequence[str]) -> Way:
        """Read the words in front of an SGLang launch, as typed."""
        start, _tokens = split_launch(tuple(argv))
        effects = env_effects(argv[:start])
        names = (PurePath(word).name for word in argv[:start])
        strangers = tuple(dict.fromkeys(name for name in names if name in _OWN_ENVIRONMENT))
        return cls(effects.emptied_by, effects.unset, strangers)

    def arriving(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what is left of an environment when SGLang gets it."""
        if self.emptied_by:
            return {}
        return {name: value for name, value in environ.items() if name not in self.unset}

    def losses(self, names: Collection[str]) -> tuple[str, ...]:
        """Say what keeps variables of ours from SGLang, one line each; nothing where none is lost.

        Args:
            names: variables that it would be given.
        """
        if not names:
            return ()
        if self.emptied_by:
            return (
                f"env {self.emptied_by} in the command keeps the whole profile from the server",
            )
        lost = sorted(self.unset & set(names))
        return tuple(f"env -u {name} in the command takes it out again" for name in lost)

    def doubts(self) -> tuple[str, ...]:
        """Say what may keep variables from SGLang, one line each."""
        return tuple(
            f"{name} may start the server in an environment of its own; see nccltune status"
            for name in self.strangers
        )
