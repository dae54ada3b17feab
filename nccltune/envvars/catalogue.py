"""The whole catalogue: every NCCL variable that this tool has an opinion on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nccltune.envvars.forbidden import FORBIDDEN
from nccltune.envvars.injectable import INJECTABLE
from nccltune.envvars.model import Kind, Variable
from nccltune.envvars.searched import SEARCHED

CATALOGUE: Mapping[str, Variable] = MappingProxyType(
    {variable.name: variable for variable in (*SEARCHED, *INJECTABLE, *FORBIDDEN)}
)

PINNED: Mapping[str, str] = MappingProxyType(
    {name: variable.pinned for name, variable in CATALOGUE.items() if variable.pinned}
)
"""Names that a search leaves as the launch has them, each with the reason."""

SEARCHED_NAMES: tuple[str, ...] = tuple(
    name for name, variable in CATALOGUE.items() if variable.kind is Kind.SEARCHED
)
