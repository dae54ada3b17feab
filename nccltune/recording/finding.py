"""Where recordings lie: those made on this host in its state folder, those shipped elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.atomic import make_dir, write_output
from nccltune.errors import FileError, UsageProblem
from nccltune.paths import shipped_recordings_dir, state_dir
from nccltune.recording.format import format_recording
from nccltune.recording.parse import parse_recording
from nccltune.regular_files import read_regular

if TYPE_CHECKING:
    from nccltune.recording.model import Recording


_LIMIT_BYTES = 256 << 20  # the shipped ones have less than one MiB


@dataclass(frozen=True, slots=True)
class FoundRecording:
    """A recording that can be asked for by name.

    Attributes:
        where: ``state`` for one made on this host, ``shipped`` for one that came with the tool.
    """

    name: str
    path: Path
    where: str


def recordings_dir() -> Path:
    """Folder of the recordings that were made on this host."""
    return state_dir() / "recordings"


def list_recordings() -> list[FoundRecording]:
    """List recordings by name, without reading them.

    One that was made on this host hides a shipped one of the same name.
    """
    found: dict[str, FoundRecording] = {}
    for folder, where in ((recordings_dir(), "state"), (shipped_recordings_dir(), "shipped")):
        for path in sorted(folder.glob("*.json")):
            found.setdefault(path.stem, FoundRecording(path.stem, path, where))
    return sorted(found.values(), key=lambda recording: recording.name)


def find_recording(name_or_path: str) -> tuple[Recording, Path]:
    """Read the recording of that name, or the file, when it looks like a path.

    Raises:
        UsageProblem: nothing is known by that name; the message lists what is.
        FileError: the file cannot be used.
    """
    if "/" in name_or_path or name_or_path.endswith(".json"):
        path = Path(name_or_path)
        return load_recording(path), path
    known = {recording.name: recording.path for recording in list_recordings()}
    if name_or_path not in known:
        names = ", ".join(known) or "none"
        raise UsageProblem(
            f"no recording {name_or_path!r}; known: {names}; or give the path of a file",
            code="unknown_recording",
        )
    path = known[name_or_path]
    return load_recording(path), path


def load_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        FileError: it is not there, not readable, not text, or not a recording.
    """
    try:
        text = read_regular(path, _LIMIT_BYTES).decode("utf-8")
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start}), so not a recording"
        raise FileError(path, reason, text=repr(error.object[error.start :][:1])) from None
    return parse_recording(text, path)


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording whole or not at all.

    Raises:
        FileError: usually a full disk.
    """
    make_dir(path.parent)
    write_output(path, format_recording(recording))
