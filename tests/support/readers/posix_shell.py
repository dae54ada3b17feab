"""What a POSIX shell and the programs that it starts get from a file: the real /bin/sh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_PRINT_ENVIRONMENT = (
    "import os, sys; sys.stdout.buffer.write(b'\\0'.join(k + b'=' + v for k, v in"
    " os.environb.items()))"
)


def read(text: str) -> dict[str, str]:
    """Return what a program that is started after ``. FILE`` finds beside an empty environment."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "settings.sh")
        path.write_text(text)
        script = '. "$1" && exec "$2" -I -c "$3"'
        arguments = ["/bin/sh", "-euc", script, "sh", str(path), sys.executable, _PRINT_ENVIRONMENT]
        done = subprocess.run(arguments, env={}, capture_output=True, check=False)
    if done.returncode or done.stderr:
        raise ValueError(f"/bin/sh: {done.returncode}, {done.stderr.decode()}")
    pairs = (pair.partition("=") for pair in done.stdout.decode().split("\0") if pair)
    return {name: value for name, _, value in pairs if name not in ("PWD", "LC_CTYPE", "_")}
