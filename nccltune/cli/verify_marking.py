"""Mark the profiles that a verify proved, and say why others that gained were not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nccltune.cli.envelope import Complaint, one_line, plain
from nccltune.cli.verify_data import judgement_data
from nccltune.errors import NccltuneError
from nccltune.store import Where, find_profile, mark_verified
from nccltune.store.files import is_shipped
from nccltune.verify.judging.comparison import settings_of
from nccltune.verify.judging.judgement import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nccltune.cli.verify_data import Verified
    from nccltune.profile import Profile
    from nccltune.store import Found


def mark_gains(verified: Verified, not_kept: list[Complaint]) -> Verified:
    """Mark the profiles that gained on SGLang's own defaults, in nothing but NCCL's settings.

    Only where all of their settings were seen in effect: it is the whole profile that is marked.

    Args:
        not_kept: gets what could not be marked.
    """
    arms = {arm.name: arm for arm in verified.record.arms}
    marked: list[str] = []
    for each in verified.judgement.comparisons:
        profile, base = arms[each.arm].profile, arms[each.baseline]
        is_settings_alone = arms[each.arm].argv == base.argv and not settings_of(base)
        if each.answer is not Verdict.GAIN or profile is None or not is_settings_alone:
            continue
        if not each.is_wholly_in_effect or not _is_own(_kept(profile)):
            continue
        try:
            mark_verified(profile.name, _evidence(verified, each.arm))
        except NccltuneError as error:
            not_kept.append(Complaint(error.code, one_line(str(error))))
        else:
            marked.append(profile.name)
    return replace(verified, marked=tuple(marked))


def unmarked_warnings(verified: Verified) -> Iterator[str]:
    """Say why profiles that gained were not marked, where one can do something about it."""
    unmarked = [
        (each, arm.profile)
        for each in verified.judgement.comparisons
        for arm in verified.record.arms
        if each.answer is Verdict.GAIN and arm.name == each.arm and arm.profile is not None
        if arm.profile.name not in verified.marked
    ]
    for compared, profile in unmarked:
        kept = _kept(profile)
        if not _is_own(kept):
            yield _not_own(profile.name, kept)
        elif not compared.is_wholly_in_effect:
            yield (
                f"profile {profile.name} was not marked as verified: not all of its settings were "
                "seen in effect in every rank of every boot (the reasons name them)"
            )


def _evidence(verified: Verified, arm: str) -> Mapping[str, object]:
    record = verified.record
    found = judgement_data(verified.judgement)
    comparisons = found["comparisons"]
    assert isinstance(comparisons, list)  # noqa: S101 - it is built as one
    evidence = plain(
        {
            "verify": record.id,
            "sentence": verified.judgement.sentence,
            "comparison": next(each for each in comparisons if each["arm"] == arm),
            "launch": record.launch,
            "fingerprint": None if record.fingerprint is None else record.fingerprint.to_json(),
            "is_simulated_acceptance": verified.is_simulated,
        }
    )
    assert isinstance(evidence, dict)  # noqa: S101 - a mapping stays one
    return evidence


def _kept(profile: Profile) -> Found | None:
    """Return what is kept with these settings under this name; evidence would belong to that."""
    try:
        found = find_profile(profile.name)
    except NccltuneError:
        return None
    return found if found.profile.settings == profile.settings else None


def _is_own(kept: Found | None) -> bool:
    return kept is not None and kept.where is Where.STATE


def _not_own(name: str, kept: Found | None) -> str:
    if kept is None or kept.where is not Where.HOST:
        return (
            f"profile {name} is not in this user's store, so that it was not marked as verified: "
            "nccltune profile import it first"
        )
    # One that is shipped keeps its name for itself.
    renamed = " --name NAME" if is_shipped(name) else ""
    return (
        f"profile {name} is the host's and not this user's own, so that it was not marked as "
        f"verified: nccltune profile import {kept.path}{renamed} first"
    )
