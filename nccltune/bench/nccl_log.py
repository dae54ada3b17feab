"""What NCCL says it did, read from its own log.

Only the TUNING lines tell the truth about algorithm and protocol; kernel names do not. They appear
at capture, never at replay, so they come from a launch of their own. Formats: 2.24 to 2.31 (``Algo
RING proto LL channel{Lo..Hi}={0..4}``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_CHOICE = re.compile(
    r"AllReduce: (?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)"
    r" channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\}"
)
_SYMMETRIC = re.compile(
    r"AllReduce \[Symmetric\]: (?P<bytes>\d+) Bytes -> Kernel (?P<kernel>\w+)"
    r" nchannels (?P<channels>\d+)"
)
_SET = re.compile(r"(?P<name>NCCL_\w+) set by environment to (?P<value>.*?)\.?$")
_VIA = re.compile(
    r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\] (?:\[\w+\] )?via (?P<how>[A-Z0-9]+)"
)
_CELL = re.compile(r"(\d+\.\d+)/\s*(\d+\.\d+)")
_CELLS_PER_ALGORITHM = 3
_RING_LL128 = 1 * _CELLS_PER_ALGORITHM + 1
"""Column order of the first AllReduce row: Tree LL, LL128, Simple, then Ring LL, LL128, Simple."""


@dataclass(frozen=True, slots=True)
class NcclReport:
    """One launch in NCCL's words.

    Attributes:
        used: payload size in bytes -> what carried it, e.g. ``ring LL, 5 channels``.
        confirmed: variables that NCCL said it took, with their values.
        transports: how neighbours are connected: ``P2P``, ``SHM``, ``NET``.
        is_ll128_offered: whether NCCL itself would consider Ring LL128 here; None when the table
            was not seen.
    """

    used: dict[int, str] = field(default_factory=dict)
    confirmed: dict[str, str] = field(default_factory=dict)
    transports: frozenset[str] = frozenset()
    is_ll128_offered: bool | None = None


def parse_nccl_log(lines: Iterable[str]) -> NcclReport:
    """Collect what logs say; unknown lines are passed over, the last word on a size counts."""
    used: dict[int, str] = {}
    confirmed: dict[str, str] = {}
    transports: set[str] = set()
    is_ll128_offered: bool | None = None
    for line in lines:
        if match := _CHOICE.search(line):
            count = int(match["high"]) - int(match["low"]) + 1
            plural = "" if count == 1 else "s"
            used[int(match["bytes"])] = (
                f"{match['algo'].lower()} {_protocol(match['proto'])}, {count} channel{plural}"
            )
        elif match := _SYMMETRIC.search(line):
            used[int(match["bytes"])] = f"{match['kernel']}, {match['channels']} channels"
        elif match := _SET.search(line):
            confirmed[match["name"]] = match["value"]
        elif match := _VIA.search(line):
            transports.add(match["how"])
        elif is_ll128_offered is None and "AllReduce |" in line:
            cells = _CELL.findall(line)
            if len(cells) > _RING_LL128:
                is_ll128_offered = float(cells[_RING_LL128][1]) > 0.0
    return NcclReport(used, confirmed, frozenset(transports), is_ll128_offered)


def _protocol(name: str) -> str:
    return "Simple" if name.upper() == "SIMPLE" else name
