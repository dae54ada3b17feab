"""Measurements saved from real GPUs, and a bench that answers from them.

A recording keeps every launch that was made: the baseline many times over for the noise, and the
failures too. What was not measured is never invented.
"""

from __future__ import annotations

from nccltune.recording.bench import RecordingBench
from nccltune.recording.finding import (
    FoundRecording,
    find_recording,
    list_recordings,
    load_recording,
    save_recording,
)
from nccltune.recording.format import SCHEMA, format_recording
from nccltune.recording.model import (
    Manifest,
    PayloadShape,
    RecordedLaunch,
    RecordedTimes,
    Recording,
    SettingsKey,
    candidate_key,
    settings_key,
)
from nccltune.recording.parse import parse_recording
from nccltune.recording.writer import RecordingWriter

__all__ = [
    "SCHEMA",
    "FoundRecording",
    "Manifest",
    "PayloadShape",
    "RecordedLaunch",
    "RecordedTimes",
    "Recording",
    "RecordingBench",
    "RecordingWriter",
    "SettingsKey",
    "candidate_key",
    "find_recording",
    "format_recording",
    "list_recordings",
    "load_recording",
    "parse_recording",
    "save_recording",
    "settings_key",
]
