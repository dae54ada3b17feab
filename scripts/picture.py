"""Draw docs/search.svg: the report of a real search of a shipped recording.

Run as ``python scripts/picture.py``.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ["search", "--recording", "h200-2x-shm"]
WIDTH = 84


def main() -> None:
    """Run the search and export what it prints."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "nccltune", *COMMAND],
            env={"NCCLTUNE_HOME": home, "COLUMNS": str(WIDTH), "PATH": "", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    shown = done.stdout.replace(home, "~/.local/state/nccltune")
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ nccltune {' '.join(COMMAND)}", style="bold"))
    console.print(Text(shown), end="")
    svg = console.export_svg(title="nccltune", unique_id="nccltune")
    # Fonts come from the reader's own machine, not from the net.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (ROOT / "docs" / "search.svg").write_text(svg)


if __name__ == "__main__":
    main()
