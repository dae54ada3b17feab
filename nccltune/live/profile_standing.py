"""How the active profile stands on this host right now: usable, verified here, stale, or broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nccltune.host.fingerprint import Fingerprint, MatchKind, compare
from nccltune.host.match import group_of, restricted
from nccltune.inject.marker import settings_digest
from nccltune.profile import source_doubt

if TYPE_CHECKING:
    from nccltune.store import ActiveState

_CHANGES = {
    "driver_version": "the driver",
    "nccl_version": "NCCL",
    "gpu_uuids": "the GPUs",
    "gpu_names": "the GPUs",
    "world_size": "the GPUs",
    "link_matrix": "how the GPUs are linked",
    "numa_nodes": "the NUMA nodes of the GPUs",
}
"""Facts that make a profile stale when they change, in words."""

SEARCH_ADVICE = "nccltune search"
DOCTOR_ADVICE = "nccltune doctor"
VERIFY_ADVICE = "nccltune verify -- CMD"
ANY_HOST_ADVICE = "nccltune run --any-host -- CMD"
EACH_LAUNCH_NEEDS_IT = "this host's GPUs cannot be read, so that each launch needs --any-host"


@dataclass(frozen=True, slots=True)
class LiveProfile:
    """The active profile against this host.

    Attributes:
        name: None where no profile is active.
        problem: why it cannot be used although it is active; empty where it can.
        match: None where it names no host, or nothing could be compared.
        differing: the facts that differ.
        stale: what has changed since it was found, in words.
        is_insisted_on: a person has activated it for this host all the same, so that launches get
            it.
        is_host_unknown: it was found on a host, and nothing of this one can be compared with it, so
            that launches do not get it.
        unknown: what could not be compared, in words; empty where all was.
        advice: a command to run; empty where there is nothing to do.
    """

    name: str | None
    digest: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    previous: str | None = None
    how: str = ""
    action: str = ""
    activated_at: str = ""
    problem: str = ""
    match: MatchKind | None = None
    differing: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    is_insisted_on: bool = False
    is_host_unknown: bool = False
    unknown: str = ""
    advice: str = ""

    @property
    def is_degraded(self) -> bool:
        """Whether launches should get a profile and get none."""
        is_foreign = self.match is MatchKind.FOREIGN and not self.is_insisted_on
        return bool(self.problem) or is_foreign or self.is_host_unknown


def judge_profile(
    active: ActiveState, here: Fingerprint | None, host_problem: str = ""
) -> LiveProfile:
    """Compare the active profile with this host.

    Args:
        active: what the store says.
        here: every GPU of this host; its NCCL may be unknown. None where it cannot be read.
        host_problem: why ``here`` is None.
    """
    profile = active.profile
    live = LiveProfile(
        name=active.name,
        digest=settings_digest(profile.settings) if profile else "",
        settings=dict(profile.settings) if profile else {},
        path=str(active.path),
        previous=active.previous,
        how=active.how,
        action=active.action,
        activated_at=active.activated_at,
        problem=active.problem or "",
    )
    if profile is None:
        return replace(live, advice=_broken_advice(active) if live.problem else "")
    live = replace(live, is_insisted_on=active.is_insisted_on(here.gpu_uuids if here else ()))
    doubt = source_doubt(profile.source)
    if doubt is not None and here is None:
        # Whether a person has insisted on it here is told by the GPUs.
        problem = f"it was {doubt.words}, and {EACH_LAUNCH_NEEDS_IT}"
        return replace(live, problem=problem, advice=ANY_HOST_ADVICE)
    if doubt is not None and not live.is_insisted_on:
        problem = f"it was {doubt.words}, and nobody has activated it here with --any-host"
        return replace(live, problem=problem, advice=SEARCH_ADVICE)
    if profile.fingerprint is None:
        return replace(live, unknown="it names no host that it was found on")
    try:
        made_on = Fingerprint.from_json(profile.fingerprint)
    except ValueError as error:
        return replace(live, problem=f"{active.path}: {error}", advice=SEARCH_ADVICE)
    if here is None:
        unknown = host_problem or "the GPUs of this host cannot be read"
        return replace(live, unknown=unknown, is_host_unknown=True, advice=DOCTOR_ADVICE)
    return _compared(live, made_on, here)


def _broken_advice(active: ActiveState) -> str:
    return "nccltune profile rollback" if active.previous else "nccltune profile activate NAME"


def _compared(live: LiveProfile, made_on: Fingerprint, here: Fingerprint) -> LiveProfile:
    unknown = ""
    if here.nccl_version is None:
        # No server has run yet whose interpreter would tell; a launch will compare it.
        here = replace(here, nccl_version=made_on.nccl_version)
        unknown = "the NCCL of the server is not known before one runs"
    count = len(here.gpu_names)
    match = compare(made_on, restricted(here, group_of(made_on, here)))
    if count < made_on.world_size:
        differing = tuple(dict.fromkeys((*match.differing, "world_size")))
        match = replace(match, kind=MatchKind.FOREIGN, differing=differing)
    changes = (_CHANGES[name] for name in match.differing if name in _CHANGES)
    stale = tuple(dict.fromkeys(changes))
    advice = {MatchKind.FOREIGN: SEARCH_ADVICE, MatchKind.EQUIVALENT: VERIFY_ADVICE}
    return replace(
        live,
        match=match.kind,
        differing=match.differing,
        stale=stale,
        unknown=unknown,
        advice=advice.get(match.kind, ""),
    )
