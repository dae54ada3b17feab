"""The host facts that a profile depends on, and whether two hosts agree in them.

Pure: ``nccltune.host.hardware`` and the rank processes read the facts. A fact that could not be
read is None, never a stand-in value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum


class MatchKind(StrEnum):
    """How far a profile made on one host holds on another."""

    IDENTICAL = "identical"
    """The same host in the same state: what was measured holds."""

    EQUIVALENT = "equivalent"
    """The same kind of host: worth using, but not verified there."""

    FOREIGN = "foreign"
    """Another kind of host: what was measured says nothing."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a comparison of two fingerprints found.

    Attributes:
        differing: names of the fields that differ or cannot be compared; for a foreign host only
            those that make it foreign.
    """

    kind: MatchKind
    differing: tuple[str, ...] = ()


LinkMatrix = tuple[tuple[str | None, ...], ...]
"""By rank, twice: ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``; ``X`` with itself."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One host as NCCL meets it, in rank order.

    Attributes:
        numa_nodes: by rank, the NUMA node of its GPU.
        world_size: ranks of the communicator; more than GPUs where they share one.
        nccl_version: of the library that is loaded, whatever ``NCCL_VERSION`` in an image says.
        is_partial: some facts are hidden here (an unprivileged container, say), so that nothing can
            be concluded from them.
    """

    gpu_names: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    driver_version: str | None
    nccl_version: str | None
    link_matrix: LinkMatrix
    numa_nodes: tuple[int | None, ...]
    world_size: int
    torch_version: str | None = None
    is_partial: bool = False

    def to_json(self) -> dict[str, object]:
        """Return what a profile keeps; ``from_json`` reads it back."""
        written: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return written

    @classmethod
    def from_json(cls, data: object) -> Fingerprint:
        """Read what ``to_json`` wrote, also after a round trip through a JSON file.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type; the message names it.
        """
        if not isinstance(data, Mapping):
            raise _bad(f"expected an object, not {data!r}")
        _check_keys(data)
        fingerprint = cls(
            gpu_names=tuple(_text(x, "gpu_names") for x in _items(data, "gpu_names")),
            gpu_uuids=tuple(_text(x, "gpu_uuids") for x in _items(data, "gpu_uuids")),
            driver_version=_text_or_none(data, "driver_version"),
            nccl_version=_text_or_none(data, "nccl_version"),
            link_matrix=_matrix(data),
            numa_nodes=tuple(_node(x) for x in _items(data, "numa_nodes")),
            world_size=_count(data.get("world_size")),
            torch_version=_text_or_none(data, "torch_version"),
            is_partial=_flag(data.get("is_partial", False)),
        )
        fingerprint._check_shape()
        return fingerprint

    def digest(self) -> str:
        """Return a hex name of these facts; equal facts have equal digests."""
        # Loaded here, for it brings OpenSSL along, and most who compare hosts name none.
        import hashlib

        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _check_shape(self) -> None:
        count = len(self.gpu_names)
        rows = {len(row) for row in self.link_matrix} or {0}
        sizes = {len(self.gpu_uuids), len(self.numa_nodes), len(self.link_matrix), *rows}
        if count and sizes != {count}:
            raise ValueError(
                f"fingerprint: {count} gpu_names need as many gpu_uuids, numa_nodes and rows and"
                f" columns of link_matrix, but there are {sorted(sizes)}"
            )


def compare(made_on: Fingerprint, here: Fingerprint) -> Match:
    """Say whether what holds on one host holds on the other.

    Hidden facts count as equal only between the very same GPUs; elsewhere they make a host foreign,
    because a profile that was copied between different topologies can halve the speed it is meant
    to raise.
    """
    is_same_gpus = made_on.gpu_uuids == here.gpu_uuids
    foreign = [
        name for name, holds in _required(made_on, here, is_same_gpus=is_same_gpus) if not holds
    ]
    if foreign:
        return Match(MatchKind.FOREIGN, tuple(foreign))
    names = [field.name for field in fields(Fingerprint)]
    if None in (made_on.torch_version, here.torch_version):
        names.remove("torch_version")  # whoever may not import torch does not know it
    differing = tuple(name for name in names if getattr(made_on, name) != getattr(here, name))
    return Match(MatchKind.EQUIVALENT if differing else MatchKind.IDENTICAL, differing)


def _required(
    made_on: Fingerprint, here: Fingerprint, *, is_same_gpus: bool
) -> list[tuple[str, bool]]:
    """List what must agree for a host to be of the same kind, with whether it does."""
    is_hidden = made_on.is_partial or here.is_partial
    links = _flat(made_on.link_matrix), _flat(here.link_matrix)
    return [
        ("gpu_names", made_on.gpu_names == here.gpu_names),
        ("world_size", made_on.world_size == here.world_size),
        ("nccl_version", _is_known_equal(made_on.nccl_version, here.nccl_version)),
        ("driver_version", _driver_branch(made_on) == _driver_branch(here)),
        ("link_matrix", _agrees(*links, use_wildcards=is_same_gpus)),
        ("numa_nodes", _agrees(*_numa_patterns(made_on, here), use_wildcards=is_same_gpus)),
        ("is_partial", is_same_gpus or not is_hidden),
    ]


def _is_known_equal(one: str | None, other: str | None) -> bool:
    return one is not None and one == other


def _driver_branch(fingerprint: Fingerprint) -> str | None:
    """Return ``580`` of ``580.159.04``: patches of one branch count as the same kind of host."""
    version = fingerprint.driver_version
    return None if version is None else version.split(".", maxsplit=1)[0]


def _flat(matrix: LinkMatrix) -> list[str | None]:
    return [name for row in matrix for name in row]


def _numa_patterns(
    one: Fingerprint, other: Fingerprint
) -> tuple[list[int | None], list[int | None]]:
    """Return which GPUs live together, on both hosts, for those whose node is known on both."""
    known = {
        rank
        for rank, nodes in enumerate(zip(one.numa_nodes, other.numa_nodes, strict=False))
        if None not in nodes
    }
    return _pattern(one.numa_nodes, known), _pattern(other.numa_nodes, known)


def _pattern(nodes: Sequence[int | None], known: Collection[int]) -> list[int | None]:
    """Number NUMA nodes by first appearance: who lives together matters, not the node's name.

    >>> _pattern([1, 1, 0, None], {0, 1, 2})
    [0, 0, 1, None]
    """
    names: dict[int | None, int] = {}
    return [
        names.setdefault(node, len(names)) if rank in known else None
        for rank, node in enumerate(nodes)
    ]


def _agrees(
    one: Sequence[object | None], other: Sequence[object | None], *, use_wildcards: bool
) -> bool:
    if len(one) != len(other):
        return False
    return all(
        a == b if a is not None and b is not None else use_wildcards
        for a, b in zip(one, other, strict=True)
    )


def _bad(reason: str) -> ValueError:
    return ValueError(f"fingerprint: {reason}")


def _check_keys(data: Mapping[object, object]) -> None:
    names = {field.name for field in fields(Fingerprint)}
    unknown = sorted(str(key) for key in data if key not in names)
    if unknown:
        raise _bad(f"unknown field {unknown[0]!r}")
    missing = sorted(names - data.keys() - {"torch_version", "is_partial"})
    if missing:
        raise _bad(f"no field {missing[0]!r}")


def _items(data: Mapping[object, object], name: str) -> Sequence[object]:
    value = data[name]
    if not isinstance(value, list | tuple):
        raise _bad(f"{name} must be a list, not {value!r}")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _bad(f"{name} must hold text, not {value!r}")
    return value


def _text_or_none(data: Mapping[object, object], name: str) -> str | None:
    value = data.get(name)
    return None if value is None else _text(value, name)


def _matrix(data: Mapping[object, object]) -> LinkMatrix:
    rows = []
    for row in _items(data, "link_matrix"):
        if not isinstance(row, list | tuple):
            raise _bad(f"link_matrix must hold lists, not {row!r}")
        rows.append(tuple(None if name is None else _text(name, "link_matrix") for name in row))
    return tuple(rows)


def _node(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _bad(f"numa_nodes must hold numbers or null, not {value!r}")


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise _bad(f"world_size must be a positive number, not {value!r}")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _bad(f"is_partial must be true or false, not {value!r}")
