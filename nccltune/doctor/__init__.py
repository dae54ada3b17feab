"""Everything that would make a launch slower than believed, or a measurement a lie, looked at."""

from __future__ import annotations

from nccltune.doctor.case import Case, Sources, own_sources, read_case
from nccltune.doctor.check import Check, Status
from nccltune.doctor.examine import examine

__all__ = ["Case", "Check", "Sources", "Status", "examine", "own_sources", "read_case"]
