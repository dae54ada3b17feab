"""What is kept: profiles, which of them is active, which launches get it, and which did.

Reading is loaded at once, for every launch does it; whatever writes a profile or the state is not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from nccltune.store.files import (
    Found,
    Listed,
    Where,
    find_profile,
    list_profiles,
    load_profile,
    profiles_dir,
)
from nccltune.store.launches import LaunchRecord, append_launch_record, read_launch_records
from nccltune.store.policy import Launches, Policy, read_policy
from nccltune.store.reading import check_ownership
from nccltune.store.state import ActiveState, read_active

if TYPE_CHECKING:
    from nccltune.store.steps import (
        Action,
        Activation,
        Reason,
        activate,
        deactivate,
        rollback,
        save_candidate,
    )
    from nccltune.store.verified import Standing, mark_verified, read_evidence, standing_of

__all__ = [
    "Action",
    "Activation",
    "ActiveState",
    "Found",
    "LaunchRecord",
    "Launches",
    "Listed",
    "Policy",
    "Reason",
    "Standing",
    "Where",
    "activate",
    "append_launch_record",
    "check_ownership",
    "deactivate",
    "find_profile",
    "list_profiles",
    "load_profile",
    "mark_verified",
    "profiles_dir",
    "read_active",
    "read_evidence",
    "read_launch_records",
    "read_policy",
    "rollback",
    "save_candidate",
    "standing_of",
]

_VERIFIED = ("Standing", "mark_verified", "read_evidence", "standing_of")


if not TYPE_CHECKING:  # or every misspelt name would pass for an object

    def __getattr__(name: str) -> object:
        """Load what changes the store; writing needs modules that a launch should not wait for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "verified" if name in _VERIFIED else "steps"
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
