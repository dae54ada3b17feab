"""Whether settings can have made a difference: what was seen of ranks and all-reduce path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nccltune.verify.judging.comparison import settings_of
from nccltune.verify.judging.judgement import Cause, Reason
from nccltune.verify.model import Arm, Boot, RankState

_STATE_WORDS = {
    RankState.LOST: "lost",
    RankState.OVERRIDDEN_BY_SGLANG: "overridden by SGLang",
    RankState.SET_BY_OPERATOR: "set by the operator",
    RankState.UNREADABLE: "cannot be read",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whether the settings of some arms can have made a difference.

    Attributes:
        reasons: what was found, worst first.
        is_claimable: a difference may be put down to the settings.
        is_lost: a key of a profile was not in effect in a rank, and nobody meant that.
    """

    reasons: tuple[Reason, ...] = ()
    is_claimable: bool = True
    is_lost: bool = False


@dataclass(slots=True)
class _Keys:
    """What became of one arm's keys, over its boots and ranks."""

    lost: dict[str, str] = field(default_factory=dict)
    withheld: dict[str, str] = field(default_factory=dict)
    effective: set[tuple[str, str]] = field(default_factory=set)
    is_unread: bool = False


def gather_evidence(arms: Sequence[Arm], boots: Sequence[Boot]) -> Evidence:
    """Look at the ranks and at the all-reduce path of arms that carry settings."""
    reasons: list[Reason] = []
    is_claimable, is_lost = True, False
    off_path = [b for b in boots if _is_of(b, arms) and b.seen.is_nccl_on_path is False]
    if off_path:
        is_claimable = False
        why = off_path[0].seen.path_reason or "NCCL does not carry the verify pass"
        reasons.append(Reason(Cause.NOT_ON_PATH, f"NCCL is not on the path: {why}"))
    for arm in arms:
        if not settings_of(arm):
            continue
        keys = _read_keys(boots, arm)
        if keys.lost:
            is_claimable, is_lost = False, True
            reasons.append(Reason(Cause.NOT_IN_EFFECT, _not_in_effect(arm, keys.lost)))
        if keys.withheld:
            reasons.append(Reason(Cause.NOT_IN_EFFECT, _not_in_effect(arm, keys.withheld)))
            is_claimable = is_claimable and (bool(keys.effective) or keys.is_unread)
        if keys.is_unread and any(boot.arm == arm.name for boot in boots):
            text = (
                f"the environment of some ranks under {arm.name} could not be read: that its "
                "settings were in effect is not proven"
            )
            reasons.append(Reason(Cause.ENVIRONMENT_UNSEEN, text))
    return Evidence((*reasons, *_path_doubts(arms, boots)), is_claimable, is_lost)


def _is_of(boot: Boot, arms: Sequence[Arm]) -> bool:
    return any(boot.arm == arm.name for arm in arms)


def _path_doubts(arms: Sequence[Arm], boots: Sequence[Boot]) -> Iterator[Reason]:
    own = [boot.seen for boot in boots if _is_of(boot, arms)]
    doubt = next((seen for seen in own if seen.is_nccl_on_path is None and seen.path_reason), None)
    if doubt is not None:
        yield Reason(Cause.PATH_UNKNOWN, f"NCCL may not be on the path: {doubt.path_reason}")


def _read_keys(boots: Sequence[Boot], arm: Arm) -> _Keys:
    keys = _Keys()
    for boot in boots:
        if boot.arm != arm.name:
            continue
        keys.is_unread = keys.is_unread or not boot.seen.ranks
        for rank, states in sorted(boot.seen.ranks.items()):
            for key, state in sorted(states.items()):
                _sort(keys, rank, key, state)
    return keys


def _sort(keys: _Keys, rank: str, key: str, state: RankState) -> None:
    if state is RankState.IN_EFFECT:
        keys.effective.add((rank, key))
        return
    if state is RankState.UNREADABLE:
        keys.is_unread = True
        return
    found = keys.lost if state is RankState.LOST else keys.withheld
    word = f"{key} {_STATE_WORDS[state]}"
    if word not in found.get(rank, ""):
        found[rank] = ", ".join(filter(None, (found.get(rank), word)))


def _not_in_effect(arm: Arm, by_rank: dict[str, str]) -> str:
    name = arm.profile.name if arm.profile else arm.name
    ranks = "; ".join(f"in rank {rank}: {words}" for rank, words in by_rank.items())
    return f"profile {name} is not wholly in effect {ranks}"
