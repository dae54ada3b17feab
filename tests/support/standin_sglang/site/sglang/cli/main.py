"""``sglang serve``: the recommended way in."""

from __future__ import annotations

import os
import sys

from sglang.version import __version__


def main() -> int:
    """Run one sub-command."""
    words = sys.argv[1:]
    if words[:1] == ["version"]:
        sys.stdout.write(f"sglang version: {__version__}\ngit revision: standin\n")
        return 0
    if words[:1] != ["serve"]:
        sys.stderr.write(
            "usage: sglang [-h] {serve,generate,version} ...\n"
            "sglang: error: argument subcommand: invalid choice\n"
        )
        return 2
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arguments import parse_arguments, without_model_type
    from sglang.srt.engine import run_server
    from sglang.srt.processes import kill_process_tree

    try:
        run_server(parse_arguments(without_model_type(words[1:]), program="sglang serve"))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0
