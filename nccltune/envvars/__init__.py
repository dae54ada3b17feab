"""The catalogue of NCCL variables: what each accepts, what it does, and what may be done with it.

Pure data and checks; nothing here reads or writes the environment of a process.
"""

from __future__ import annotations

from nccltune.envvars.catalogue import CATALOGUE, PINNED, SEARCHED_NAMES
from nccltune.envvars.model import Check, Kind, ReadAt, Variable
from nccltune.envvars.reference import format_reference
from nccltune.envvars.settings import (
    canonical,
    check_setting,
    check_settings,
    find_conflict,
    needs_offer,
    parse_assignment,
    search_domain,
)

__all__ = [
    "CATALOGUE",
    "PINNED",
    "SEARCHED_NAMES",
    "Check",
    "Kind",
    "ReadAt",
    "Variable",
    "canonical",
    "check_setting",
    "check_settings",
    "find_conflict",
    "format_reference",
    "needs_offer",
    "parse_assignment",
    "search_domain",
]
