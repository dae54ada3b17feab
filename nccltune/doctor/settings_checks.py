"""NCCL variables and files that act on a launch beside the profile, and against it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from nccltune.bench.fitness import contradicting_settings
from nccltune.doctor.check import Check, Status, counted
from nccltune.envvars import CATALOGUE, Kind
from nccltune.host.conf_files import effective_settings
from nccltune.inject.marker import MARKER, parse_marker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nccltune.doctor.case import Case
    from nccltune.host.fingerprint import LinkMatrix

_HARMFUL = (
    "NCCL_CHUNK_SIZE",
    "NCCL_COMM_ID",
    "NCCL_ENV_PLUGIN",
    "NCCL_GRAPH_FILE",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_HOSTID",
    "NCCL_IGNORE_DISABLED_P2P",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_TOPO_FILE",
    "NCCL_TUNER_PLUGIN",
)
"""Never set by this tool, and worth a word when somebody else does."""

_TYPO_CUTOFF = 0.9
_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
_DISTANT = frozenset({"PHB", "NODE", "SYS"})
_PRECEDENCE = "order of precedence: environment, then NCCL_CONF_FILE or ~/.nccl.conf, then /etc"


def check_settings_around(case: Case) -> Iterator[Check]:
    """Look at NCCL's own files and at the environment."""
    yield _conf_files(case)
    yield from _environment(case)


def _conf_files(case: Case) -> Check:
    name = "conf_files"
    files = case.conf_files
    if not files:
        return Check(name, Status.OK, "no configuration file of NCCL's is in force")
    effective = effective_settings(files, case.environ)
    parts = []
    for file in files:
        keys = ", ".join(f"{key}={value}" for key, value in file.settings.items()) or "nothing"
        parts.append(f"{file.path} sets {keys}")
    problems = [f"{file.path}: {problem}" for file in files for problem in file.problems]
    message = f"{'; '.join([*parts, *problems])} ({_PRECEDENCE})"
    if not effective and not problems:
        return Check(name, Status.OK, f"{message}; the environment sets all of that itself")
    profile = case.active.profile
    ours = sorted(effective.keys() & (profile.settings.keys() if profile else ()))
    if ours:
        message += f"; the profile is stronger in {', '.join(ours)}"
    fix = "remove what was not measured here; a profile is stronger where it sets the same"
    return Check(name, Status.WARN, message, fix)


def _environment(case: Case) -> Iterator[Check]:
    name = "environment"
    marker = parse_marker(case.environ.get(MARKER))
    ours = frozenset(marker.keys) if marker is not None else frozenset()
    given = {
        variable: value
        for variable, value in sorted(case.environ.items())
        if variable.startswith("NCCL_") and variable not in ours
    }
    misread = _misread(given)
    understood = {name: value for name, value in given.items() if name not in misread}
    found = [
        *_contradictions(case.links, understood),
        *_shadows(case, given),
        *misread.values(),
    ]
    if not found:
        count = counted(len(given), "NCCL variable is set", "NCCL variables are set")
        shown = count if given else "no NCCL variable is set"
        yield Check(name, Status.OK, f"{shown} outside the profile, and none stands in its way")
    for message, fix in found:
        yield Check(name, Status.WARN, message, fix)


def _contradictions(links: LinkMatrix, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Find settings that keep NCCL from links which are there."""
    blocked = contradicting_settings(links, given)
    for variable, value in blocked.items():
        yield (
            f"{variable}={value} is set, although NVLink joins every pair of GPUs",
            f"unset {variable} unless it was measured here",
        )
    level = given.get("NCCL_P2P_LEVEL", "")
    cut = sorted(set(_cut_off(links, level))) if "NCCL_P2P_LEVEL" not in blocked else []
    if cut:
        yield (
            f"NCCL_P2P_LEVEL={level} sends pairs of GPUs at {', '.join(cut)} through host memory, "
            "which NCCL by itself joins directly",
            "unset NCCL_P2P_LEVEL unless it was measured here",
        )
    if given.get("NCCL_SHM_DISABLE") == "1" and any(
        link in _DISTANT for row in links for link in row
    ):
        yield (
            "NCCL_SHM_DISABLE=1 sends pairs of GPUs without direct access over network sockets",
            "unset NCCL_SHM_DISABLE; see the check of /dev/shm",
        )


def _cut_off(links: LinkMatrix, level: str) -> Iterator[str]:
    """Yield links that NCCL uses directly by default (up to PXB), and not at this level."""
    if level not in _LEVELS:
        return
    allowed = _LEVELS.index(level)
    for row in links:
        for link in row:
            needed = "NVL" if link is not None and link.startswith("NV") else link
            if needed in ("NVL", "PIX", "PXB") and _LEVELS.index(needed) > allowed:
                yield str(link)


def _shadows(case: Case, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Find settings that win over the active profile's."""
    profile = case.active.profile
    for variable, value in (profile.settings if profile else {}).items():
        if variable in given and given[variable] != value:
            yield (
                f"{variable}={given[variable]} is set, and wins over {value} of profile "
                f"{case.active.name}",
                f"unset {variable} where the server is started",
            )


def _misread(given: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Find names and values that NCCL takes for something else, and harmful ones."""
    found = {}
    for variable, value in given.items():
        known = CATALOGUE.get(variable)
        if known is None:
            close = difflib.get_close_matches(variable, CATALOGUE, 1, _TYPO_CUTOFF)
            if close:
                message = f"{variable} is no variable that is known here"
                found[variable] = message, f"did you mean {close[0]}?"
        elif variable in _HARMFUL:
            message = f"{variable}={value} is set: {known.reason}"
            found[variable] = message, f"unset {variable} unless it is meant"
        elif known.kind is not Kind.FORBIDDEN and value and known.check is not None:
            refusal = known.check(value)
            if refusal is not None:
                problem, _, fix = refusal.rpartition("; ")
                message = f"{variable}={value}: {problem or refusal}"
                found[variable] = message, fix if problem else ""
    return found
