"""Reads what nccltune keeps: which profile is active, the profile, and which launches get it.

As strict as ``nccltune.store`` about whose files these are, and about what a profile may set.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

STATE_SCHEMA = "nccltune.state/1"
POLICY_SCHEMA = "nccltune.policy/1"
PROFILE_SCHEMA = "nccltune.profile/1"
PROFILE_KEYS = frozenset(
    {
        "schema",
        "name",
        "note",
        "source",
        "created_at",
        "settings",
        "fingerprint",
        "measured",
        "bands",
    }
)
SYSTEM_STATE_DIR = Path("/var/lib/nccltune")
STATE_NAME = "state.json"
POLICIES = ("eagle3", "speculative", "all")
DIGEST_CHARS = 16
NAMES_PATH = Path(__file__).with_name("names.txt")

_MAX_FILE_BYTES = 2**20
_MAX_VALUE_CHARS = 1023
_PROFILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Refused(Exception):
    """A file that must not be used; the text says which, and why."""


class Profile(NamedTuple):
    """The active profile.

    Attributes:
        fingerprint: the host that it was made on; None for no particular one.
    """

    name: str
    settings: dict[str, str]
    source: str
    fingerprint: dict[str, Any] | None


def reading_dir(environ: Any) -> Path:
    """Return the folder that says what a launch gets, by the same rules as every route.

    Raises:
        Refused: ``NCCLTUNE_HOME`` is not absolute or names no folder, as where a volume was not
            mounted, or this user has no home folder.
    """
    own = environ.get("NCCLTUNE_HOME")
    if own:
        if not Path(own).is_absolute():
            raise Refused(f"NCCLTUNE_HOME={own}: not an absolute path")
        if not os.path.isdir(own):  # noqa: PTH112 - Path raises in a closed folder
            raise Refused(f"NCCLTUNE_HOME={own}: there is no such folder; was it not mounted?")
        return Path(own)
    if os.geteuid() == 0:
        return SYSTEM_STATE_DIR
    mine = _user_dir(environ)
    is_of_host = not _is_there(mine / STATE_NAME) and _is_there(SYSTEM_STATE_DIR / STATE_NAME)
    return SYSTEM_STATE_DIR if is_of_host else mine


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # reading it says what is wrong
    return True


def _user_dir(environ: Any) -> Path:
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the XDG rules say to ignore a relative one
        home = Path(environ.get("HOME", "") or _passwd_home())
        if not home.is_absolute():
            raise Refused(f"user {os.geteuid()} has no home folder; set NCCLTUNE_HOME")
        base = home / ".local" / "state"
    return base / "nccltune"


def _passwd_home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


class Active(NamedTuple):
    """What the state file says.

    Attributes:
        name: of the active profile; None where none is.
        any_host_gpus: UUIDs of the GPUs for which a person has activated it with ``--any-host``.
        digest: of the settings that were checked when it was activated.
    """

    name: str | None
    any_host_gpus: list[Any]
    digest: str


def read_active(folder: Path) -> Active:
    """Return which profile is active.

    Raises:
        Refused: the state file is there and cannot be used.
    """
    path = folder / STATE_NAME
    data = _read_document(path, STATE_SCHEMA, is_optional=True) or {}
    name, gpus_by_profile = data.get("active"), data.get("any_host")
    if name is not None and not _is_name(name):
        raise Refused(f"{path}: {name!r} is no profile name")
    gpus = gpus_by_profile.get(name) if isinstance(gpus_by_profile, dict) else None
    return Active(name, gpus if isinstance(gpus, list) else [], str(data.get("digest") or ""))


def policy(folder: Path) -> str:
    """Return which launches get the profile.

    Raises:
        Refused: the policy file is there and cannot be used.
    """
    path = folder / "policy.json"
    data = _read_document(path, POLICY_SCHEMA, is_optional=True)
    launches = "eagle3" if data is None else data.get("launches", "eagle3")
    unknown = set() if data is None else data.keys() - {"schema", "launches"}
    if unknown or launches not in POLICIES:
        raise Refused(f"{path}: {f'unknown key {min(unknown)!r}' if unknown else launches!r}")
    return str(launches)


def load_profile(folder: Path, active: Active) -> Profile:
    """Read the active profile.

    Whether NCCL takes a value, and two of them together, was checked when it was activated, by code
    that is not at hand here: what has another digest than it had then is not used.

    Args:
        folder: the state folder.
        active: what its state file says.

    Raises:
        Refused: it is missing, in other hands, no profile, sets what no profile may, or is not
            what was activated.
    """
    name = active.name or ""
    path = folder / "profiles" / f"{name}.json"
    data = _read_document(path, PROFILE_SCHEMA)
    unknown = data.keys() - PROFILE_KEYS
    if unknown:
        raise Refused(f"{path}: unknown key {min(unknown)!r}")
    if data.get("name") != name:
        raise Refused(f"{path}: holds the profile {data.get('name')!r}")
    if data.get("bands", []) != []:
        raise Refused(f"{path}: bands need a tuner plugin, which there is none of yet")
    source, fingerprint = data.get("source", ""), data.get("fingerprint")
    is_formed = isinstance(source, str) and isinstance(fingerprint, (dict, type(None)))
    if not is_formed or not isinstance(data.get("settings"), dict):
        raise Refused(f"{path}: settings, source or fingerprint is missing or of the wrong kind")
    settings = data["settings"]
    names = allowed_names()
    for variable, value in settings.items():
        if variable not in names:
            raise Refused(f"{path}: {variable!r} is not a variable that a profile may set")
        if not _is_value(value):
            raise Refused(f"{path}: {variable}: {value!r} is no value")
    if active.digest != settings_digest(settings):
        what = "it has changed since it was activated" if active.digest else "it was not checked"
        raise Refused(f"{path}: {what}; once more: nccltune profile activate {name}")
    return Profile(name, settings, source, fingerprint)


def settings_digest(settings: dict[str, str]) -> str:
    """Return the short name of settings that nccltune gives them."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def allowed_names() -> frozenset[str]:
    """Return the variables that a profile may set, as nccltune's catalogue has them."""
    lines = NAMES_PATH.read_text(encoding="ascii").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or name.endswith(".json"):
        return False
    return _PROFILE_NAME.fullmatch(name) is not None


