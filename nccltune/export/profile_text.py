"""The whole file: settings below a head that says what they are and what nobody checks any more."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from nccltune.envvars import check_settings
from nccltune.export.formats import format_lines
from nccltune.profile import harmless, source_doubt
from nccltune.sglang.defaults import SGLANG_BASE_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nccltune.export.formats import ExportFormat
    from nccltune.profile import Profile

_WIDTH = 98
_UNCONDITIONAL = (
    "Unconditional: this file knows no command and no host. Whatever reads it gets these settings, "
    "on other hardware and in launches that they were never measured for too. 'nccltune run' looks "
    "at both each time. Export again after the profile has changed."
)
_VISIBLE = (
    "With SPT_NOENV=1 set beside them, 'nccltune status' can read them back from the server's "
    "processes."
)


def export_profile(profile: Profile, export: ExportFormat) -> str:
    """Return the text of a file that gives its reader this profile's settings, and nothing else.

    Raises:
        UsageProblem: a setting that is not ours to make, or that NCCL would misread.
    """
    check_settings(profile.settings)
    lines = [*_head(profile, export), *format_lines(profile.settings, export)]
    return "\n".join(lines) + "\n"


def export_warnings(profile: Profile, export: ExportFormat) -> tuple[str, ...]:
    """Say what whoever puts this file to use has to know."""
    warnings = []
    if doubt := source_doubt(profile.source):
        warnings.append(doubt.words)
    if names := _weaker_than_sglang(profile.settings, export):
        warnings.append(
            f"SGLang sets {', '.join(names)} itself where the environment does not, and the "
            "environment is stronger than NCCL's files: in this format they do nothing"
        )
    return tuple(warnings)


def _head(profile: Profile, export: ExportFormat) -> Iterator[str]:
    yield from _comment(
        f"NCCL settings of profile {profile.name} of nccltune, for {export.reader}."
    )
    yield from _comment(f"To use it: {export.usage}.")
    yield from _comment(_UNCONDITIONAL)
    if host := _host(profile):
        yield from _comment(f"Found on {host}.")
    for warning in export_warnings(profile, export):
        yield from _comment(f"Warning: {warning}.")
    if export.is_environment:
        yield from _comment(_VISIBLE)


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


def _host(profile: Profile) -> str:
    facts = profile.fingerprint or {}
    found = facts.get("gpu_names")
    names = found if isinstance(found, list | tuple) else ()
    gpus = ", ".join(f"{n}x {harmless(name)}" for name, n in Counter(map(str, names)).items())
    nccl = facts.get("nccl_version")
    return f"{gpus} with NCCL {harmless(nccl)}" if gpus and isinstance(nccl, str) else gpus


def _weaker_than_sglang(settings: Mapping[str, str], export: ExportFormat) -> list[str]:
    """Name settings that SGLang's own defaults beat, as they are written into the environment."""
    if export.is_environment:
        return []
    return sorted(settings.keys() & SGLANG_BASE_ENVIRONMENT.keys())
