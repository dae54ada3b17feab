"""Files as one process sees them: this one, or another whose files are looked at on its behalf.

What finds interpreters, packages and configuration files asks through this, so that the same code
serves a launch, which may do all that its user may, and a look at somebody else's server.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Protocol

from nccltune.regular_files import open_regular, read_regular


class SeenFiles(Protocol):
    """What is asked of them; nothing here raises but ``open`` and ``read``."""

    @property
    def may_run(self) -> bool:
        """Whether programs and libraries that are found may be run to ask them."""

    @property
    def name(self) -> Hashable:
        """Equal for processes that see the same."""

    def stat(self, path: Path) -> os.stat_result | None:
        """Return what a path leads to; None where nothing can be seen there."""

    def may_execute(self, path: Path) -> bool:
        """Tell whether a path leads to a program."""

    def names(self, folder: Path) -> list[str]:
        """Return what lies in a folder, in order; nothing where it cannot be listed."""

    def resolve(self, path: Path) -> Path:
        """Return a path without links, as far as it can be followed."""

    def open(self, path: Path) -> int:
        """Open a regular file for reading; the caller closes the descriptor.

        Raises:
            OSError: it cannot be read, or is no regular file.
        """

    def read(self, path: Path, limit_bytes: int) -> bytes:
        """Return the content of a regular file.

        Raises:
            OSError: it cannot be read, is no regular file, or is larger than the limit.
        """


class OwnFiles:
    """The files of this process, with all rights that it has."""

    may_run = True
    name = "own"

    def stat(self, path: Path) -> os.stat_result | None:
        """As said above."""
        try:
            return path.stat()
        except (OSError, ValueError):
            return None

    def may_execute(self, path: Path) -> bool:
        """As said above."""
        return is_file(self, path) and os.access(path, os.X_OK)

    def names(self, folder: Path) -> list[str]:
        """As said above."""
        try:
            return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is needed
        except (OSError, ValueError):
            return []

    def resolve(self, path: Path) -> Path:
        """As said above."""
        return path.resolve()

    def open(self, path: Path) -> int:
        """As said above."""
        return open_regular(path)

    def read(self, path: Path, limit_bytes: int) -> bytes:
        """As said above."""
        return read_regular(path, limit_bytes)


OWN = OwnFiles()


def is_file(files: SeenFiles, path: Path) -> bool:
    """Tell whether a file is there."""
    found = files.stat(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_dir(files: SeenFiles, path: Path) -> bool:
    """Tell whether a folder is there."""
    found = files.stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)
