"""``python -m sglang.launch_server``: the old way in."""

from __future__ import annotations

import os
import sys
import warnings

from sglang.srt.arguments import parse_arguments
from sglang.srt.engine import run_server
from sglang.srt.plugins import load_plugins
from sglang.srt.processes import kill_process_tree

if __name__ == "__main__":
    warnings.warn(
        "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the "
        "recommended entrypoint.\n  Example: sglang serve --model-path <model> [options]",
        UserWarning,
        stacklevel=1,
    )
    load_plugins()
    server_args = parse_arguments(sys.argv[1:], program="launch_server.py")
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
