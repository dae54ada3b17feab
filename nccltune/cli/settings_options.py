"""Candidates as they are typed: ``--set``, ``--try`` and ``--profile``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nccltune.envvars import check_settings, parse_assignment
from nccltune.errors import UsageProblem
from nccltune.store import find_profile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nccltune.measurement import Settings

_NEXT_NAME = re.compile(r",(?=\s*[A-Za-z_][A-Za-z0-9_]*=)")
"""A comma that begins the next assignment; NCCL's lists have commas of their own."""


def parse_candidate(text: str, *, is_unsafe: bool = False) -> dict[str, str]:
    """Read ``NAME=VALUE,NAME=VALUE`` of ``--try``.

    Raises:
        UsageProblem: not of that form, or settings that NCCL would misread.
    """
    return _checked(_NEXT_NAME.split(text), is_unsafe=is_unsafe)


def candidates_from_options(
    profiles: Sequence[str], assignments: Sequence[str], *, is_unsafe: bool = False
) -> list[tuple[str, dict[str, str]]]:
    """Return the named candidates of ``bench``.

    Each profile is one; every ``--set`` changes all of them, and an empty value takes the variable
    out. Without a profile the assignments alone are the candidate, and without those it is the
    baseline itself, whose ratio then shows the noise of the host.

    Raises:
        UsageProblem: an unknown profile, or settings that NCCL would misread.
        FileError: a profile cannot be used.
    """
    changes = _assignments(assignments)
    named: list[tuple[str, Settings]] = []
    for given in profiles:
        profile = find_profile(given).profile
        named.append((profile.name, profile.settings))
    if not named:
        named = [("settings given" if changes else "the baseline again", {})]
    candidates = []
    for name, settings in named:
        changed = {**settings, **changes}
        kept = {variable: value for variable, value in changed.items() if value}
        check_settings(kept, is_unsafe=is_unsafe)
        candidates.append((f"{name}, changed" if profiles and changes else name, kept))
    return candidates


def _checked(assignments: Sequence[str], *, is_unsafe: bool) -> dict[str, str]:
    settings = _assignments(text.strip() for text in assignments)
    check_settings(settings, is_unsafe=is_unsafe)
    return settings


def _assignments(texts: Iterable[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for text in texts:
        name, value = parse_assignment(text)
        if name in settings:
            raise UsageProblem(f"{name} is given twice; keep one", code="bad_assignment")
        settings[name] = value
    return settings
