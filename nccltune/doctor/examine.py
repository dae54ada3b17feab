"""Runs every check; none hides the others by failing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nccltune.doctor.check import Check, Status
from nccltune.doctor.containers import check_containers
from nccltune.doctor.draft import check_draft
from nccltune.doctor.gpu_checks import check_gpus
from nccltune.doctor.launch_checks import check_launch
from nccltune.doctor.pci import check_pci
from nccltune.doctor.server_checks import check_server
from nccltune.doctor.settings_checks import check_settings_around
from nccltune.doctor.store_checks import check_store

if TYPE_CHECKING:
    from nccltune.doctor.case import Case

GROUPS: tuple[Callable[[Case], Iterator[Check]], ...] = (
    check_store,
    check_server,
    check_settings_around,
    check_gpus,
    check_pci,
    check_containers,
    check_launch,
    check_draft,
)
"""In the order of the report."""


def examine(
    case: Case, groups: tuple[Callable[[Case], Iterator[Check]], ...] = GROUPS
) -> tuple[Check, ...]:
    """Return what every check found.

    A check that meets something nobody thought of says so, and the others are run all the same.
    """
    found: list[Check] = []
    for group in groups:
        try:
            found.extend(group(case))
        except Exception as error:  # noqa: BLE001 - one odd host must not silence the whole doctor
            name = group.__name__.removeprefix("check_")
            message = f"this check itself failed: {type(error).__name__}: {error}"
            found.append(Check(name, Status.WARN, message, "please report it as a bug of nccltune"))
    return tuple(found)
