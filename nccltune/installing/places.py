"""Where things are on a host, and the files that nccltune ships for it."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from nccltune.errors import HostError
from nccltune.installing import units
from nccltune.installing.steps import MANIFEST_NAME
from nccltune.paths import shipped_profiles_dir, state_dir

UNIT_FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/etc/systemd/system",
        "/run/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
        "/lib/systemd/system",
    )
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on this host; other ones in tests.

    Attributes:
        unit_folders: where systemd looks for units; ours go into the first.
        program_dir: where ``nccltune`` and ``nccltuned`` are.
        start_path: where the script in front of servers goes, apart from nccltune's own folder.
        python: the interpreter that nccltune is installed for.
    """

    unit_folders: tuple[Path, ...] = UNIT_FOLDERS
    shipped_dir: Path = field(default_factory=lambda: shipped_profiles_dir().parent)
    state_dir: Path = field(default_factory=state_dir)
    program_dir: Path | None = None
    start_path: Path = units.START_PATH
    python: Path = field(default_factory=lambda: Path(sys.executable))
    proc_root: Path = Path("/proc")
    dev_root: Path = Path("/dev")

    @property
    def unit_dir(self) -> Path:
        """Where units are put."""
        return self.unit_folders[0]

    @property
    def manifest_path(self) -> Path:
        """The list of what is installed."""
        return self.state_dir / MANIFEST_NAME


def shipped_unit(name: str, places: Places) -> str:
    """Return the text of a unit, or of what goes with units.

    Raises:
        HostError: it is not there, as in an installation that lost its data files.
    """
    path = places.shipped_dir / "systemd" / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise HostError(
            f"{path}: a unit that nccltune ships is not there ({error.strerror}); "
            "install nccltune anew",
            code="no_units",
        ) from None


def is_shipped_as(path: Path, shipped: str) -> bool:
    """Tell whether a file is there that began as this shipped text."""
    try:
        return units.is_of_ours(path.read_text(encoding="utf-8", errors="replace"), shipped)
    except OSError:
        return False


def find_program_dir(places: Places) -> Path:
    """Return the folder of both programs.

    Raises:
        HostError: they are not together, so that no unit could start them.
    """
    found = shutil.which("nccltune")
    candidates = [places.program_dir, Path(sysconfig.get_path("scripts"))]
    candidates += [Path(found).parent] if found else []
    for folder in filter(None, candidates):
        if all((folder / name).is_file() for name in ("nccltune", "nccltuned")):
            return folder.absolute()
    raise HostError(
        "the programs nccltune and nccltuned are not in one folder, and units need both: install "
        "nccltune with pip, as root",
        code="no_programs",
    )
