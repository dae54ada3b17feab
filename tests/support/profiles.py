"""A profile of this host, as a file, in the store, and under the verbs of ``nccltune profile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nccltune.profile import Profile, format_profile
from tests.support.command_line import FINGERPRINT, envelope_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SETTINGS = {"NCCL_PROTO": "allreduce:LL", "NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"}
MINE = Profile("mine", SETTINGS, source="gpus", fingerprint=FINGERPRINT.to_json())


def put(path: Path, profile: Profile) -> Path:
    """Write a profile file that its owner alone can read, and return its path."""
    path.write_text(format_profile(profile))
    path.chmod(0o600)
    return path


def profile_verb(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run a verb of ``nccltune profile`` and return its envelope."""
    return envelope_of(capsys, "profile", *words)
