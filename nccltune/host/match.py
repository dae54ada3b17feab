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
    needed, seen = needed_gpus(command), len(here.gpu_names)
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


def group_of(made_on: Fingerprint, here: Fingerprint) -> Sequence[int]:
    """Return the GPUs that a profile was found on, else as many as it needs, in order.

    For comparing a host where no launch says which of its GPUs are meant.
    """
    places = {uuid: place for place, uuid in enumerate(here.gpu_uuids)}
    if made_on.gpu_uuids and all(uuid in places for uuid in made_on.gpu_uuids):
        return [places[uuid] for uuid in made_on.gpu_uuids]
    return range(min(made_on.world_size, len(here.gpu_names)))


def has_full_nvlink(here: Fingerprint | None, command: LaunchCommand) -> bool | None:
    """Tell whether NVLink joins every two GPUs of each tensor-parallel group of a launch.

    None where some link is not known, where groups differ in it, or where the launch needs more
    GPUs than it sees.

    Args:
        here: every GPU that the launch sees, in its order; None where that could not be read.
        command: the launch.
    """
    if here is None or needed_gpus(command) > len(here.gpu_names):
        return None
    answers = {_is_joined(here, group) for group in gpu_groups(command)}
    return answers.pop() if len(answers) == 1 else None


def _is_joined(here: Fingerprint, group: Sequence[int]) -> bool | None:
    names = [here.link_matrix[i][j] for i in group for j in group if i != j]
    if any(name is not None and not name.startswith("NV") for name in names):
        return False
    return None if None in names or not names else True


def needed_gpus(command: LaunchCommand) -> int:
    """Return how many GPUs a launch must see for the last of its ranks to find its own."""
    base, step, size = _layout(command)
    replica = (command.dp_size - 1) * command.pp_size * size * step
    return base + replica + (command.pp_size - 1) * size + (size - 1) * step + 1


def gpu_groups(command: LaunchCommand) -> Iterator[range]:
    """Yield the GPUs of every tensor-parallel group on this node, as SGLang hands them out.

    Each stage of a pipeline has its own group, and each replica its own stages. Read in 0.5.15 and
    0.5.23: from one stage to the next it counts GPUs, whatever the step, so that with a step the
    stages lie between one another.
    """
    base, step, size = _layout(command)
    for replica in range(command.dp_size):
        for stage in range(command.pp_size):
            first = base + replica * command.pp_size * size * step + stage * size
            yield range(first, first + size * step, step)


def first_group(command: LaunchCommand, rank_count: int) -> range:
    """Return the GPUs of a launch's first group, were it one of so many ranks on one host."""
    return next(gpu_groups(replace(command, tp_size=rank_count, nnodes=1)))


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
