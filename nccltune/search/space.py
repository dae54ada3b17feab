"""The space that a search walks.

Its dimensions, and the way between parameters and NCCL settings.

A dimension is one variable (or one number of NCCL_THREAD_THRESHOLDS); the choice ``None`` leaves it
to NCCL. Domains come from the catalogue, which knows NCCL in general and no recording.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna.distributions import BaseDistribution, CategoricalDistribution

from nccltune.envvars import canonical, search_domain

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from nccltune.measurement import Settings
    from nccltune.recording import Manifest

THRESHOLDS = "NCCL_THREAD_THRESHOLDS"
RING_LL = "thread_threshold_ring_ll"
TREE_LL = "thread_threshold_tree_ll"
_THRESHOLD_POSITIONS = {TREE_LL: 0, RING_LL: 3}
"""Where a number stands among the six: tree LL, LL128, Simple, then ring LL, LL128, Simple."""

_THRESHOLD_COUNT = 6
_KEEP_THRESHOLD = "-2"
_THRESHOLD_CHOICES = ("1", "2", "4", "8", "16", "32")

_ALWAYS = (
    "NCCL_PROTO",
    "NCCL_ALGO",
    "NCCL_NTHREADS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_BUFFSIZE",
)

SPARSE_SIZES = (1, 2, 2, 3)
"""How many dimensions a drawn candidate of a recording sets: most settings do nothing or harm
alone, and a dense draw from the whole space almost always holds one that ruins it."""

Params = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the space depends on.

    Attributes:
        is_ll128_offered: NCCL itself considers LL128 here; naming it elsewhere bypasses a hardware
            check.
        has_clusters: GPUs of compute capability 9.0 or newer, which know thread-block clusters.
        has_full_nvlink: every pair of GPUs is linked; without, the path between GPUs is worth
            searching.
        uses_shm: neighbours talk through host memory.
    """

    is_ll128_offered: bool
    has_clusters: bool
    has_full_nvlink: bool
    uses_shm: bool


_CLUSTER_GPUS = re.compile(r"\bG?[HB]\d{3}\b")
"""Names of GPUs with thread-block clusters, where only a name was recorded: H100, H200, GH200,
B200, GB200."""


def facts_of_recording(manifest: Manifest) -> HostFacts:
    """Return what a recording says of its host: from its description, never from its times."""
    uses_shm = manifest.base_environment.get("NCCL_P2P_DISABLE") == "1"
    # The word stands for every pair; links that are counted, as NV4, may join some GPUs only.
    has_nvlink = re.search(r"\bNVLink\b", manifest.gpus) is not None
    return HostFacts(
        is_ll128_offered=has_nvlink and not uses_shm,
        has_clusters=_CLUSTER_GPUS.search(manifest.gpus) is not None,
        has_full_nvlink=has_nvlink,
        uses_shm=uses_shm,
    )


