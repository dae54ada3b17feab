"""Puts the active NCCL profile of a host into an SGLang launch that was typed by hand.

SGLang loads it before it resolves arguments, and again in every process that it spawns, where there
is nothing left to decide. Only the standard library is used, and no fault in here reaches SGLang.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import parent_process

__all__ = ["load"]

__version__ = "0.1.0"

OFF_VARIABLE = "NCCLTUNE_HOOK"


def load() -> None:
    """Set what the active profile says, in the launching process only."""
    try:
        if parent_process() is not None or os.environ.get(OFF_VARIABLE) == "0":
            return
        # Loaded here, for the processes that SGLang spawns need none of it.
        from nccltune_hook.launching import tune

        tune(sys.argv, os.environ)
    except Exception as error:  # noqa: BLE001 - the server starts, whatever is wrong with us
        say(f"warning: the hook failed ({type(error).__name__}: {error}); no profile is applied")


def say(text: str) -> None:
    """Write one line to stderr, whole; nobody may be there to read it."""
    line = "".join(char if char.isprintable() else " " for char in text)
    try:
        os.write(2, f"nccltune: {line}\n".encode(errors="replace"))
    except OSError:
        return
