"""Draw docs/search.svg and docs/verify.svg: what real commands printed.

The search is made anew, on a shipped recording; the verify is one that ran on two H200 and is kept
in docs/results, judged again.

Run as ``python scripts/picture.py``.
"""

from __future__ import annotations

import gzip
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nccltune.cli.verify_answer import conclude
from nccltune.cli.verify_report import verify_parts
from nccltune.verify.record import load

ROOT = Path(__file__).resolve().parents[1]
SEARCH = ["search", "--recording", "h200-2x-shm"]
VERIFY = "verify --arms default,found-shm --any-host -- python3 -m sglang.launch_server ..."
RECORD = ROOT / "docs/results/two-h200-sglang/chain/record-20261130-031113-2646.json.gz"
WIDTH = 84
RUNS_HEADING = "Runs"
"""The table of single runs is long, and everything before it rests on it."""


def main() -> None:
    """Draw both."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "nccltune", *SEARCH],
            env={"NCCLTUNE_HOME": home, "COLUMNS": str(WIDTH), "PATH": "", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    draw("search", " ".join(SEARCH), done.stdout.replace(home, "~/.local/state/nccltune"))
    draw("verify", VERIFY, verify_text())


def verify_text() -> str:
    """Return the report of the kept record, without its single runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, RECORD.name.removeprefix("record-").removesuffix(".gz"))
        path.write_bytes(gzip.decompress(RECORD.read_bytes()))
        verified = conclude(load(path))
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None)
    for part in verify_parts(verified):
        console.print(part)
    text = out.getvalue()
    return text[: text.index(f"\n{RUNS_HEADING}")].rstrip() + "\n"


def draw(name: str, command: str, shown: str) -> None:
    """Write one picture of a terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ nccltune {command}", style="bold"))
    console.print(Text(shown), end="")
    svg = console.export_svg(title="nccltune", unique_id=f"nccltune-{name}")
    # Fonts come from the reader's own machine, not from the net.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (ROOT / "docs" / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
