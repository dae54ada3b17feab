"""Profiles on disk: those shipped with the package, those of the state folder, and single files."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import FileError, NccltuneError, UsageProblem
from nccltune.paths import shipped_profiles_dir, state_dir
from nccltune.profile import Profile, check_name, format_profile, parse_profile

_MAX_PROFILE_BYTES = 2**20
_SUFFIX = ".json"


class Where(StrEnum):
    """Which of the places a profile was found in."""

    STATE = "state"
    SHIPPED = "shipped"
    FILE = "file"


class Found(NamedTuple):
    """A profile with the file that it came from."""

    profile: Profile
    path: Path
    where: Where


@dataclass(frozen=True, slots=True)
class Listed:
    """One profile of a listing.

    ``profile`` is None where the file is broken, and ``problem`` says how.
    """

    name: str
    path: Path
    where: Where
    profile: Profile | None
    problem: str = ""


def profiles_dir() -> Path:
    """Return the folder of the profiles that were found or imported on this host."""
    return state_dir() / "profiles"


def save_candidate(profile: Profile) -> Path:
    """Keep a profile under its name in the state folder, in place of an older one of that name.

    Raises:
        UsageProblem: the name is not one, or belongs to a shipped profile.
        FileError: the folder cannot be written, or the profile could not be read back.
    """
    check_name(profile.name)
    if _is_there(shipped_profiles_dir() / f"{profile.name}{_SUFFIX}"):
        raise UsageProblem(
            f"{profile.name!r} is the name of a shipped profile; choose another", code="name_taken"
        )
    path = profiles_dir() / f"{profile.name}{_SUFFIX}"
    text = format_profile(profile)
    # What a later launch would refuse must not be kept.
    parse_profile(text, path)
    make_dir(path.parent)
    write_atomic(path, text)
    return path


def find_profile(name_or_file: str) -> Found:
    """Find a profile by name (state folder first, then shipped), or read the file named.

    Whatever ends in ``.json`` is a file; everything else is a name, so that a name never walks the
    tree.

    Raises:
        UsageProblem: neither a name nor a file, or no profile of that name.
        FileError: the file cannot be used.
    """
    if name_or_file.endswith(_SUFFIX):
        path = Path(name_or_file)
        return Found(load_profile(path), path, Where.FILE)
    if "/" in name_or_file:
        raise UsageProblem(
            f"{name_or_file!r} is neither a profile name, which has no slash, nor a file, which "
            "ends in .json",
            code="bad_name",
        )
    check_name(name_or_file)
    for folder, where in _folders():
        path = folder / f"{name_or_file}{_SUFFIX}"
        if _is_there(path):
            return Found(_load_named(path, where), path, where)
    known = ", ".join(sorted({listed.name for listed in list_profiles()})) or "none"
    raise UsageProblem(
        f"no profile named {name_or_file!r}; there are: {known} (a file has to end in .json)",
        code="no_such_profile",
    )


def list_profiles() -> tuple[Listed, ...]:
    """List every profile by name, those of the state folder before shipped ones of that name.

    A broken file is listed with its problem, so that one bad file hides no other.
    """
    found: list[Listed] = []
    for folder, where in _folders():
        for path in folder.glob(f"*{_SUFFIX}"):
            if path.name.startswith("."):
                continue
            try:
                found.append(Listed(path.stem, path, where, _load_named(path, where)))
            except NccltuneError as error:
                found.append(Listed(path.stem, path, where, None, str(error)))
    return tuple(sorted(found, key=lambda listed: (listed.name, listed.where is Where.SHIPPED)))


def load_profile(path: Path, *, check_owner: bool = True) -> Profile:
    """Read one profile file.

    Raises:
        FileError: it is missing, unreadable, no regular file, far too large, not UTF-8, not a
            profile, or, for root, in other hands (see ``check_ownership``).
    """
    try:
        # Opened once and judged by descriptor, so that nobody swaps it in between; O_NONBLOCK
        # because a pipe in its place would block for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileError(path, "is not a regular file", code="not_a_file")
            if check_owner and os.geteuid() == 0:
                _refuse_other_hands(path, status)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(_MAX_PROFILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(content) > _MAX_PROFILE_BYTES:
        raise FileError(path, "is larger than 1 MiB, which no profile is", code="too_large")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FileError(path, "is not UTF-8 text", line=line, code="bad_encoding") from None
    return parse_profile(text, path)


def check_ownership(path: Path, *, reader_uid: int | None = None) -> None:
    """Refuse, for root, a file that somebody else could have written.

    A profile decides what root's servers get in their environment. Users who are not root are
    their own judges.

    Args:
        path: the file; a link is judged by what it leads to.
        reader_uid: on whose behalf; this process's effective user if None.

    Raises:
        FileError: it belongs to another user, or others may write it or swap it.
    """
    if (os.geteuid() if reader_uid is None else reader_uid) != 0:
        return
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    _refuse_other_hands(path, status)


def _unreadable(path: Path, error: OSError) -> FileError:
    cause = os.strerror(error.errno) if error.errno else str(error)
    return FileError(path, f"cannot be read ({cause})", code="cannot_read")


def _refuse_other_hands(path: Path, status: os.stat_result) -> None:
    if status.st_mode & stat.S_IWOTH:
        reason = "anyone can write it, and root will not use it; run chmod o-w on it"
        raise FileError(path, reason, code="unsafe_owner")
    if status.st_mode & stat.S_IWGRP and status.st_gid != 0:
        reason = (
            f"group {status.st_gid} can write it, and root will not use it; run chmod g-w on it"
        )
        raise FileError(path, reason, code="unsafe_owner")
    if status.st_uid != 0:
        reason = f"belongs to user {status.st_uid}, and root will not use it; run chown root on it"
        raise FileError(path, reason, code="unsafe_owner")
    folder = path.resolve().parent
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        reason = f"anyone can swap files in {folder}, and root will not use them; chmod o-w it"
        raise FileError(path, reason, code="unsafe_owner")


def _folders() -> tuple[tuple[Path, Where], ...]:
    return ((profiles_dir(), Where.STATE), (shipped_profiles_dir(), Where.SHIPPED))


def _is_there(path: Path) -> bool:
    """Tell whether the name is taken, by a dangling link too.

    Raises:
        FileError: a folder on the way may not be looked into.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from None
    return True


def _load_named(path: Path, where: Where) -> Profile:
    """Read a file of one of our folders, whose name has to be the profile's.

    Shipped files belong to whoever installed this code, which root is running already.
    """
    profile = load_profile(path, check_owner=where is not Where.SHIPPED)
    if profile.name != path.stem:
        reason = f"holds the profile {profile.name!r}; rename the file or the profile"
        raise FileError(path, reason, code="name_mismatch")
    return profile
