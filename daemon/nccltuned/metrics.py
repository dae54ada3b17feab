"""The metrics, as text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccltune import __version__
from nccltune.live.drift import KeyState, Verdict

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the metrics are made of at one moment.

    Attributes:
        stock: as ``Stock.to_json`` lays it out; None before the first look has ended.
        checked_at_s: when that was, in seconds since 1970.
        is_check_failing: the last look did not come to an end.
        failed_start_count: that speak against the active profile.
        uncounted_failed_start_count: that would, and are of users whose starts do not count.
        is_store_keeper: no other service keeps the store, so that this one may roll back.
        start_counts: starts that are on record, by how they ended.
    """

    stock: Mapping[str, Any] | None
    checked_at_s: float = 0.0
    is_check_failing: bool = False
    failed_start_count: int = 0
    uncounted_failed_start_count: int = 0
    is_store_keeper: bool = True
    rollback_count: int = 0
    start_counts: Mapping[str, int] = field(default_factory=dict)


def format_metrics(snapshot: Snapshot) -> str:
    """Return the whole text."""
    return "".join(_lines(snapshot))


def _lines(snapshot: Snapshot) -> Iterator[str]:
    yield from _metric("build_info", "Version of nccltuned.", [({"version": __version__}, 1)])
    yield from _metric(
        "last_check_timestamp_seconds",
        "When profile, host and servers were looked at last.",
        [({}, snapshot.checked_at_s)],
    )
    yield from _metric(
        "check_failing",
        "1 if the last look did not come to an end.",
        [({}, int(snapshot.is_check_failing))],
    )
    yield from _metric(
        "failed_starts",
        "Failed starts that speak against the active profile.",
        [({}, snapshot.failed_start_count)],
    )
    yield from _metric(
        "uncounted_failed_starts",
        "Failed starts under the active profile of users whose starts do not count.",
        [({}, snapshot.uncounted_failed_start_count)],
    )
    yield from _metric(
        "store_keeper",
        "1 if this service is the one that rolls back in this store.",
        [({}, int(snapshot.is_store_keeper))],
    )
    yield from _metric(
        "rollbacks", "Roll-backs by nccltuned on record.", [({}, snapshot.rollback_count)]
    )
    yield from _metric(
        "recorded_starts",
        "Server starts on record, by how they ended.",
        [({"ending": name}, count) for name, count in sorted(snapshot.start_counts.items())],
    )
    if snapshot.stock is not None:
        yield from _profile_lines(snapshot.stock["active"])
        yield from _server_lines(snapshot.stock["servers"])


def _profile_lines(active: Mapping[str, Any]) -> Iterator[str]:
    labels = {
        "profile": active["name"] or "",
        "digest": active["digest"] or "",
        "match": active["match"] or "unknown",
    }
    is_active = active["name"] is not None
    yield from _metric(
        "profile_info",
        "The active profile, and how far it holds on this host.",
        [(labels, 1)] if is_active else [],
    )
    yield from _metric("profile_active", "1 if a profile is active.", [({}, int(is_active))])
    yield from _metric(
        "profile_degraded",
        "1 if launches should get a profile and get none.",
        [({}, int(active["is_degraded"]))],
    )
    yield from _metric(
        "profile_stale",
        "1 if driver, NCCL or GPUs have changed since the profile was found.",
        [({}, int(active["is_stale"]))],
    )


def _server_lines(servers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    verdicts = Counter(server["verdict"] for server in servers)
    yield from _metric(
        "servers",
        "Running SGLang servers, by what became of the profile in them.",
        [({"verdict": str(verdict)}, verdicts[str(verdict)]) for verdict in Verdict],
    )
    yield from _metric(
        "ranks",
        "Rank processes of running servers.",
        [({}, sum(len(server["ranks"]) for server in servers))],
    )
    samples: list[tuple[Labels, float]] = []
    for server in servers:
        states = Counter(key["state"] for rank in server["ranks"] for key in rank["keys"])
        pid = str(server["pid"])
        samples += [({"pid": pid, "state": str(each)}, states[str(each)]) for each in KeyState]
    yield from _metric(
        "rank_variables",
        "Variables of the profile over all ranks of a server, by what became of them.",
        samples,
    )


def _metric(name: str, text: str, samples: Sequence[tuple[Labels, float]]) -> Iterator[str]:
    full_name = f"nccltune_{name}"
    yield f"# HELP {full_name} {text}\n# TYPE {full_name} gauge\n"
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        braced = f"{{{shown}}}" if shown else ""
        yield f"{full_name}{braced} {_number(value)}\n"


def _number(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
