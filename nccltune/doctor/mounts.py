"""Where a folder really lies: the mount that holds it, and whether that outlives a container."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_OVERLAYS = frozenset({"aufs", "fuse-overlayfs", "fuse.fuse-overlayfs", "overlay", "overlayfs"})
_IN_MEMORY = frozenset({"ramfs", "rootfs", "tmpfs"})
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``/proc/self/mountinfo``.

    Attributes:
        source_path: the part of the file system that is mounted, ``/`` for all of it.
        options: of the mount itself, ``ro`` among them where it is read-only.
    """

    path: Path
    type: str
    source: str
    source_path: str
    options: tuple[str, ...]

    @property
    def is_overlay(self) -> bool:
        """Whether changes lie in a layer above something else, as those of containers do."""
        return self.type in _OVERLAYS

    @property
    def is_in_memory(self) -> bool:
        """Whether everything is gone when the power is."""
        return self.type in _IN_MEMORY


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Read mountinfo, in the order in which things were mounted; odd lines are left out."""
    mounts = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if not dash or len(before) < 6 or len(after) < 2:
            continue
        mounts.append(
            Mount(
                path=Path(_unescape(before[4])),
                type=after[0],
                source=_unescape(after[1]),
                source_path=_unescape(before[3]),
                options=tuple(before[5].split(",")),
            )
        )
    return tuple(mounts)


def mount_of(path: Path, mounts: tuple[Mount, ...]) -> Mount | None:
    """Return the mount that a path lies on: the deepest, and of those the last one mounted.

    Args:
        path: absolute, links resolved; it need not exist.
        mounts: as ``parse_mountinfo`` returns them.
    """
    holding = [mount for mount in mounts if path.is_relative_to(mount.path)]
    deepest = max((len(mount.path.parts) for mount in holding), default=0)
    return next((m for m in reversed(holding) if len(m.path.parts) == deepest), None)


def _unescape(text: str) -> str:
    r"""Read the octal codes that stand for blanks and backslashes.

    >>> _unescape(r"/a\040b")
    '/a b'
    """
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
