"""How far a profile holds on the GPUs that one launch uses.

Pure. A launch may use some of the GPUs that it sees, and several groups of them; the worst match
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from nccltune.host.fingerprint import Fingerprint, MatchKind, compare

if TYPE_CHECKING:
    from nccltune.sglang.command import LaunchCommand

_SHOWN_FIELDS = ("driver_version", "nccl_version", "world_size")
_FLAT_NAME = "PHB"
_MAX_DIGITS = 9
_ORDER = (MatchKind.IDENTICAL, MatchKind.EQUIVALENT, MatchKind.FOREIGN)


class HostMatch(NamedTuple):
    """What the comparison came to.

    Attributes:
        kind: None where nothing could be compared.
        reason: what differs, or why nothing could be compared, in words; empty for the same host.
    """

    kind: MatchKind | None
    reason: str = ""


def match_host(
    made_on: Mapping[str, object],
    here: Fingerprint | None,
    command: LaunchCommand,
    *,
    host_problem: str = "",
) -> HostMatch:
    """Compare the host that a profile was made on with the GPUs that a launch will use.

    Args:
        made_on: the profile's fingerprint.
        here: every GPU that the launch sees, in its order; None where that could not be read.
        command: the launch.
        host_problem: why ``here`` is None.
    """
    try:
        wanted = Fingerprint.from_json(made_on)
    except ValueError as error:
        return HostMatch(None, f"what it was made for cannot be read: {error}")
    if here is None:
        reason = host_problem or "its GPUs cannot be read"
        return HostMatch(None, f"this host is unknown: {reason}")
    needed, seen = _needed(command), len(here.gpu_names)
    if needed > seen:  # asked first, for a launch may ask for any number
        return HostMatch(MatchKind.FOREIGN, f"the launch needs {needed} GPUs and sees {seen}")
    worst = HostMatch(MatchKind.IDENTICAL)
    for group in gpu_groups(command):
        found = _compare(wanted, restricted(here, group))
        if _rank(found) > _rank(worst):
            worst = found
    return worst


def restricted(here: Fingerprint, group: Sequence[int]) -> Fingerprint:
    """Return the part of a host that some of its GPUs make up, in their order."""
    links = tuple(tuple(here.link_matrix[i][j] for j in group) for i in group)
    nodes = tuple(here.numa_nodes[i] for i in group)
    names = [links[i][j] for i in range(len(group)) for j in range(len(group)) if i != j]
    # The rule of Hardware.is_partial, for a part hides no more than it lacks itself.
    is_flattened = len(group) > 2 and set(names) == {_FLAT_NAME}
    return replace(
        here,
        gpu_names=tuple(here.gpu_names[i] for i in group),
        gpu_uuids=tuple(here.gpu_uuids[i] for i in group),
        link_matrix=links,
        numa_nodes=nodes,
        world_size=len(group),
        is_partial=is_flattened or None in names or None in nodes,
    )


def _needed(command: LaunchCommand) -> int:
    """Return how many GPUs a launch must see for the last of its ranks to find its own."""
    base, step, size = _layout(command)
    return base + (command.dp_size * command.pp_size * size - 1) * step + 1


def gpu_groups(command: LaunchCommand) -> Iterator[tuple[int, ...]]:
    """Yield the GPUs of every tensor-parallel group on this node, as SGLang 0.5.23 hands them out.

    Each stage of a pipeline has its own group, and each replica its own stages.
    """
    base, step, size = _layout(command)
    for idx in range(command.dp_size * command.pp_size):
        first = base + idx * size * step
        yield tuple(first + rank * step for rank in range(size))


def _layout(command: LaunchCommand) -> tuple[int, int, int]:
    """Return the first GPU, the step from one to the next, and the ranks of a group here."""
    base = _number(command, "base_gpu_id", 0)
    step = max(1, _number(command, "gpu_id_step", 1))
    return base, step, max(1, command.tp_size // command.nnodes)


def _number(command: LaunchCommand, name: str, default: int) -> int:
    value = command.value(name) or ""
    is_number = value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS
    return int(value) if is_number else default


def _compare(wanted: Fingerprint, here: Fingerprint) -> HostMatch:
    match = compare(wanted, here)
    return HostMatch(match.kind, _describe(wanted, here, match.differing))


def _describe(wanted: Fingerprint, here: Fingerprint, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        if name == "gpu_names":
            parts.append(f"gpu_names ({_count_names(wanted)} there, {_count_names(here)} here)")
        elif name in _SHOWN_FIELDS:
            there, now = (getattr(each, name) or "unknown" for each in (wanted, here))
            parts.append(f"{name} ({there} there, {now} here)")
        else:
            parts.append(name)
    return ", ".join(parts)


def _count_names(host: Fingerprint) -> str:
    """Write ``8x NVIDIA H200``, in order, for GPU models as ranks have them."""
    counts: list[tuple[str, int]] = []
    for name in host.gpu_names:
        if counts and counts[-1][0] == name:
            counts[-1] = (name, counts[-1][1] + 1)
        else:
            counts.append((name, 1))
    return " + ".join(f"{count}x {name}" for name, count in counts) or "no GPU"


def _rank(match: HostMatch) -> int:
    return -1 if match.kind is None else _ORDER.index(match.kind)
