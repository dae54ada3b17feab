"""The release that the stand-in passes for."""

from __future__ import annotations

import os

__version__ = os.environ.get("STANDIN_SGLANG_VERSION") or "0.5.15.post1"


def is_at_least(*release: int) -> bool:
    """Tell whether the release passed for has what came with another."""
    own = __version__.split(".post", maxsplit=1)[0]
    return tuple(int(part) for part in own.split(".")[:3]) >= release
