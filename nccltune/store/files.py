"""Profiles on disk: of this user's store, of the host's, shipped with the package, single files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from nccltune.errors import FileError, NccltuneError, UsageProblem
from nccltune.paths import reading_dir, shipped_profiles_dir, state_dir
from nccltune.profile import Profile, check_name, parse_profile
from nccltune.store.reading import json_files, read_text, unreadable

SUFFIX = ".json"


class Where(StrEnum):
    """Which of the places a profile was found in.

    ``STATE`` is this user's own store, ``HOST`` the host's where this user's launches read that.
    """

    STATE = "state"
    HOST = "host"
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


def profiles_dir(folder: Path | None = None) -> Path:
    """Return the folder of the profiles that were found or imported on this host.

    Args:
        folder: the state folder; this user's if None.
    """
    return (state_dir() if folder is None else folder) / "profiles"


def find_profile(name_or_file: str, *, is_own: bool = False) -> Found:
    """Find a profile by name, or read the file named.

    This user's store goes first, then the host's where this user's launches read that, then what is
    shipped. A folder of the host's that cannot be looked into counts for empty. Whatever ends in
    ``.json`` is a file; everything else is a name, so that a name never walks the tree.

    Args:
        name_or_file: as typed.
        is_own: pass over the host's, for what is to be changed in this user's store.

    Raises:
        UsageProblem: neither a name nor a file, or no profile of that name.
        FileError: the file cannot be used, or this user's store cannot be looked into.
    """
    if name_or_file.endswith(SUFFIX):
        path = Path(name_or_file)
        return Found(load_profile(path), path, Where.FILE)
    if "/" in name_or_file:
        raise UsageProblem(
            f"{name_or_file!r} is neither a profile name, which has no slash, nor a file, which "
            "ends in .json",
            code="bad_name",
        )
    check_name(name_or_file)
    passed_over: Path | None = None
    for folder, where in _folders():
        path = folder / f"{name_or_file}{SUFFIX}"
        if not _is_in_reach(path, where):
            continue
        if is_own and where is Where.HOST:
            passed_over = path
        else:
            return Found(load_named(path, where), path, where)
    raise _not_found(name_or_file, passed_over, is_own=is_own)


def list_profiles(unread: list[str] | None = None, *, is_own: bool = False) -> tuple[Listed, ...]:
    """List every profile by name, in the order of ``find_profile`` where several have one name.

    A broken file is listed with its problem, so that one bad file hides no other.

    Args:
        unread: gets why the host's profiles are left out, where they cannot be read.
        is_own: leave the host's out, as ``find_profile`` does.

    Raises:
        FileError: the folder of this user's own or of the shipped ones cannot be read.
    """
    found: list[Listed] = []
    for folder, where in _folders(is_own=is_own):
        try:
            paths = json_files(folder)
        except FileError as error:
            if where is not Where.HOST:
                raise
            if unread is not None:
                reason = str(error).removeprefix(f"{folder}: ")
                unread.append(f"the host's profiles in {folder} {reason}")
            continue
        for path in paths:
            try:
                found.append(Listed(path.stem, path, where, load_named(path, where)))
            except NccltuneError as error:
                found.append(Listed(path.stem, path, where, None, str(error)))
    return tuple(sorted(found, key=lambda listed: (listed.name, listed.where is Where.SHIPPED)))


def load_profile(path: Path, *, check_owner: bool = True) -> Profile:
    """Read one profile file.

    Raises:
        FileError: it is missing, unreadable, no regular file, far too large, not UTF-8, not a
            profile, or, for root, in other hands (see ``check_ownership``).
    """
    return parse_profile(read_text(path, check_owner=check_owner), path)


def load_named(path: Path, where: Where) -> Profile:
    """Read a file of one of our folders, whose name has to be the profile's.

    Shipped files belong to whoever installed this code, which root is running already.
    """
    profile = load_profile(path, check_owner=where is not Where.SHIPPED)
    if profile.name != path.stem:
        reason = f"holds the profile {profile.name!r}; rename the file or the profile"
        raise FileError(path, reason, code="name_mismatch")
    return profile


def is_shipped(name: str) -> bool:
    """Tell whether a shipped profile has this name."""
    return is_there(shipped_profiles_dir() / f"{name}{SUFFIX}")


def is_there(path: Path) -> bool:
    """Tell whether the name is taken, by a dangling link too.

    Raises:
        FileError: a folder on the way may not be looked into.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, error) from None
    return True


def _folders(*, is_own: bool = False) -> Iterator[tuple[Path, Where]]:
    yield profiles_dir(), Where.STATE
    if not is_own:
        # Who reads the active profile is told where that cannot be looked up.
        with suppress(NccltuneError):
            if (host := reading_dir()) != state_dir():
                yield profiles_dir(host), Where.HOST
    yield shipped_profiles_dir(), Where.SHIPPED


def _is_in_reach(path: Path, where: Where) -> bool:
    try:
        return is_there(path)
    except FileError:
        # The host's store is root's affair: it keeps nobody from his own, nor from what is shipped.
        if where is Where.HOST:
            return False
        raise


def _not_found(name: str, of_host: Path | None, *, is_own: bool) -> UsageProblem:
    if of_host is not None:
        return UsageProblem(
            f"profile {name!r} is the host's, and not in this user's store: launches of this user "
            "get the host's active profile already; to keep this one as your own: nccltune profile "
            f"import {of_host}",
            code="not_in_store",
        )
    unread: list[str] = []
    names = sorted({listed.name for listed in list_profiles(unread, is_own=is_own)})
    known = f"{', '.join(names) or 'none'} (a file has to end in .json)"
    return UsageProblem(
        "; ".join([f"no profile named {name!r}", f"there are: {known}", *unread]),
        code="no_such_profile",
    )
