"""Which stored boots a running server may be held against: same host, model, flags and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.host.fingerprint import MatchKind, compare
from nccltune.sglang.command import parse_launch
from nccltune.stats import MIN_NOISE_LAUNCH_COUNT
from nccltune.verify.judging.comparison import settings_of
from nccltune.verify.judging.evidence import gather_evidence
from nccltune.verify.sameness import resolved_flags

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.verify.model import Arm, Boot
    from nccltune.verify.record import VerifyRecord
    from nccltune.verify.sameness import Flags

SAME_LOAD = ("concurrency", "tokens")
FREE_FLAGS = frozenset(
    {
        "admin_api_key",
        "api_key",
        "decode_log_interval",
        "dist_init_addr",
        "enable_metrics",
        "host",
        "log_level",
        "log_level_http",
        "log_requests",
        "nccl_port",
        "port",
        "served_model_name",
    }
)
"""Flags that do not change how long a step takes."""

_FILE_FLAG = "config"
"""What that file says stands among the flags; its name says nothing."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Boots of earlier verifies that a running server may be held against.

    Attributes:
        boots: of the matching arms, from the newest verify back.
        verify_ids: where they come from.
        created_at: of the newest of them; None where there is none.
        differing: facts of the host that changed since, though the GPUs are the same.
        misses: why other stored verifies do not serve, one sentence each.
    """

    boots: tuple[Boot, ...] = ()
    verify_ids: tuple[str, ...] = ()
    created_at: str | None = None
    differing: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()


def find_baseline(
    records: Iterable[VerifyRecord],
    *,
    argv: Sequence[str],
    settings: Mapping[str, str],
    fingerprint: Fingerprint | None,
    load: Mapping[str, object],
    environ: Mapping[str, str],
) -> Baseline:
    """Collect stored boots of the same host, model, flags, variables, settings and load.

    Only as many verifies as it takes to know their spread. Records of running servers are left
    out: the same boot measured twice is one boot.

    Args:
        records: newest first; none is asked for once there are boots enough.
        argv: the running server's command.
        settings: that it should have: those of the active or the given profile, or none.
        fingerprint: of this host.
        load: plan of the load, as a record keeps it.
        environ: the running server's variables, as a record keeps them.
    """
    baseline = Baseline()
    own = without_settings(environ, settings)
    for record in records:
        if record.url:
            continue
        found = list(_matching(record, argv, settings, load))
        problem, differing = _host(record, fingerprint)
        problem = problem or _other_variables(record.environ, own)
        if problem or not found:
            miss = problem or _arm_miss(record, argv, settings, load)
            baseline = replace(baseline, misses=(*baseline.misses, f"verify {record.id}: {miss}"))
            continue
        baseline = replace(
            baseline,
            boots=(*baseline.boots, *found),
            verify_ids=(*baseline.verify_ids, record.id),
            created_at=baseline.created_at or record.created_at,
            differing=tuple(dict.fromkeys((*baseline.differing, *differing))),
        )
        if len(baseline.boots) >= MIN_NOISE_LAUNCH_COUNT:
            break
    return baseline


def without_settings(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return a server's variables as they were before its settings, which one that runs has too."""
    return dict(environ.items() - settings.items())


def _matching(
    record: VerifyRecord,
    argv: Sequence[str],
    settings: Mapping[str, str],
    load: Mapping[str, object],
) -> Iterator[Boot]:
    """Yield boots of the arms that are the same launch under the same settings and load."""
    if any(record.load.get(key) != load.get(key) for key in SAME_LOAD):
        return
    for arm in record.arms:
        if settings_of(arm) != dict(settings) or _differing_flags(record, arm, argv):
            continue
        keys = gather_evidence((arm,), [b for b in record.boots if b.arm == arm.name])
        if not keys.is_lost:
            yield from (boot for boot in record.boots if boot.arm == arm.name)


def _differing_flags(record: VerifyRecord, arm: Arm, running: Sequence[str]) -> tuple[str, ...]:
    """Name flags in which two launches differ, leaving out those that change no time."""
    try:
        ours, theirs = _flags_of(record, arm), resolved_flags(parse_launch(running))
    except NccltuneError:
        return ("a command that cannot be read",)
    names = sorted({*ours, *theirs} - FREE_FLAGS - {_FILE_FLAG})
    return tuple(f"--{n.replace('_', '-')}" for n in names if ours.get(n) != theirs.get(n))


def _flags_of(record: VerifyRecord, arm: Arm) -> Flags:
    """Return the flags that an arm was started with: its ``--config`` file may be edited since.

    Older records do not hold them.
    """
    kept = record.flags.get(arm.name)
    return resolved_flags(parse_launch(arm.argv)) if kept is None else kept


def _host(record: VerifyRecord, here: Fingerprint | None) -> tuple[str, tuple[str, ...]]:
    """Return why a record's host is not this one, and what changed where it is."""
    if here is None or record.fingerprint is None:
        return "the GPUs of one of the two cannot be read", ()
    match = compare(record.fingerprint, here)
    if match.kind is MatchKind.FOREIGN:
        unknown = [
            name
            for name in match.differing
            if None in (getattr(record.fingerprint, name, 0), getattr(here, name, 0))
        ]
        if unknown:
            return f"{', '.join(unknown)} not known, so that it may be another host", ()
        return f"made on another host ({', '.join(match.differing)})", ()
    if record.fingerprint.gpu_uuids != here.gpu_uuids:
        return "made on other GPUs of the same kind", ()
    return "", match.differing


def _other_variables(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Say which variables of NCCL two servers were not started with alike; empty for none."""
    names = sorted(
        name
        for name in {*ours, *theirs}
        if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
        if ours.get(name) != theirs.get(name)
    )
    return f"started under another environment ({', '.join(names)})" if names else ""


def _arm_miss(
    record: VerifyRecord,
    argv: Sequence[str],
    settings: Mapping[str, str],
    load: Mapping[str, object],
) -> str:
    """Say what keeps a record of this host from serving."""
    for key in SAME_LOAD:
        if record.load.get(key) != load.get(key):
            return f"measured with {key} {record.load.get(key)}, and this is {load.get(key)}"
    flags = [_differing_flags(record, arm, argv) for arm in record.arms]
    fewest = min(flags, key=len, default=())
    if fewest:
        return f"the launch differs in {', '.join(fewest)}"
    if all(settings_of(arm) != dict(settings) for arm in record.arms):
        return "no arm with the settings that this server should have"
    return "no boot of it serves: none was finished, or the profile was not in effect"
