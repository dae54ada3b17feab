"""One answer for every route: which variables a launch is given, and why, or why none.

Pure: the launch, its environment, and what the store and the host say go in; a decision comes out.
A decision costs no launch: whatever is wrong ends in a reason, never in an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from nccltune.errors import NccltuneError
from nccltune.host.fingerprint import MatchKind
from nccltune.host.match import HostMatch, match_host
from nccltune.inject.marker import settings_digest
from nccltune.inject.overrides import names_of_ours, overwritten, share_out
from nccltune.inject.wrappers import lost_on_the_way
from nccltune.sglang.allreduce_path import all_reduce_path
from nccltune.sglang.command import parse_launch
from nccltune.sglang.defaults import writes_for
from nccltune.store.policy import Launches, Policy

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.payloads.shapes import ModelShape
    from nccltune.profile import Profile
    from nccltune.sglang.allreduce_path import PathVerdict
    from nccltune.sglang.command import LaunchCommand
    from nccltune.store.state import ActiveState

SHARED_SOURCE = "shared-gpu"
_ANY_HOST = "--any-host overrides"


@dataclass(frozen=True, slots=True)
class Decision:
    """What one launch is given.

    Attributes:
        reason: one line for people: why the profile is applied, or why none is.
        applied: variables to set, from the profile.
        kept_from_operator: variables of the profile that the operator has set, with the operator's
            values.
        overwritten_by_sglang: variables of the profile that SGLang writes over under these flags:
            name, SGLang's value, the flag or rule behind it.
        profile_name: of the profile that is applied; None for none.
        digest: of its settings; None for none.
        match: how far the profile holds on this host; None where that was not compared.
        warnings: what else the operator should know, one line each.
        path: what carries the verify all-reduces; None where the command was not looked into.
        is_degraded: a profile is meant for this launch and cannot be used, so that the launch is
            slower than the operator believes.
        removed: variables that an earlier route set from a profile that does not apply any more.
    """

    reason: str
    applied: Mapping[str, str] = field(default_factory=dict)
    kept_from_operator: Mapping[str, str] = field(default_factory=dict)
    overwritten_by_sglang: tuple[tuple[str, str, str], ...] = ()
    profile_name: str | None = None
    digest: str | None = None
    match: MatchKind | None = None
    warnings: tuple[str, ...] = ()
    path: PathVerdict | None = None
    is_degraded: bool = False
    removed: tuple[str, ...] = ()

    @property
    def is_applied(self) -> bool:
        """Whether the launch gets a profile, be it one without settings."""
        return self.profile_name is not None


class Screening(NamedTuple):
    """What can be told without looking at the host.

    Attributes:
        command: the launch, where it may get the profile.
        refusal: why it gets none, where it does not.
    """

    command: LaunchCommand | None = None
    refusal: str = ""
    is_degraded: bool = False


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
        return Screening(refusal="no profile is active")
    try:
        command = parse_launch(argv)
    except NccltuneError as error:
        return Screening(refusal=str(error), is_degraded=error.code != "not_sglang")
    if (refusal := _uncovered(command, policy, is_any_host=is_any_host)) is not None:
        return Screening(refusal=refusal)
    if active.profile is None:
        shown = f"profile {active.name} cannot be used: " if active.name else ""
        return Screening(refusal=f"{shown}{active.problem}", is_degraded=True)
    if active.profile.source == SHARED_SOURCE and not is_any_host:
        reason = "was found with all ranks on one GPU, which says nothing about this host"
        return Screening(refusal=f"profile {active.name} {reason}; {_ANY_HOST}", is_degraded=True)
    return Screening(command)


def resolve(
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    active: ActiveState,
    here: Fingerprint | None,
    policy: Policy,
    sglang_version: str | None,
    is_any_host: bool,
    host_problem: str = "",
    gpu_architecture: str | None = None,
    shape: ModelShape | None = None,
) -> Decision:
    """Decide what a launch is given.

    Args:
        argv: the launch command as typed, wrappers included.
        environ: the environment that it is started in.
        active: what the store says.
        here: every GPU that the launch sees, in its order; None where that is not known.
        policy: which launches are covered.
        sglang_version: of the SGLang that runs it; None counts as the newest.
        is_any_host: a person overrides the rules about hosts; never so for the daemon.
        host_problem: why ``here`` is None.
        gpu_architecture: ``sm90``; None where not known.
        shape: of the model; None where not known.
    """
    screening = screen(argv, active, policy, is_any_host=is_any_host)
    profile, command = active.profile, screening.command
    if command is None or profile is None:
        return _without(environ, screening.refusal, is_degraded=screening.is_degraded)
    path = all_reduce_path(
        command,
        shape,
        gpu_architecture=gpu_architecture,
        has_full_nvlink=_has_full_nvlink(here),
        environ=environ,
        version=sglang_version,
    )
    match = HostMatch(None)
    if profile.fingerprint is not None:
        match = match_host(profile.fingerprint, here, command, host_problem=host_problem)
        is_usable = match.kind in (MatchKind.IDENTICAL, MatchKind.EQUIVALENT)
        if not is_usable and not is_any_host:
            made = "was made for another kind of host" if match.kind else "is not known to fit"
            reason = f"profile {profile.name} {made}: {match.reason}; {_ANY_HOST}"
            decision = _without(environ, reason, is_degraded=True)
            return replace(decision, match=match.kind, path=path)
    return _with(profile, command, environ, match, path, sglang_version)


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
        return f"a launch over {command.nnodes} nodes gets no profile; {_ANY_HOST}"
    if command.tp_size < 2:
        return f"a launch at tensor parallel size 1 has no all-reduce to tune; {_ANY_HOST}"
    return None


def _without(environ: Mapping[str, str], reason: str, *, is_degraded: bool) -> Decision:
    removed = tuple(sorted(names_of_ours(environ, {}, None)))
    return Decision(reason, is_degraded=is_degraded, removed=removed)


def _with(
    profile: Profile,
    command: LaunchCommand,
    environ: Mapping[str, str],
    match: HostMatch,
    path: PathVerdict,
    sglang_version: str | None,
) -> Decision:
    digest = settings_digest(profile.settings)
    ours = names_of_ours(environ, profile.settings, digest)
    inherited = {name: value for name, value in environ.items() if name not in ours}
    shares = share_out(profile.settings, {**inherited, **command.environment})
    lost = overwritten(shares.applied, writes_for(command, sglang_version, environ))
    differing = {
        name: value for name, value in shares.kept.items() if value != profile.settings.get(name)
    }
    warnings = [
        *_match_warnings(profile, match),
        *(f"{name}={value} is the operator's and stays" for name, value in differing.items()),
        *(f"{name} is left out: it {reason}" for name, reason in shares.left_out),
        *(f"SGLang sets {name}={value} itself ({reason})" for name, value, reason in lost),
        *lost_on_the_way(command.argv, shares.applied),
        *_path_warnings(path),
    ]
    return Decision(
        reason=f"profile {profile.name} is applied: {_fit(profile, match)}",
        applied=dict(shares.applied),
        kept_from_operator=dict(shares.kept),
        overwritten_by_sglang=lost,
        profile_name=profile.name,
        digest=digest,
        match=match.kind,
        warnings=tuple(warnings),
        path=path,
        removed=tuple(sorted(ours - shares.applied.keys())),
    )


def _fit(profile: Profile, match: HostMatch) -> str:
    if profile.fingerprint is None:
        return "it names no host"
    return f"{match.kind} host" if match.kind else "unknown host"


def _match_warnings(profile: Profile, match: HostMatch) -> list[str]:
    if profile.fingerprint is None:
        return [f"profile {profile.name} was made for no particular host: not verified on this one"]
    if match.kind is MatchKind.IDENTICAL:
        return []
    if match.kind is MatchKind.EQUIVALENT:
        return [f"profile {profile.name} was not verified on this very host: {match.reason}"]
    made = "was made for another kind of host" if match.kind else "is not known to fit"
    return [f"profile {profile.name} {made}, used because of --any-host: {match.reason}"]


def _path_warnings(path: PathVerdict) -> list[str]:
    if path.is_nccl:
        return []
    advice = f"; to let NCCL carry them: {path.fix}" if path.fix else ""
    certainty = "may not" if path.is_nccl is None else "does not"
    return [f"NCCL {certainty} carry this launch's verify all-reduces: {path.reason}{advice}"]


def _has_full_nvlink(here: Fingerprint | None) -> bool | None:
    """Tell whether NVLink joins every two GPUs; None where some link is not known."""
    if here is None:
        return None
    size = range(len(here.link_matrix))
    names = [here.link_matrix[i][j] for i in size for j in size if i != j]
    if any(name is not None and not name.startswith("NV") for name in names):
        return False
    return None if None in names or not names else True
