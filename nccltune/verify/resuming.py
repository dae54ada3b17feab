"""Where a verify begins: a new record, or the one that a stopped verify left."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nccltune.atomic import make_dir
from nccltune.envvars import CATALOGUE
from nccltune.errors import FileError, UsageProblem
from nccltune.verify.record import VerifyRecord, logs_dir, newest_records, verifies_dir
from nccltune.verify.sameness import changed_flags, hidden, visible
from nccltune.verify.spec import DEFAULT_BOOTS

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.verify.model import Arm
    from nccltune.verify.serving.preflight import Ground
    from nccltune.verify.spec import VerifySpec

_TELLING = ("NCCL_", "CUDA_", "SGLANG_SIMULATE_")


def begin_record(spec: VerifySpec, ground: Ground) -> VerifyRecord:
    """Return the record to go on with.

    Raises:
        FileError: there is nothing to resume, or only verifies of something else.
        UsageProblem: the one to resume was begun with more boots than are asked for.
    """
    record = VerifyRecord(
        id=new_id(),
        created_at=now(),
        launch=hidden(spec.launch),
        arms=tuple(replace(arm, argv=hidden(arm.argv)) for arm in spec.arms),
        load=asdict(spec.load),
        boot_total=len(spec.arms) * (spec.boots or DEFAULT_BOOTS),
        flags={ready.arm.name: ready.flags for ready in ground.arms},
        sglang_version=ground.sglang_version,
        fingerprint=ground.fingerprint,
        environ=telling(spec.environ),
        notes=ground.notes,
    )
    if spec.is_resume:
        left = _find(record)
        _check_boots(left, spec.boots)
        notes = dict.fromkeys((*left.notes, *ground.notes))
        record = replace(
            left,
            boot_total=record.boot_total if spec.boots else left.boot_total,
            notes=tuple(notes),
            problems=(),
            is_finished=False,
            judgement={},
        )
    make_dir(logs_dir(record.id))
    return record


def telling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that servers react to; nothing secret is in it."""
    return {
        visible(name): visible(value)
        for name, value in sorted(environ.items())
        if name.startswith(_TELLING) or name in CATALOGUE
    }


def new_id() -> str:
    """Return a name that sorts by time and that no other process gives."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"


def now() -> str:
    """Return this moment: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _find(wanted: VerifyRecord) -> VerifyRecord:
    """Return the newest verify of this kind that lacks boots, or that nobody has judged."""
    newest = None
    for one in newest_records():
        if one.url or (one.is_finished and one.judgement):
            continue
        newest = newest or one
        if not any(_differences(one, wanted)):
            return one
    if newest is None:
        raise FileError(
            verifies_dir(), "there is no verify to resume; run without --resume", code="no_verify"
        )
    named = ", ".join(_differences(newest, wanted))
    raise FileError(
        verifies_dir() / f"{newest.id}.json",
        f"belongs to another verify ({named} differ); run without --resume",
        code="other_verify",
    )


def _check_boots(left: VerifyRecord, boots: int | None) -> None:
    """Refuse fewer boots than were planned: whoever stopped may have seen the figures.

    A verify that may end where they look best claims what is not there.
    """
    planned = left.boots_planned
    if boots is not None and boots < planned:
        raise UsageProblem(
            f"--boots {boots}: this verify was begun with {planned} boots an arm, and where it "
            f"ends must not depend on its figures; to resume it, give --boots {planned} or more",
            code="bad_boots",
        )


def _differences(one: VerifyRecord, other: VerifyRecord) -> Iterator[str]:
    """Name what makes boots of two verifies no longer comparable."""
    parts = {
        "launch command": (one.launch, other.launch),
        "arms": (_arms(one.arms), _arms(other.arms)),
        "load": (dict(one.load), dict(other.load)),
        "NCCL and CUDA variables in the environment": (dict(one.environ), dict(other.environ)),
        "GPUs, driver or NCCL": (_host(one.fingerprint), _host(other.fingerprint)),
    }
    for name, (before, after) in parts.items():
        if before != after:
            yield name
    if one.sglang_version != other.sglang_version:
        before, after = (each.sglang_version or "not known" for each in (one, other))
        yield f"SGLang (was {before}, is {after})"
    if one.launch == other.launch and _arms(one.arms) == _arms(other.arms):
        for arm in other.arms:
            before, after = one.flags.get(arm.name, {}), other.flags.get(arm.name, {})
            if changed := changed_flags(before, after):
                yield f"flags of {arm.name}: {', '.join(changed)}"
                return  # those of the other arms come from the same file


def _arms(arms: Sequence[Arm]) -> list[object]:
    return [
        (arm.name, arm.argv, sorted(arm.profile.settings.items()) if arm.profile else [])
        for arm in arms
    ]


def _host(fingerprint: Fingerprint | None) -> object:
    return None if fingerprint is None else fingerprint.to_json()
