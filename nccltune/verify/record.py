"""Verifies on disk: one file each, rewritten whole after every boot, so that a kill loses one boot.

Schema history of ``nccltune.verify``:
    1: first version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nccltune.atomic import make_dir, write_atomic
from nccltune.errors import FileError
from nccltune.host.fingerprint import Fingerprint
from nccltune.jsontext import parse_json
from nccltune.paths import state_dir
from nccltune.profile import format_profile, parse_profile
from nccltune.store.reading import read_text
from nccltune.verify.boot_data import boot_from_json, boot_to_json
from nccltune.verify.model import Arm

if TYPE_CHECKING:
    from nccltune.verify.model import Boot

SCHEMA = "nccltune.verify/1"
_SUFFIX = ".json"
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A boot that gave no numbers.

    Attributes:
        code: of the error, as scripts get it.
        log_path: where the server's own words are; empty where there are none.
    """

    arm: str
    position: int
    code: str
    message: str
    log_path: str = ""


@dataclass(frozen=True, slots=True)
class VerifyRecord:
    """One verify.

    Attributes:
        id: also the name of its file.
        created_at: ISO 8601, UTC.
        launch: the command, secrets hidden; of a running server as far as it is known.
        arms: the first is the baseline; their commands with secrets hidden.
        load: the plan of the load, field by field.
        environ: what the environment of every server held of NCCL and CUDA before its arm's
            settings.
        boot_total: boots of all arms at most.
        boots: complete ones, in their order.
        fingerprint: of the GPUs that the servers see; None where the driver does not say.
        url: of the running server that was measured; empty where servers were started.
        problems: why it ended early; empty where it did not.
        notes: what the reader should know besides.
        is_finished: nothing is left to measure; else ``--resume`` goes on.
        is_interrupted: somebody stopped it just now; not kept.
        judgement: what was concluded, for listings; empty until somebody has.
    """

    id: str
    created_at: str
    launch: tuple[str, ...]
    arms: tuple[Arm, ...]
    load: Mapping[str, object]
    boot_total: int
    boots: tuple[Boot, ...] = ()
    fingerprint: Fingerprint | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    is_finished: bool = False
    is_interrupted: bool = False
    judgement: Mapping[str, object] = field(default_factory=dict)


class Records(NamedTuple):
    """What lies in the folder.

    Attributes:
        found: the newest first.
        problems: files that cannot be used, in words.
    """

    found: tuple[VerifyRecord, ...]
    problems: tuple[str, ...]


def verifies_dir(folder: Path | None = None) -> Path:
    """Return the folder of the verifies.

    Args:
        folder: the state folder; this user's if None.
    """
    return (state_dir() if folder is None else folder) / "verifies"


def logs_dir(record_id: str, folder: Path | None = None) -> Path:
    """Return where the output of a verify's servers is kept, as long as they are of use."""
    return verifies_dir(folder) / f"{record_id}.logs"


def save(record: VerifyRecord, folder: Path | None = None) -> Path:
    """Write a verify, in the place of what was there of it.

    Raises:
        FileError: the folder cannot be written, or the disk is full.
    """
    path = verifies_dir(folder) / f"{record.id}{_SUFFIX}"
    make_dir(path.parent)
    text = json.dumps(_to_json(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomic(path, f"{text}\n")
    return path


def load(path: Path) -> VerifyRecord:
    """Read a verify.

    Raises:
        FileError: it is missing, cut short, of another version, or otherwise damaged.
    """
    document = parse_json(read_text(path, check_owner=False, max_bytes=_MAX_BYTES), path)
    data = document.data
    if not isinstance(data, dict):
        raise document.problem("a verify is an object in {}")
    if data.get("schema") != SCHEMA:
        found = json.dumps(data.get("schema"))[:80]
        reason = f'schema {found}, and this version reads "{SCHEMA}" only'
        raise document.problem(reason, "schema", code="unknown_schema")
    try:
        return _from_json(data, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"is damaged ({type(error).__name__}: {error}); move it away"
        raise FileError(path, reason, code="damaged_verify") from error


def list_records(folder: Path | None = None) -> Records:
    """Read every verify; one that is damaged hides no other."""
    found: list[VerifyRecord] = []
    problems: list[str] = []
    for path in sorted(verifies_dir(folder).glob(f"*{_SUFFIX}")):
        if path.name.startswith("."):
            continue
        try:
            found.append(load(path))
        except FileError as error:
            problems.append(str(error))
    found.sort(key=lambda record: (record.created_at, record.id), reverse=True)
    return Records(tuple(found), tuple(problems))


def _to_json(record: VerifyRecord) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "id": record.id,
        "created_at": record.created_at,
        "launch": list(record.launch),
        "url": record.url,
        "arms": [_arm_to_json(arm) for arm in record.arms],
        "load": dict(record.load),
        "environ": dict(record.environ),
        "boot_total": record.boot_total,
        "fingerprint": None if record.fingerprint is None else record.fingerprint.to_json(),
        "is_finished": record.is_finished,
        "problems": [asdict(problem) for problem in record.problems],
        "notes": list(record.notes),
        "judgement": dict(record.judgement),
        "boots": [boot_to_json(boot) for boot in record.boots],
    }


def _from_json(data: Mapping[str, Any], path: Path) -> VerifyRecord:
    fingerprint = data["fingerprint"]
    return VerifyRecord(
        id=str(data["id"]),
        created_at=str(data["created_at"]),
        launch=tuple(str(word) for word in data["launch"]),
        arms=tuple(_arm_from_json(arm, path) for arm in data["arms"]),
        load=dict(data["load"]),
        boot_total=int(data["boot_total"]),
        boots=tuple(boot_from_json(boot) for boot in data["boots"]),
        fingerprint=None if fingerprint is None else Fingerprint.from_json(fingerprint),
        environ={str(name): str(value) for name, value in data["environ"].items()},
        url=str(data["url"]),
        problems=tuple(Problem(**problem) for problem in data["problems"]),
        notes=tuple(str(note) for note in data["notes"]),
        is_finished=bool(data["is_finished"]),
        judgement=dict(data["judgement"]),
    )


def _arm_to_json(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.name,
        "argv": list(arm.argv),
        "profile": None if arm.profile is None else json.loads(format_profile(arm.profile)),
        "num_steps": arm.num_steps,
        "is_speculative": arm.is_speculative,
        "note": arm.note,
    }


def _arm_from_json(data: Mapping[str, Any], path: Path) -> Arm:
    profile = data["profile"]
    return Arm(
        name=str(data["name"]),
        argv=tuple(str(word) for word in data["argv"]),
        profile=None if profile is None else parse_profile(json.dumps(profile), path),
        num_steps=data["num_steps"],
        is_speculative=bool(data["is_speculative"]),
        note=str(data["note"]),
    )
