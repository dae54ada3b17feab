"""Where things lie: the state folder of this user, and what was shipped with the package.

Pure look-ups: nothing here creates a folder or reads a file; ``reading_dir`` looks whether they
are there.
"""

from __future__ import annotations

import os
import pwd
import stat
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from nccltune.errors import FileError, UsageProblem

HOME_VARIABLE = "NCCLTUNE_HOME"
SYSTEM_STATE_DIR = Path("/var/lib/nccltune")
STATE_NAME = "state.json"
_SHARED_PROFILES = Path("share") / "nccltune" / "profiles"
_PACKAGE_DIR = Path(__file__).resolve().parent


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder that keeps profiles, studies and records.

    ``$NCCLTUNE_HOME`` if set, else ``/var/lib/nccltune`` for root, else the XDG state folder.

    Raises:
        UsageProblem: ``NCCLTUNE_HOME`` is not absolute, or this user has no home folder at all
            (a bare user id in a container, say).
    """
    variables = os.environ if environ is None else environ
    if own := variables.get(HOME_VARIABLE):
        if not Path(own).is_absolute():
            raise UsageProblem(
                f"{HOME_VARIABLE}={own}: not an absolute path, so it would move with the working "
                "folder; write it from / on",
                code="bad_home",
            )
        return Path(own)
    if os.geteuid() == 0:
        return SYSTEM_STATE_DIR
    xdg = variables.get("XDG_STATE_HOME", "")
    # The XDG rules say to ignore a relative path.
    base = Path(xdg) if Path(xdg).is_absolute() else _home_dir(variables) / ".local" / "state"
    return base / "nccltune"


def reading_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder that says what a launch gets: this user's, or else the host's.

    A user who has never activated anything gets what root has activated for the host.

    Raises:
        UsageProblem: as for ``state_dir``.
        FileError: ``NCCLTUNE_HOME`` names no folder. A volume that was not mounted looks so, and
            what it holds is then missing, which is not the same as nothing being active.
    """
    variables = os.environ if environ is None else environ
    own = state_dir(variables)
    if variables.get(HOME_VARIABLE):
        _check_is_folder(own)
        return own
    if own != SYSTEM_STATE_DIR and not _is_there(own / STATE_NAME):
        return SYSTEM_STATE_DIR if _is_there(SYSTEM_STATE_DIR / STATE_NAME) else own
    return own


def _check_is_folder(folder: Path) -> None:
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except PermissionError:
        raise FileError(
            folder,
            f"the state folder that {HOME_VARIABLE} names may not be looked at (permission "
            "denied); let this user into the folders above it",
            code="no_state_folder",
        ) from None
    except OSError as error:
        cause = os.strerror(error.errno).lower() if error.errno else str(error)
    else:
        cause = "not a folder"
        if is_folder:
            return
    raise FileError(
        folder,
        f"the state folder that {HOME_VARIABLE} names is not there ({cause}); mount it, or begin "
        "a new one with: nccltune profile activate NAME",
        code="no_state_folder",
    )


def _is_there(path: Path) -> bool:
    """Tell whether a name is taken; what cannot be looked at is for the reader to complain of."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _home_dir(variables: Mapping[str, str]) -> Path:
    home = variables.get("HOME", "")
    if not home:
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            home = ""
    if not Path(home).is_absolute():
        raise UsageProblem(
            f"user {os.geteuid()} has no home folder to keep state in; "
            f"set {HOME_VARIABLE} to a folder that lasts",
            code="no_home",
        )
    return Path(home)


def shipped_profiles_dir() -> Path:
    """Return the folder of the shipped profiles: the checkout's, or the installed copy.

    A checkout is known by the ``pyproject.toml`` beside the package; so an editable install uses
    the files that are being edited, not the copies made when it was installed.
    """
    checkout = _PACKAGE_DIR.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "profiles").is_dir():
        return checkout / "profiles"
    candidates = list(_installed_candidates(_PACKAGE_DIR))
    return next((folder for folder in candidates if folder.is_dir()), candidates[0])


def _installed_candidates(package_dir: Path) -> Iterator[Path]:
    """Yield the places where pip puts shared data, by how it was called.

    The interpreter's own prefix first, then the user's (``--user``), then the folders above the
    package, which is where ``--target`` and ``--prefix`` put them.
    """
    yield Path(sysconfig.get_path("data")) / _SHARED_PROFILES
    yield (
        Path(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))) / _SHARED_PROFILES
    )
    for folder in package_dir.parents[:4]:
        yield folder / _SHARED_PROFILES


def shipped_recordings_dir() -> Path:
    """Return the folder of the shipped recordings."""
    return shipped_profiles_dir() / "recordings"
