"""What is kept: whether it outlives a container, and whether this host may use it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from nccltune.doctor.check import Check, Status, counted, split_advice
from nccltune.doctor.mounts import mount_of, parse_mountinfo
from nccltune.errors import NccltuneError
from nccltune.host.fingerprint import Fingerprint, MatchKind, compare
from nccltune.host.match import group_of, restricted
from nccltune.inject.resolver import resolve
from nccltune.paths import HOME_VARIABLE, state_dir
from nccltune.store import Policy, read_policy
from nccltune.store.access import access_advice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nccltune.doctor.case import Case
    from nccltune.doctor.mounts import Mount
    from nccltune.inject.resolver import Decision

_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")
_HOW = {"manual": " by hand", "daemon": " by nccltuned", "search": " by a search"}
_KUBERNETES_VARIABLE = "KUBERNETES_SERVICE_HOST"
_LASTING_FIX = (
    f"mount a volume there, or let {HOME_VARIABLE} name a folder on one; then activate again"
)


def check_store(case: Case) -> Iterator[Check]:
    """Look at the state folder, the active profile, and what the launch would get of it."""
    yield _state_folder(case)
    yield _active_profile(case)
    yield _profile_match(case)
    yield from _for_launch(case)


def _state_folder(case: Case) -> Check:
    name = "state_folder"
    folder = case.state_dir
    if folder is None:
        message, fix = split_advice(case.state_problem)
        return Check(name, Status.FAIL, message, fix)
    try:
        text = (case.sources.proc / "self" / "mountinfo").read_text(errors="surrogateescape")
    except OSError as error:
        return Check(name, Status.SKIP, f"mounts cannot be read: {error.strerror}")
    mount = mount_of(folder.resolve(), parse_mountinfo(text))
    if mount is None:
        return Check(name, Status.SKIP, f"no mount holds {folder}")
    # Something to lose makes it a failure: this is how profiles were lost.
    has_profiles = case.active.name is not None or _has_profiles(folder)
    worst = Status.FAIL if has_profiles else Status.WARN
    if loss := _loss(case, mount):
        kept = "and what is kept there goes with it" if has_profiles else "and nothing would last"
        return Check(name, worst, f"{folder} {loss}, {kept}", _LASTING_FIX)
    if folder != state_dir(case.sources.environ):
        # Launches only read the host's store; what this user keeps goes into a folder of his own.
        message = f"{folder} is the host's, which launches of this user read"
        return Check(name, Status.OK, message)
    if "ro" in mount.options or not _is_writable(folder):
        fix = f"check who owns it, or let {HOME_VARIABLE} name another folder"
        return Check(name, Status.WARN, f"{folder} cannot be written by this user", fix)
    return Check(name, Status.OK, f"{folder} lies on {mount.type} mounted at {mount.path}")


def _loss(case: Case, mount: Mount) -> str:
    """Say how a folder on this mount gets lost; empty where it does not."""
    if mount.is_in_memory:
        return f"lies in memory ({mount.type} at {mount.path}), gone at the next reboot"
    is_root = mount.path == mount.path.parent
    if is_root and (_is_container(case) or mount.is_overlay):
        return f"lies on the container's own layer ({mount.type}), thrown away with the container"
    return ""


def _is_container(case: Case) -> bool:
    root = case.sources.root
    has_mark = any((root / mark).exists() for mark in _CONTAINER_MARKS)
    return has_mark or _KUBERNETES_VARIABLE in case.sources.environ


def _has_profiles(folder: Path) -> bool:
    """Tell whether there are profiles to lose; what may not be looked at may well be there."""
    try:
        return any(path.suffix == ".json" for path in (folder / "profiles").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _is_writable(folder: Path) -> bool:
    # Not by Path.exists, which raises where a folder above may not be entered.
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    return os.access(there, os.W_OK | os.X_OK)


def _active_profile(case: Case) -> Check:
    name = "active_profile"
    active = case.active
    if active.problem is not None:
        fix = _access(case) or "import it again, or: nccltune profile rollback"
        message = f"launches start on defaults: {active.problem}"
        return Check(name, Status.FAIL, message, fix)
    if active.profile is None:
        message = "no profile is active: every launch starts on SGLang's defaults"
        return Check(name, Status.OK, message)
    count = counted(len(active.profile.settings), "setting")
    how = _HOW.get(active.how, "")
    at = f" at {active.activated_at}" if active.activated_at else ""
    message = f"profile {active.name} with {count}, activated{how}{at}"
    return Check(name, Status.OK, message)


def _access(case: Case) -> str:
    """Say what to open for a user who may not read the store: no step between profiles helps."""
    return "" if case.active.problem is None else access_advice(case.active.path)


def _profile_match(case: Case) -> Check:
    """Compare this host with the one that the active profile was made on."""
    name = "profile_match"
    profile = case.active.profile
    if profile is None:
        return Check(name, Status.SKIP, "no usable profile is active")
    if profile.fingerprint is None:
        message = f"profile {profile.name} names no host: not measured on this one"
        return Check(name, Status.WARN, message, "nccltune search")
    try:
        wanted = Fingerprint.from_json(profile.fingerprint)
    except ValueError as error:
        message = f"what profile {profile.name} was made for cannot be read: {error}"
        return Check(name, Status.FAIL, message, "nccltune search")
    here = case.here
    if here is None:
        return Check(name, Status.SKIP, "this host's GPUs are not known")
    if here.nccl_version is None:
        problem = case.server_problem or "see the check of nccl_version"
        return Check(name, Status.SKIP, f"the server's NCCL is not known: {problem}")
    match = compare(wanted, restricted(here, group_of(wanted, here)))
    differing = ", ".join(match.differing)
    if match.kind is MatchKind.IDENTICAL:
        return Check(name, Status.OK, f"this is the host that profile {profile.name} was made on")
    if match.kind is MatchKind.EQUIVALENT:
        message = f"profile {profile.name} was made on an equivalent host: {differing} differ"
        return Check(name, Status.WARN, message, "nccltune search, to verify it on this host")
    message = f"profile {profile.name} was made for another kind of host: {differing} differ"
    seen = case.seen_by_launch
    if case.active.is_insisted_on(seen.gpu_uuids if seen else ()):
        message += "; launches get it, because it was activated here with --any-host"
        return Check(name, Status.WARN, message, "nccltune search, for a profile of this host")
    return Check(name, Status.FAIL, message, "nccltune search, for a profile of this host")


def _for_launch(case: Case) -> Iterator[Check]:
    """Ask what every launch asks, with what is known here."""
    name = "profile_for_launch"
    if case.launch is None:
        yield Check(name, Status.SKIP, "no launch command was given")
        return
    try:
        policy, complaint = read_policy(case.state_dir), ""
    except NccltuneError as error:
        policy, complaint = Policy(), str(error)
    if complaint:
        fix = _access(case) or "correct the file, or remove it"
        yield Check("policy", Status.WARN, complaint, fix)
    decision = resolve(
        argv=case.launch.argv,
        environ=case.sources.environ,
        active=case.active,
        here=_as_launches_see_it(case),
        policy=policy,
        sglang_version=case.server.sglang_version if case.server else None,
        is_any_host=False,
        host_problem=str(case.nvml_error or case.gpu_error or ""),
        gpu_architecture=case.gpus[0].compute_capability if case.gpus else None,
        shape=case.shape,
    )
    yield _from_decision(name, decision, _access(case))


def _as_launches_see_it(case: Case) -> Fingerprint | None:
    """Return the host with the NCCL that launches take the server's for, without starting it."""
    here = case.seen_by_launch
    if here is None or case.assumed_nccl is None:
        return here
    return replace(here, nccl_version=case.assumed_nccl)


def _from_decision(name: str, decision: Decision, access: str) -> Check:
    if not decision.is_applied:
        message = f"this launch gets no profile: {decision.reason}"
        if decision.is_degraded:
            fix = access or "nccltune search, or nccltune profile off"
            return Check(name, Status.FAIL, message, fix)
        return Check(name, Status.OK, message)
    kept = [f"{n}={v} (the operator's)" for n, v in decision.kept_from_operator.items()]
    lost = [f"{n}={v} ({why})" for n, v, why in decision.overwritten_by_sglang]
    message = f"{decision.reason}; {counted(len(decision.applied), 'variable')}"
    if kept or lost:
        message += f", except where others decide: {', '.join([*kept, *lost])}"
        fix = "unset what the operator set, and leave out the flags behind what SGLang sets"
        return Check(name, Status.WARN, message, fix)
    return Check(name, Status.OK, message)
