"""Checks of whole settings, and their canonical form."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from nccltune.envvars import lists
from nccltune.envvars.catalogue import CATALOGUE
from nccltune.envvars.domains import shape_problem
from nccltune.envvars.model import Kind, Variable
from nccltune.errors import UsageProblem

_SHOWN_CHARS = 60

# Both names of a pair feed the same number in NCCL.
_ALIASES = {
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
}
_LIST_ELEMENTS = {"NCCL_ALGO": lists.ALGORITHMS, "NCCL_PROTO": lists.PROTOCOLS}


def parse_assignment(text: str) -> tuple[str, str]:
    """Split ``NAME=VALUE`` at the first ``=``, without judging either.

    Raises:
        UsageProblem: there is no ``=``, no name, or something before the name.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageProblem(f"{_shown(text)}: write NAME=VALUE", code="bad_assignment")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        last = name.split()[-1] if name.split() else "NAME"
        raise UsageProblem(
            f"{_shown(text)}: {_shown(name)} is no variable name; write {last}=VALUE without "
            "export, quotes or blanks",
            code="bad_assignment",
        )
    return name, value


def check_setting(name: str, value: str, *, is_unsafe: bool = False) -> None:
    """Refuse a setting that NCCL would silently change or misread, or that is not ours to make.

    Args:
        name: the variable.
        value: its value, as the environment would have it.
        is_unsafe: skip the domain of the value, for someone who wants to see NCCL fail; never the
            kind of the variable, and never what would break the files that hold the value.

    Raises:
        UsageProblem: ``unknown_variable``, ``forbidden_variable`` or ``bad_value``.
    """
    variable = _allowed(name)
    problem = shape_problem(value)
    if problem is None and not is_unsafe and variable.check is not None:
        problem = variable.check(value)
    if problem is not None:
        raise UsageProblem(f"{name}={_shown(value)}: {problem}", code="bad_value")


def _allowed(name: str) -> Variable:
    variable = CATALOGUE.get(name)
    if variable is None:
        raise UsageProblem(f"{_shown(name)}: {_unknown_reason(name)}", code="unknown_variable")
    if variable.kind is Kind.FORBIDDEN:
        reason = variable.reason
        raise UsageProblem(f"{name} is never set by nccltune: {reason}", code="forbidden_variable")
    return variable


def _unknown_reason(name: str) -> str:
    if name.upper() in CATALOGUE:
        return f"NCCL wants capitals and would ignore it; write {name.upper()}"
    if not name.startswith("NCCL_"):
        return "not an NCCL variable, and a profile sets nothing else; remove it"
    close = difflib.get_close_matches(name, CATALOGUE, 1, 0.75)
    hint = f"did you mean {close[0]}?" if close else "remove it"
    return f"not in the catalogue of NCCL variables, and only those are ever set; {hint}"


def check_settings(settings: Mapping[str, str], *, is_unsafe: bool = False) -> None:
    """Check every setting, then whether they fit each other.

    Raises:
        UsageProblem: as ``check_setting``, or ``conflict`` for two that NCCL would not both follow.
    """
    for name, value in settings.items():
        check_setting(name, value, is_unsafe=is_unsafe)
    conflict = find_conflict(settings, is_unsafe=is_unsafe)
    if conflict is not None:
        name, reason = conflict
        raise UsageProblem(f"{name}={_shown(settings[name])}: {reason}", code="conflict")


def find_conflict(
    settings: Mapping[str, str], *, is_unsafe: bool = False
) -> tuple[str, str] | None:
    """Return the first setting that another one contradicts, with the reason; None if they fit.

    With ``is_unsafe`` only two names for one number count, since what to compare is then unclear.
    """
    for old, current in _ALIASES.items():
        if old in settings and current in settings:
            return old, f"the same as {current}, which is set too; keep {current} alone"
    if is_unsafe:
        return None
    return _bounds_conflict(settings) or _prefix_conflict(settings)