def _is_value(value: object) -> bool:
    """Tell whether a value has a form that NCCL reads as it is written."""
    if not isinstance(value, str) or not value or len(value) > _MAX_VALUE_CHARS:
        return False
    is_plain = value.isascii() and value.isprintable() and value == value.strip()
    return is_plain and not set(value) & set("\"'#")


def _read_document(path: Path, schema: str, *, is_optional: bool = False) -> Any:
    try:
        content = _read(path)
    except OSError as error:
        is_absent = isinstance(error, (FileNotFoundError, NotADirectoryError))
        if is_optional and is_absent and not os.path.lexists(path):
            return None
        raise Refused(f"{path}: cannot be read ({error.strerror})") from None
    try:
        data = json.loads(
            content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: {str(error)[:120]}") from None
    if not isinstance(data, dict) or data.get("schema") != schema:
        raise Refused(f'{path}: no file of schema "{schema}"')
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key appears twice")
    return mapping


def _no_constant(name: str) -> Any:
    raise ValueError(f"holds {name}")


def _read(path: Path) -> bytes:
    # Opened once and judged by descriptor, so that nobody swaps it in between; O_NONBLOCK because a
    # pipe in its place would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{path}: is not a regular file")
        if os.geteuid() == 0:
            _refuse_other_hands(path, status)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MAX_FILE_BYTES:
        raise Refused(f"{path}: is larger than 1 MiB")
    return content


def _refuse_other_hands(path: Path, status: os.stat_result) -> None:
    """Refuse, for root, a file that somebody else could have written or could swap."""
    is_open_to_group = status.st_mode & stat.S_IWGRP and status.st_gid != 0
    if status.st_mode & stat.S_IWOTH or is_open_to_group:
        raise Refused(f"{path}: others can write it, and root will not use it")
    if status.st_uid != 0:
        raise Refused(f"{path}: belongs to user {status.st_uid}, and root will not use it")
    mode = path.resolve().parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise Refused(f"{path}: anyone can swap files in its folder, and root will not use it")
