"""The program's start: ``run`` goes a short way of its own, every other verb the usual one."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line that this process was given, and return its exit status."""
    words = sys.argv[1:]
    if words[:1] == ["run"]:
        # A launch waits for this, so it loads neither click nor the other verbs.
        from nccltune.inject import running

        return running.main(words[1:])
    from nccltune.children import learn_ends
    from nccltune.cli import main as run_cli

    learn_ends()
    return run_cli()
