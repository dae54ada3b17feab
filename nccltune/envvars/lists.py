"""The list grammar of NCCL_ALGO and NCCL_PROTO (graph/tuning.cc, since 2.24).

``[elements;]function:elements;function:elements``: commas between elements, no blanks, letters of
either case. An entry without a function counts for every collective, and only the first may be so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FUNCTIONS = ("allreduce", "allgather", "broadcast", "reduce", "reducescatter")

ALGORITHMS = ("Ring", "Tree", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")

# What one host can use while NCCL_NVLS_ENABLE is 0, as SGLang has it: all-reduce knows a tree,
# the other collectives only the ring (graph/tuning.cc, 2.28.9).
_USABLE_ALGORITHMS = {function: {"Ring"} for function in FUNCTIONS} | {
    "allreduce": {"Ring", "Tree"}
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a list: elements in NCCL's spelling; ``function`` empty for every collective."""

    function: str
    elements: tuple[str, ...]


class ListProblem(ValueError):
    """A list that NCCL would refuse or take for something else; the text says which."""


def parse_list(value: str, elements: tuple[str, ...]) -> tuple[Entry, ...]:
    """Read a list, elements in the order of ``elements``.

    Raises:
        ListProblem: an unknown name, a blank, a ``^``, or an entry in the wrong place.
    """
    advice = f"write allreduce: and {', '.join(elements[:-1])} or {elements[-1]}"
    if " " in value:
        raise ListProblem(f"NCCL refuses blanks in a list when it starts; {advice}")
    if "^" in value:
        harm = "LL128 too, past the hardware check" if "LL128" in elements else "in newer NCCL more"
        raise ListProblem(f"^ turns on everything that is not named, {harm}; {advice}")
    entries: list[Entry] = []
    for text in value.split(";"):
        head, colon, tail = text.rpartition(":")
        function = head.lower()
        if colon and function not in FUNCTIONS:
            known = ", ".join(FUNCTIONS)
            raise ListProblem(f"NCCL refuses the prefix {head!r} when it starts; known are {known}")
        if not colon and entries:
            raise ListProblem(f"NCCL wants a prefix for every entry but the first; {advice}")
        if function in {entry.function for entry in entries}:
            raise ListProblem(f"{head!r} stands twice and NCCL uses the last; keep one")
        entries.append(Entry(function, _in_order(tail.split(","), elements, advice)))
    return tuple(entries)


def _in_order(names: Iterable[str], elements: tuple[str, ...], advice: str) -> tuple[str, ...]:
    by_lower = {element.lower(): element for element in elements}
    found = set()
    for name in names:
        if not name:
            raise ListProblem(f"it has an empty place; {advice}")
        if name.lower() not in by_lower:
            raise ListProblem(f"NCCL refuses the name {name!r} when it starts; {advice}")
        found.add(by_lower[name.lower()])
    return tuple(element for element in elements if element in found)


def algorithms(value: str) -> str | None:
    """Check NCCL_ALGO: names that exist, and an algorithm left for every collective."""
    try:
        entries = parse_list(value, ALGORITHMS)
    except ListProblem as problem:
        return str(problem)
    for function, elements in ((entry.function, entry.elements) for entry in entries):
        named = ",".join(elements)
        if not function and "Ring" not in elements:
            usable = "Tree" if "Tree" in elements else "Ring"
            return (
                "without a prefix it leaves broadcast and all-gather no algorithm, and the server "
                f"stops at the first of them; write allreduce:{usable}"
            )
        if function and not _USABLE_ALGORITHMS[function] & set(elements):
            usable = " or ".join(f"{function}:{it}" for it in sorted(_USABLE_ALGORITHMS[function]))
            return (
                f"NCCL has no {named} for {function} on one host without NVLink multicast and "
                f"stops at the first one; write {usable}"
            )
    return None


def protocols(value: str) -> str | None:
    """Check NCCL_PROTO: names that exist, and LL128 only where one collective is named."""
    try:
        entries = parse_list(value, PROTOCOLS)
    except ListProblem as problem:
        return str(problem)
    if not entries[0].function and "LL128" in entries[0].elements:
        return (
            "without a prefix it turns LL128 on for every collective, past the hardware check, "
            "and sums may go wrong; write allreduce:LL128"
        )
    return None


def names_ll128(value: str) -> bool:
    """Tell whether a protocol list switches LL128 on, which only NCCL itself can call safe."""
    try:
        return any("LL128" in entry.elements for entry in parse_list(value, PROTOCOLS))
    except ListProblem:
        return False


def has_prefixless(value: str, elements: tuple[str, ...]) -> bool:
    """Tell whether a list begins with an entry for every collective."""
    try:
        return not parse_list(value, elements)[0].function
    except ListProblem:
        return False


def canonical_list(value: str, elements: tuple[str, ...]) -> str:
    """Spell a list in one way, as far as all-reduce can tell the difference.

    An entry without a prefix becomes an all-reduce entry. A list that cannot be read stays.

    >>> canonical_list("ll", PROTOCOLS), canonical_list("Tree,Ring", ALGORITHMS)
    ('allreduce:LL', 'allreduce:Ring,Tree')
    """
    try:
        entries = parse_list(value, elements)
    except ListProblem:
        return value
    rows = {entry.function or "allreduce": entry.elements for entry in entries}
    ordered = (function for function in FUNCTIONS if function in rows)
    return ";".join(f"{function}:{','.join(rows[function])}" for function in ordered)
