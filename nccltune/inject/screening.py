"""Whether a launch may get the active profile at all, told without looking at the host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nccltune.errors import NccltuneError, UsageProblem
from nccltune.profile import source_doubt
from nccltune.sglang.argv import split_launch
from nccltune.sglang.command import parse_launch
from nccltune.store.policy import Launches, Policy

if TYPE_CHECKING:
    from nccltune.profile import Profile
    from nccltune.sglang.command import LaunchCommand
    from nccltune.store.state import ActiveState

ANY_HOST = "--any-host overrides"


class Screening(NamedTuple):
    """What can be told without looking at the host.

    Attributes:
        command: the launch, where it may get the profile.
        refusal: why it gets none, where it does not.
        is_launch: the command is an SGLang launch.
    """

    command: LaunchCommand | None = None
    refusal: str = ""
    is_degraded: bool = False
    is_launch: bool = True


def screen(
    argv: Sequence[str], active: ActiveState, policy: Policy, *, is_any_host: bool
) -> Screening:
    """Ask whether a launch may get the active profile, before the host is looked at.

    Args:
        argv: the launch command as typed, wrappers included.
        active: what the store says.
        policy: which launches are covered.
        is_any_host: a person overrides the rules about hosts, not those about launches.
    """
    if active.name is None and active.problem is None:
        return Screening(refusal="no profile is active", is_launch=_is_launch(argv))
    try:
        command = parse_launch(argv)
    except NccltuneError as error:
        is_launch = error.code != "not_sglang"
        return Screening(refusal=str(error), is_degraded=is_launch, is_launch=is_launch)
    if (refusal := _uncovered(command, policy, is_any_host=is_any_host)) is not None:
        return Screening(refusal=refusal)
    if active.profile is None:
        shown = f"profile {active.name} cannot be used: " if active.name else ""
        return Screening(refusal=f"{shown}{active.problem}", is_degraded=True)
    # Whether a person has insisted on it for this host is told by its GPUs, later.
    refusal = None if is_any_host or active.any_host_gpus else doubt_about(active.profile)
    return Screening(command) if refusal is None else Screening(refusal=refusal, is_degraded=True)


def _is_launch(argv: Sequence[str]) -> bool:
    try:
        split_launch(tuple(argv))
    except UsageProblem:
        return False
    return True


def doubt_about(profile: Profile) -> str | None:
    """Return why a profile is for nobody who does not insist; None where it may be used."""
    doubt = source_doubt(profile.source)
    return None if doubt is None else f"profile {profile.name} was {doubt.words}; {ANY_HOST}"


def _uncovered(command: LaunchCommand, policy: Policy, *, is_any_host: bool) -> str | None:
    """Return why the policy leaves a launch alone; None where it covers it."""
    is_covered = {
        Launches.EAGLE3: command.is_eagle3_launch,
        Launches.SPECULATIVE: command.is_speculative,
        Launches.ALL: True,
    }[policy.launches]
    if not is_covered:
        algorithm = command.speculative_algorithm
        what = f"this one speculates by {algorithm}" if algorithm else "this one does not speculate"
        covered = {Launches.EAGLE3: "EAGLE-3", Launches.SPECULATIVE: "speculative"}
        return f"the policy covers {covered[policy.launches]} launches, and {what}"
    if is_any_host:
        return None
    if command.nnodes > 1:
        return f"a launch over {command.nnodes} nodes gets no profile; {ANY_HOST}"
    if command.tp_size < 2:
        return f"a launch at tensor parallel size 1 has no all-reduce to tune; {ANY_HOST}"
    return None
