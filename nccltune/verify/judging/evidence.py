"""Whether settings can have made a difference: what was seen of ranks and all-reduce path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        is_tried: every profile was in effect as far as was seen; else what it would do is not
            known, and that nothing changed says nothing of it.
        is_whole: every key of every profile was seen in effect, in every rank of every boot.
    """

    reasons: tuple[Reason, ...] = ()
    is_claimable: bool = True
    is_lost: bool = False
    is_whole: bool = True
    is_tried: bool = True


@dataclass(slots=True)
class _Keys:
    """What became of one arm's keys, over its boots and ranks."""

    lost: dict[str, str] = field(default_factory=dict)
    withheld: dict[str, str] = field(default_factory=dict)
    effective: set[tuple[str, str]] = field(default_factory=set)
    is_unread: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of them were seen in effect everywhere."""
        return not (self.lost or self.withheld or self.is_unread)


def gather_evidence(
    arms: Sequence[Arm], boots: Sequence[Boot], operator: Mapping[str, str] | None = None
) -> Evidence:
    """Look at the ranks and at the all-reduce path of arms that carry settings.

    Args:
        operator: variables that every arm was started with, whatever its profile.
    """
    reasons: list[Reason] = []
    is_claimable, is_lost, is_whole, is_tried = True, False, True, True
    off_path = [b for b in boots if _is_of(b, arms) and b.seen.is_nccl_on_path is False]
    if off_path:
        is_claimable = False
        why = off_path[0].seen.path_reason or "NCCL does not carry the verify pass"
        reasons.append(Reason(Cause.NOT_ON_PATH, f"NCCL is not on the path: {why}"))
    for arm in arms:
        if not settings_of(arm):
            continue
        keys = _read_keys(boots, arm)
        is_whole = is_whole and keys.is_whole
        shared = [key for key in settings_of(arm) if key in (operator or {})]
        if shared:
            is_whole = False
            reasons.append(Reason(Cause.SHARED_SETTINGS, _shared(arm, shared, operator or {})))
            is_claimable = is_claimable and len(shared) < len(settings_of(arm))
        if keys.lost:
            is_claimable, is_lost, is_tried = False, True, False
            reasons.append(Reason(Cause.NOT_IN_EFFECT, _not_in_effect(arm, keys.lost)))
        if keys.withheld:
            reasons.append(Reason(Cause.NOT_IN_EFFECT, _not_in_effect(arm, keys.withheld)))
        if keys.is_unread:
            reasons.append(Reason(Cause.ENVIRONMENT_UNSEEN, _unseen(arm, keys)))
        if any(boot.arm == arm.name for boot in boots) and not keys.effective:
            is_claimable, is_tried = False, False
    doubts = _path_doubts(arms, boots)
    return Evidence((*reasons, *doubts), is_claimable, is_lost, is_whole, is_tried)


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
        ranks = boot.seen.ranks
        size = boot.seen.server_info.get("tp_size")
        is_all = len(ranks) >= (size if isinstance(size, int) else 1)
        wanted = settings_of(arm).keys()
        is_told = all(wanted <= states.keys() for states in ranks.values())
        keys.is_unread = keys.is_unread or not (is_all and is_told)
        for rank, states in sorted(ranks.items()):
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


def _shared(arm: Arm, keys: Sequence[str], operator: Mapping[str, str]) -> str:
    profile = settings_of(arm)
    listed = ", ".join(f"{key}={operator[key]}" for key in keys)
    word = "settings" if all(operator[key] == profile[key] for key in keys) else "variables"
    return (
        f"both arms had the {word} {listed}: they stand in the environment or the command that "
        f"every arm is started with, so that the baseline is not SGLang's default; unset them to "
        f"measure what they do"
    )


def _unseen(arm: Arm, keys: _Keys) -> str:
    which = "some ranks" if keys.effective else "the ranks"
    return (
        f"the environment of {which} under {arm.name} could not be read: that its settings were "
        "in effect is not proven; let the server start with SPT_NOENV=1, or run verify as the "
        "server's own user or as root"
    )


def _not_in_effect(arm: Arm, by_rank: dict[str, str]) -> str:
    name = arm.profile.name if arm.profile else arm.name
    ranks = "; ".join(f"in rank {rank}: {words}" for rank, words in by_rank.items())
    return f"profile {name} is not wholly in effect {ranks}"
