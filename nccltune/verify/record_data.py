"""The record of a verify, and as JSON values and back.

Schema history of ``nccltune.verify``:
    1: first version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccltune.host.fingerprint import Fingerprint
from nccltune.profile import format_profile, parse_profile
from nccltune.verify.boot_data import (
    boot_from_json,
    boot_to_json,
    count_from,
    optional_text,
    text_from,
    texts_from,
)
from nccltune.verify.model import Arm

if TYPE_CHECKING:
    from nccltune.errors import NccltuneError
    from nccltune.verify.model import Boot
    from nccltune.verify.sameness import Flags

SCHEMA = "nccltune.verify/1"


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
        flags: of each arm as they were resolved when the verify began, its ``--config`` file read;
            arm -> canonical name -> values, secrets hidden. Empty for a running server.
        sglang_version: of the installation that is started; None where it is not known.
        boots: complete ones, in their order.
        fingerprint: of the GPUs that the servers see; None where the driver does not say.
        url: of the running server that was measured; empty where servers were started.
        problems: why it ended early; empty where it did not.
        notes: what the reader should know besides.
        is_finished: nothing is left to measure; until it is judged too, ``--resume`` goes on.
        is_interrupted: somebody stopped it just now; not kept.
        stopped: what stood in the way of the next boot just now; not kept.
        judgement: what was concluded, for listings; empty until somebody has.
    """

    id: str
    created_at: str
    launch: tuple[str, ...]
    arms: tuple[Arm, ...]
    load: Mapping[str, object]
    boot_total: int
    flags: Mapping[str, Flags] = field(default_factory=dict)
    sglang_version: str | None = None
    boots: tuple[Boot, ...] = ()
    fingerprint: Fingerprint | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    is_finished: bool = False
    is_interrupted: bool = False
    stopped: NccltuneError | None = None
    judgement: Mapping[str, object] = field(default_factory=dict)

    @property
    def boots_planned(self) -> int:
        """Boots of each arm at most."""
        return self.boot_total // len(self.arms)


def record_to_json(record: VerifyRecord) -> dict[str, Any]:
    """Return a record as JSON values."""
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
        "flags": {
            arm: {name: list(values) for name, values in flags.items()}
            for arm, flags in record.flags.items()
        },
        "sglang_version": record.sglang_version,
        "fingerprint": None if record.fingerprint is None else record.fingerprint.to_json(),
        "is_finished": record.is_finished,
        "problems": [asdict(problem) for problem in record.problems],
        "notes": list(record.notes),
        "judgement": dict(record.judgement),
        "boots": [boot_to_json(boot) for boot in record.boots],
    }


def record_from_json(data: Mapping[str, Any], path: Path) -> VerifyRecord:
    """Return the record that ``record_to_json`` was given.

    Args:
        data: what that returned.
        path: of its file, whose name is that of the record.

    Raises:
        DAMAGE: it is not what that wrote, or holds figures that nobody can have measured.
        FileError: the profile of an arm makes no sense.
    """
    fingerprint = data["fingerprint"]
    record = VerifyRecord(
        id=path.stem,
        created_at=text_from(data["created_at"]),
        launch=texts_from(data["launch"]),
        arms=tuple(_arm_from_json(arm, path) for arm in data["arms"]),
        load={text_from(name): _scalar(value) for name, value in data["load"].items()},
        boot_total=count_from(data["boot_total"], least=1),
        flags={arm: _flags_from(flags) for arm, flags in data.get("flags", {}).items()},
        sglang_version=optional_text(data.get("sglang_version")),
        boots=tuple(boot_from_json(boot) for boot in data["boots"]),
        fingerprint=None if fingerprint is None else Fingerprint.from_json(fingerprint),
        environ={name: text_from(value) for name, value in data["environ"].items()},
        url=text_from(data["url"]),
        problems=tuple(Problem(**problem) for problem in data["problems"]),
        notes=texts_from(data["notes"]),
        is_finished=bool(data["is_finished"]),
        judgement=dict(data["judgement"]),
    )
    moment_of(record.created_at)
    names = {arm.name for arm in record.arms}
    if not names or len(names) < len(record.arms):
        raise ValueError("no arms, or two of one name")
    if not names.issuperset(boot.arm for boot in record.boots):
        raise ValueError("a boot of an arm that is none of the verify's")
    return record


def moment_of(text: str) -> datetime:
    """Return a moment that was kept, in UTC.

    Raises:
        ValueError, OverflowError: it is none.
    """
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)


def _flags_from(data: Mapping[str, Any]) -> Flags:
    return {name: texts_from(values) for name, values in data.items()}


def _scalar(value: object) -> object:
    if isinstance(value, dict | list):
        raise TypeError(f"{value!r:.40} where one value belongs")
    return value


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
    profile, num_steps = data["profile"], data["num_steps"]
    return Arm(
        name=text_from(data["name"]),
        argv=texts_from(data["argv"]),
        profile=None if profile is None else parse_profile(json.dumps(profile), path),
        num_steps=None if num_steps is None else count_from(num_steps),
        is_speculative=bool(data["is_speculative"]),
        note=text_from(data["note"]),
    )
