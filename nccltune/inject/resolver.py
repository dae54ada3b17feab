"""One answer for every route: which variables a launch is given, and why, or why none.

Pure: the launch, its environment, and what the store and the host say go in; a decision comes out.
A decision costs no launch: whatever is wrong ends in a reason, never in an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nccltune.host.fingerprint import MatchKind
from nccltune.host.match import HostMatch, has_full_nvlink, match_host
from nccltune.inject.marker import settings_digest
from nccltune.inject.overrides import names_of_ours, overwritten, share_out
from nccltune.inject.screening import ANY_HOST, doubt_about, screen
from nccltune.inject.wrappers import Way
from nccltune.profile import source_doubt
from nccltune.sglang.allreduce_path import all_reduce_path
from nccltune.sglang.argv import environ_at_server
from nccltune.sglang.defaults import writes_for

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.payloads.shapes import ModelShape
    from nccltune.profile import Profile
    from nccltune.sglang.allreduce_path import PathVerdict
    from nccltune.sglang.command import LaunchCommand
    from nccltune.store.policy import Policy
    from nccltune.store.state import ActiveState


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
        is_launch: the command is an SGLang launch, so that this is the last word on it; in what
            another command starts, the hook may find one.
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
    is_launch: bool = False

    @property
    def is_applied(self) -> bool:
        """Whether the launch gets a profile, be it one without settings."""
        return self.profile_name is not None


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
        decision = _without(environ, screening.refusal, is_degraded=screening.is_degraded)
        return replace(decision, is_launch=screening.is_launch)
    path = all_reduce_path(
        command,
        shape,
        gpu_architecture=gpu_architecture,
        has_full_nvlink=has_full_nvlink(here, command),
        environ=environ_at_server(argv, environ),
        version=sglang_version,
    )
    is_insisted_on = is_any_host or (here is not None and active.is_insisted_on(here.gpu_uuids))
    if not is_insisted_on and (refusal := doubt_about(profile)) is not None:
        return replace(_without(environ, refusal, is_degraded=True), path=path)
    match = HostMatch(None)
    if profile.fingerprint is not None:
        match = match_host(profile.fingerprint, here, command, host_problem=host_problem)
        is_usable = match.kind in (MatchKind.IDENTICAL, MatchKind.EQUIVALENT)
        if not is_usable and not is_insisted_on:
            made = "was made for another kind of host" if match.kind else "is not known to fit"
            reason = f"profile {profile.name} {made}: {match.reason}; {ANY_HOST}"
            decision = _without(environ, reason, is_degraded=True)
            return replace(decision, match=match.kind, path=path)
    return _with(profile, command, environ, match, path, sglang_version)


def _without(environ: Mapping[str, str], reason: str, *, is_degraded: bool) -> Decision:
    removed = tuple(sorted(names_of_ours(environ, {}, None)))
    return Decision(reason, is_degraded=is_degraded, removed=removed, is_launch=True)


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
    way = Way.of(command.argv)
    inherited = {name: value for name, value in environ.items() if name not in ours}
    shares = share_out(profile.settings, environ_at_server(command.argv, inherited))
    applied, losses = way.arriving(shares.applied), way.losses(shares.applied)
    if shares.applied and not applied:
        reason = f"profile {profile.name} would not reach the server: {'; '.join(losses)}"
        decision = _without(environ, reason, is_degraded=True)
        return replace(decision, match=match.kind, path=path)
    at_server = environ_at_server(command.argv, environ)
    lost = overwritten(applied, writes_for(command, sglang_version, at_server))
    differing = {
        name: value for name, value in shares.kept.items() if value != profile.settings.get(name)
    }
    warnings = [
        *_match_warnings(profile, match),
        *(f"{name}={value} is the operator's and stays" for name, value in differing.items()),
        *(f"{name} is left out: it {reason}" for name, reason in shares.left_out),
        *(f"SGLang sets {name}={value} itself ({reason})" for name, value, reason in lost),
        *losses,
        *(way.doubts() if applied else ()),
        *_path_warnings(path),
    ]
    return Decision(
        reason=f"profile {profile.name} is applied: {_fit(profile, match)}",
        applied=applied,
        kept_from_operator=dict(shares.kept),
        overwritten_by_sglang=lost,
        profile_name=profile.name,
        digest=digest,
        match=match.kind,
        warnings=tuple(warnings),
        path=path,
        removed=tuple(sorted(ours - applied.keys())),
        is_launch=True,
    )


def _fit(profile: Profile, match: HostMatch) -> str:
    if profile.fingerprint is None:
        return "it names no host"
    return f"{match.kind} host" if match.kind else "unknown host"


def _match_warnings(profile: Profile, match: HostMatch) -> list[str]:
    warnings = []
    if doubt := source_doubt(profile.source):
        warnings.append(f"profile {profile.name} was {doubt.words}: used because of --any-host")
    if profile.fingerprint is None:
        reason = "names no host: not measured on this one"
        return [*warnings, f"profile {profile.name} {reason}"]
    if match.kind is MatchKind.IDENTICAL:
        return warnings
    if match.kind is MatchKind.EQUIVALENT:
        # Where it was found, not where it was verified: nobody measured the settings against all
        # others here, whatever a verify on this host has said of them since.
        reason = f"was found on a host like this one, not on this very one: {match.reason}"
        return [*warnings, f"profile {profile.name} {reason}"]
    made = "was made for another kind of host" if match.kind else "is not known to fit"
    reason = f"{made}, used because of --any-host: {match.reason}"
    return [*warnings, f"profile {profile.name} {reason}"]


def _path_warnings(path: PathVerdict) -> list[str]:
    if path.is_nccl:
        return []
    advice = f"; to let NCCL carry them: {path.fix}" if path.fix else ""
    certainty = "may not" if path.is_nccl is None else "does not"
    return [f"NCCL {certainty} carry this launch's verify all-reduces: {path.reason}{advice}"]
