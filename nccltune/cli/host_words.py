"""How the host that a profile was made on reads for people."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

UNKNOWN = "unknown"
_ITSELF = "X"


def host_facts(fingerprint: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield name and words of each fact; the file may hold anything."""
    for name, value in fingerprint.items():
        if name == "is_partial":
            if value:
                yield "hidden", "some facts could not be read there: nothing is concluded from them"
        elif name == "link_matrix":
            yield "links", _link_words(value)
        else:
            yield name.replace("_", " "), _words(value)


def _link_words(matrix: object) -> str:
    """Name the one kind of link that there is, else write a small matrix.

    >>> _link_words([["X", "NV18"], ["NV18", "X"]])
    'NV18 between all'
    >>> print(_link_words([["X", "NV18", "SYS"], ["NV18", "X", None], ["SYS", None, "X"]]))
    X     NV18     SYS
    NV18  X        unknown
    SYS   unknown  X
    """
    rows = matrix if isinstance(matrix, list | tuple) else ()
    if not rows or not all(isinstance(row, list | tuple) for row in rows):
        return _words(matrix)
    cells = [[_words(cell) for cell in row] for row in rows]
    between = {cell for row in cells for cell in row} - {_ITSELF}
    if not between:
        return "none: one GPU"
    if len(between) == 1:
        return f"{between.pop()} between all"
    return "\n".join("  ".join(row).rstrip() for row in _aligned(cells))


def _aligned(cells: Sequence[Sequence[str]]) -> Iterator[Iterator[str]]:
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    for row in cells:
        yield (cell.ljust(width) for cell, width in zip(row, widths, strict=False))


def _words(value: object) -> str:
    """Write what JSON can hold, the way people would.

    >>> _words(["NVIDIA H200", None]), _words(True), _words({"a": [1, 2]})
    ('NVIDIA H200, unknown', 'yes', 'a 1, 2')
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{name} {_words(each)}" for name, each in value.items()) or "none"
    return str(value)
