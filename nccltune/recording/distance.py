"""How far two settings are from each other, from names and values alone: no time has a say."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nccltune import envvars
from nccltune.recording.model import settings_key

if TYPE_CHECKING:
    from nccltune.measurement import Settings

_OCTAVES: Mapping[str, float] = {
    "NCCL_NTHREADS": 3.0,
    "NCCL_LL128_NTHREADS": 3.0,
    "NCCL_MIN_CTAS": 6.0,
    "NCCL_MAX_CTAS": 6.0,
    "NCCL_CGA_CLUSTER_SIZE": 4.0,
    "NCCL_BUFFSIZE": 10.0,
    "NCCL_THREAD_THRESHOLDS": 6.0,
}
"""Variables with an order, and the doublings from one end of their range to the other.

NCCL 2.28.9 takes 64 to 512 threads, 1 to 64 CTAs and clusters of 0 to 8; buffers of 64 KiB to
64 MiB and thresholds of 1 to 64 are what can make sense.
"""


def canonical(settings: Settings) -> dict[str, str]:
    """Bring settings to the form that `distance` compares."""
    return {name: value.casefold() for name, value in envvars.canonical(settings).items()}


def distance(one: Mapping[str, str], other: Mapping[str, str]) -> float:
    """Sum over variables: 1 for set against unset or another word, less for a number nearby.

    Both must be canonical.

    >>> distance({"NCCL_NTHREADS": "256"}, {"NCCL_NTHREADS": "256", "NCCL_PROTO": "allreduce:ll"})
    1.0
    """
    names = sorted(one.keys() | other.keys())
    return sum(_variable_distance(name, one.get(name), other.get(name)) for name in names)


def tie_break(proposal: Settings, candidate: Settings) -> str:
    """Order equally distant candidates by chance, but the same for every equal proposal.

    The order of a file must not decide: it would make a search better or worse by how the recording
    was made.
    """
    text = repr((settings_key(proposal), settings_key(candidate)))
    return hashlib.sha256(text.encode()).hexdigest()


def _variable_distance(name: str, one: str | None, other: str | None) -> float:
    if one == other:
        return 0.0
    octaves = _OCTAVES.get(name)
    if one is None or other is None or octaves is None:
        return 1.0
    if name == "NCCL_THREAD_THRESHOLDS":
        return _list_distance(one.split(), other.split(), octaves)
    return _number_distance(one, other, octaves)


def _list_distance(one: list[str], other: list[str], octaves: float) -> float:
    if len(one) != len(other):
        return 1.0
    parts = (_number_distance(left, right, octaves) for left, right in zip(one, other, strict=True))
    return min(1.0, sum(parts))


def _number_distance(one: str, other: str, octaves: float) -> float:
    """Express doublings between two numbers as a share of the range.

    A negative number means that NCCL decides, so it is a word apart and not a small number.
    """
    try:
        left, right = int(one), int(other)
    except ValueError:
        return 0.0 if one == other else 1.0
    if left < 0 or right < 0:
        return 0.0 if left < 0 and right < 0 else 1.0
    return min(1.0, abs(math.log2(1 + left) - math.log2(1 + right)) / octaves)