class Space:
    """Dimensions of one search.

    Args:
        facts: of the host or recording.
        pinned: variables that the operator has set; they hold in every launch and are not searched.
    """

    def __init__(self, facts: HostFacts, pinned: Settings) -> None:
        taken = set(canonical(pinned))
        names = [name for name in _ALWAYS if name not in taken]
        if facts.has_clusters and "NCCL_CGA_CLUSTER_SIZE" not in taken:
            names.append("NCCL_CGA_CLUSTER_SIZE")
        if not facts.has_full_nvlink and not taken & {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"}:
            names += ["NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"]
        if facts.uses_shm and "NCCL_SHM_LOCALITY" not in taken:
            names.append("NCCL_SHM_LOCALITY")
        self._choices: dict[str, tuple[str | None, ...]] = {
            name: (None, *search_domain(name)) for name in names
        }
        if not facts.is_ll128_offered and "NCCL_PROTO" in self._choices:
            kept = (c for c in self._choices["NCCL_PROTO"] if c is None or "LL128" not in c)
            self._choices["NCCL_PROTO"] = tuple(kept)
        if THRESHOLDS not in taken:
            for dimension in _THRESHOLD_POSITIONS:
                self._choices[dimension] = (None, *_THRESHOLD_CHOICES)

    @property
    def choices(self) -> Mapping[str, tuple[str | None, ...]]:
        """Every dimension with its choices in the order of their values, ``None`` first."""
        return self._choices

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The space as Optuna has it."""
        return {name: CategoricalDistribution(choices) for name, choices in self._choices.items()}

    @property
    def dimension_count(self) -> int:
        """How many dimensions there are."""
        return len(self._choices)

    def single_choices(self) -> list[tuple[str, str]]:
        """Return every choice of every dimension, but for leaving it alone."""
        return [
            (name, choice)
            for name, choices in self._choices.items()
            for choice in choices
            if choice is not None
        ]

    def sparse_params(self, rng: random.Random) -> Iterator[dict[str, str | None]]:
        """Draw parameters that set only a few dimensions, for ever.

        Dimensions are dealt like cards, so that each comes up once before any comes up again.
        """
        deck: list[str] = []
        while True:
            chosen: set[str] = set()
            for _ in range(min(rng.choice(SPARSE_SIZES), len(self._choices))):
                if not deck:
                    deck = sorted(self._choices)
                    rng.shuffle(deck)
                chosen.add(deck.pop())
            drawn: dict[str, str | None] = dict.fromkeys(self._choices)
            for name in sorted(chosen):
                drawn[name] = rng.choice(self._choices[name][1:])
            yield drawn

    def settings(self, params: Params) -> dict[str, str]:
        """Turn parameters into the settings that a launch gets.

        A lower bound on channels above the upper one means the upper one to NCCL; it is written so.
        """
        found = {k: v for k, v in params.items() if v is not None and k not in _THRESHOLD_POSITIONS}
        numbers = [_KEEP_THRESHOLD] * _THRESHOLD_COUNT
        for dimension, position in _THRESHOLD_POSITIONS.items():
            numbers[position] = params.get(dimension) or _KEEP_THRESHOLD
        if set(numbers) != {_KEEP_THRESHOLD}:
            found[THRESHOLDS] = " ".join(numbers)
        low, high = found.get("NCCL_MIN_CTAS"), found.get("NCCL_MAX_CTAS")
        if low is not None and high is not None and int(low) > int(high):
            found["NCCL_MIN_CTAS"] = high
        if found.get("NCCL_P2P_DISABLE") == "1":
            found.pop("NCCL_P2P_LEVEL", None)
        return found

    def params(self, settings: Settings) -> dict[str, str | None] | None:
        """Turn settings into parameters, or None where the space cannot express them.

        Settings of variables outside the space are passed over only when they are the folk spelling
        of something in it (see ``envvars.canonical``) or a P2P level on a host whose GPUs are all
        linked, where it changes nothing.
        """
        known = canonical(settings)
        known.pop("NCCL_P2P_LEVEL" if "NCCL_P2P_LEVEL" not in self._choices else "", None)
        params: dict[str, str | None] = dict.fromkeys(self._choices)
        for name, value in known.items():
            if name == THRESHOLDS:
                numbers = _threshold_params(value)
                if numbers is None:
                    return None
                params |= numbers
            else:
                params[name] = value
        is_inside = all(
            name in self._choices and value in self._choices[name] for name, value in params.items()
        )
        return params if is_inside else None


def _threshold_params(value: str) -> dict[str, str | None] | None:
    """Split a canonical NCCL_THREAD_THRESHOLDS, or None where it sets others than are searched."""
    numbers = value.split()
    if len(numbers) != _THRESHOLD_COUNT:
        return None
    searched = {
        dimension: None if numbers[position] == _KEEP_THRESHOLD else numbers[position]
        for dimension, position in _THRESHOLD_POSITIONS.items()
    }
    kept = _THRESHOLD_COUNT - sum(number is not None for number in searched.values())
    return searched if numbers.count(_KEEP_THRESHOLD) == kept else None
