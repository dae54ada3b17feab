"""Whether a profile may become active on this host, and what has to be said about it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nccltune.cli.envelope import Complaint
from nccltune.errors import HostError, UsageProblem
from nccltune.host.facts import read_here
from nccltune.host.fingerprint import Fingerprint, Match, MatchKind, compare
from nccltune.host.match import group_of, restricted
from nccltune.host.server_python import find_python
from nccltune.live.profile_standing import ANY_HOST_ADVICE, EACH_LAUNCH_NEEDS_IT
from nccltune.profile import source_doubt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nccltune.profile import Profile

_ANY_HOST = "add --any-host to activate it all the same"
_HERE = "launches on these GPUs get it from now on, those on others do not"
_EACH_LAUNCH = f"{EACH_LAUNCH_NEEDS_IT} too: {ANY_HOST_ADVICE}"
_UNKNOWN_NCCL = (
    "the server's NCCL is not known, so that it was not compared; every launch compares it, and "
    "here it takes --python PATH"
)


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of the comparison.

    Attributes:
        kind: how far the profile holds here; None where nothing was compared.
        differing: fields of the fingerprint that differ.
        sentence: one line for people.
        refusal: why the profile must not become active; None where it may.
        warnings: what has to be said where it may.
        gpu_uuids: of this host, where a person insists on it.
        unread: why this host could not be compared; empty where it was, or need not be.
    """

    kind: MatchKind | None
    sentence: str
    differing: tuple[str, ...] = ()
    refusal: Complaint | None = None
    warnings: tuple[str, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    unread: str = ""


def find_fit(
    profile: Profile, *, python: str | None, launch: Sequence[str], is_any_host: bool
) -> Fit:
    """Compare this host with the one that a profile was made on.

    Args:
        profile: what is to become active.
        python: the server's interpreter; None to take that of the launch, else this one.
        launch: the launch command; empty for none.
        is_any_host: a person overrides every refusal, which then becomes a warning.

    Raises:
        HostError: this host cannot be read, and nobody overrides that.
        UsageProblem: ``CUDA_VISIBLE_DEVICES`` names no GPU of this host, likewise.
    """
    interpreter = python or find_python(launch, os.environ) or sys.executable
    fit = _compared(profile, interpreter, is_any_host=is_any_host)
    doubt = source_doubt(profile.source)
    if doubt is not None and fit.refusal is None:
        fit = replace(fit, refusal=Complaint(doubt.code, f"it was {doubt.words}; {_ANY_HOST}"))
    if not is_any_host or (fit.refusal is None and not fit.unread):
        return fit
    gpus = _gpus_here(interpreter)
    loud = "activated because of --any-host"
    if fit.refusal is not None:
        reason = fit.refusal.message.removesuffix(f"; {_ANY_HOST}")
        loud += f", although {reason}"
    if fit.unread:
        loud += f", and not compared: {fit.unread}"
    loud += f"; {_HERE if gpus else _EACH_LAUNCH}"
    return replace(fit, refusal=None, warnings=(loud, *fit.warnings), gpu_uuids=gpus)


def _gpus_here(python: str) -> tuple[str, ...]:
    try:
        return read_here(python).gpu_uuids
    except (HostError, UsageProblem):
        return ()


def _compared(profile: Profile, python: str, *, is_any_host: bool) -> Fit:
    if profile.fingerprint is None:
        reason = "names no host: not measured on this one"
        warning = f"profile {profile.name} {reason}"
        return Fit(None, f"the profile {reason}", warnings=(warning,))
    try:
        wanted = Fingerprint.from_json(profile.fingerprint)
    except ValueError as error:
        reason = f"what it was made for cannot be read: {error}; {_ANY_HOST}"
        return Fit(None, "not compared", refusal=Complaint("bad_fingerprint", reason))
    try:
        here = read_here(python)
    except (HostError, UsageProblem) as error:
        if not is_any_host:
            raise
        return Fit(None, "not compared", unread=str(error))
    return _judge(profile, wanted, here)


def _judge(profile: Profile, wanted: Fingerprint, here: Fingerprint) -> Fit:
    here = restricted(here, group_of(wanted, here))
    warnings: tuple[str, ...] = ()
    if here.nccl_version is None:
        here = replace(here, nccl_version=wanted.nccl_version)
        warnings = (_UNKNOWN_NCCL,)
    match = compare(wanted, here)
    shown = _differences(wanted, here, match)
    if match.kind is MatchKind.FOREIGN:
        reason = f"it was made for another kind of host: {shown} differ; {_ANY_HOST}"
        complaint = Complaint("foreign_host", reason)
        return Fit(match.kind, f"of another kind: {shown} differ", match.differing, complaint)
    if match.kind is MatchKind.EQUIVALENT:
        loud = (
            f"profile {profile.name} was made on an equivalent host and is UNVERIFIED on this one: "
            f"{shown} differ; nccltune search verifies it here"
        )
        sentence = f"equivalent, unverified: {shown} differ"
        return Fit(match.kind, sentence, match.differing, warnings=(loud, *warnings))
    return Fit(match.kind, "the one that it was made on", warnings=warnings)


def _differences(wanted: Fingerprint, here: Fingerprint, match: Match) -> str:
    """Name what differs, with both values where they are short."""
    parts = []
    for name in match.differing:
        there, now = getattr(wanted, name), getattr(here, name)
        is_short = isinstance(there, str | int) and isinstance(now, str | int)
        parts.append(f"{name} ({there} there, {now} here)" if is_short else name)
    return ", ".join(parts)
