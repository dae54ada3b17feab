"""Publishes what others may read of the active profile: a cache, never a source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nccltune import __version__
from nccltune.atomic import make_dir, write_atomic
from nccltune.inject.marker import KEEP_ENVIRON, KEEP_ENVIRON_VALUE, MARKER, format_marker
from nccltune.live.published import ENV_NAME, JSON_NAME, SCHEMA

_HEAD = """\
# Settings of the active NCCL profile, published by nccltuned. A cache that may be old or missing:
# it is unconditional, while 'nccltune run' looks at the launch and the host first. Do not edit.
"""


def format_env(active: Mapping[str, Any]) -> str:
    """Return the settings as systemd and docker read them, or in a comment why there are none.

    Args:
        active: as ``stock.profile_data`` lays it out.
    """
    settings: Mapping[str, str] = active["settings"]
    if active["name"] is None and not active["problem"]:
        return f"{_HEAD}# No profile is active.\n"
    if active["is_degraded"] or active["digest"] is None:
        reason = active["problem"] or active["unknown"] or "it was found on another kind of host"
        name = active["name"]
        what = f"Profile {name} is active and not used" if name else "No profile can be used"
        return f"{_HEAD}# {what}: {_one_line(reason)}\n"
    own = {
        MARKER: format_marker(active["digest"], settings),
        KEEP_ENVIRON: KEEP_ENVIRON_VALUE,
    }
    lines = [f"{name}={value}\n" for name, value in sorted({**settings, **own}.items())]
    return f"{_HEAD}# Profile {active['name']}\n{''.join(lines)}"


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


class Publisher:
    """Writes both files, and only when there is something new to say."""

    def __init__(self, folder: Path, identity: Mapping[str, object]) -> None:
        self.folder = folder
        self._identity = identity
        self._last: tuple[str, str] | None = None

    def forget(self) -> None:
        """Write everything the next time, whatever lies there."""
        self._last = None

    def publish(self, stock: Mapping[str, Any], facts: Mapping[str, object]) -> bool:
        """Write what has changed; True if anything had.

        Args:
            stock: as ``Stock.to_json`` lays it out.
            facts: what the service itself knows: failed starts, roll-backs.

        Raises:
            FileError: the folder cannot be written.
        """
        env_text = format_env(stock["active"])
        document = {
            "schema": SCHEMA,
            "nccltuned": {**self._identity, "version": __version__},
            **stock,
            **facts,
        }
        now = (env_text, json.dumps(document, sort_keys=True))
        if now == self._last:
            return False
        make_dir(self.folder)
        if self._last is None or env_text != self._last[0]:
            write_atomic(self.folder / ENV_NAME, env_text)
        published_at = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({**document, "published_at": published_at}, indent=1)
        write_atomic(self.folder / JSON_NAME, text + "\n")
        self._last = now
        return True