def _bounds_conflict(settings: Mapping[str, str]) -> tuple[str, str] | None:
    lowest = next((n for n in ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS") if n in settings), None)
    highest = next((n for n in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS") if n in settings), None)
    if lowest is None or highest is None:
        return None
    if int(settings[lowest]) <= int(settings[highest]):
        return None
    return lowest, (
        f"above {highest}={settings[highest]}, so NCCL takes {settings[highest]} for both; "
        "lower it or leave one out"
    )


def _prefix_conflict(settings: Mapping[str, str]) -> tuple[str, str] | None:
    """Find a protocol for every collective beside an algorithm for some (vLLM PR 58179)."""
    algo, proto = settings.get("NCCL_ALGO"), settings.get("NCCL_PROTO")
    if algo is None or proto is None or lists.has_prefixless(algo, lists.ALGORITHMS):
        return None
    if not lists.has_prefixless(proto, lists.PROTOCOLS):
        return None
    written = lists.canonical_list(proto, lists.PROTOCOLS)
    return "NCCL_PROTO", (
        "no prefix, while NCCL_ALGO names its collectives, and NCCL from 2.31 on stops at the "
        f"first other one; write {written}"
    )


def search_domain(name: str) -> tuple[str, ...]:
    """Return the values that the search may propose for a variable, beside leaving it unset.

    Raises:
        UsageProblem: the variable is not one that the search varies.
    """
    variable = _allowed(name)
    if variable.choices is None:
        raise UsageProblem(f"{name} is not searched: {variable.reason}", code="not_searched")
    return variable.choices


def needs_offer(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables whose value is safe only where NCCL offers it by itself.

    That is LL128: its place in the TUNING table of a default start must not be 0.
    """
    proto = settings.get("NCCL_PROTO", "")
    return ("NCCL_PROTO",) if lists.names_ll128(proto) else ()


def canonical(settings: Mapping[str, str]) -> dict[str, str]:
    """Spell settings in one way, so that candidates that all-reduce cannot tell apart are equal.

    Newer names for older ones, lists with a prefix and in one spelling, thresholds that keep the
    default left out, and no NCCL_P2P_LEVEL beside the NCCL_P2P_DISABLE=1 that beats it. Values out
    of their domain stay as they are. Names come out in alphabetical order.

    >>> canonical({"NCCL_PROTO": "LL", "NCCL_MAX_NCHANNELS": "16"})
    {'NCCL_MAX_CTAS': '16', 'NCCL_PROTO': 'allreduce:LL'}
    """
    result: dict[str, str] = {}
    for name, value in settings.items():
        current = _ALIASES.get(name, name)
        result[current] = _narrower(current, value, result.get(current, value))
    for name, elements in _LIST_ELEMENTS.items():
        if name in result:
            result[name] = lists.canonical_list(result[name], elements)
    if "NCCL_THREAD_THRESHOLDS" in result:
        thresholds = _canonical_thresholds(result["NCCL_THREAD_THRESHOLDS"])
        result["NCCL_THREAD_THRESHOLDS"] = thresholds
        if not thresholds:
            del result["NCCL_THREAD_THRESHOLDS"]
    if result.get("NCCL_P2P_DISABLE") == "1":
        result.pop("NCCL_P2P_LEVEL", None)
    return dict(sorted(result.items()))


def _narrower(name: str, one: str, other: str) -> str:
    """Choose as NCCL does between two names for one number: the more restrictive."""
    if not (one.isdecimal() and other.isdecimal()):
        return other
    pick = max if name == "NCCL_MIN_CTAS" else min
    return pick(one, other, key=int)


def _canonical_thresholds(value: str) -> str:
    """Write -2 for every threshold that is kept; empty if all are."""
    parts = ["-2" if part.startswith("-") else part for part in value.split()]
    return "" if all(part == "-2" for part in parts) else " ".join(parts)


def _shown(text: str) -> str:
    """Show a value on one line, cut to a length that leaves room for the reason."""
    short = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return short if short.isprintable() and short.isascii() else repr(short)
