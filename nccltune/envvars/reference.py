"""The reference page of the catalogue, ``docs/variables.md``, made from the catalogue itself."""

from __future__ import annotations

from collections.abc import Iterable

from nccltune.envvars.catalogue import CATALOGUE, PINNED
from nccltune.envvars.model import Kind, Variable

_HEAD = """\
# NCCL variables

Made from the catalogue in `nccltune/envvars/`; change it there. A test compares the two and says
how to write this page again.

Facts were read in the source of NCCL 2.28.9 unless a version is named. *Since* and *until* are the
first version that has the variable and the first that no longer has it; empty means not looked up
or still there. A setting is refused where NCCL would silently change it or read something else.
Numbers are plain decimal numbers everywhere: NCCL reads `4M` as 4.
"""

_SEARCHED_HEAD = """
## Searched

The search proposes the values below, and leaving the variable unset. A profile may hold any
accepted value. `NCCL_ALGO` and `NCCL_PROTO` should always carry `allreduce:`; LL128 is proposed
only where NCCL offers it by itself.
"""

_INJECTABLE_HEAD = """
## Injectable

A person may put these into a profile; the search never proposes them.
"""

_PINNED_HEAD = """
## Pinned

A search leaves these as the launch has them.
"""

_FORBIDDEN_HEAD = """
## Forbidden

Never set by this tool, whatever a profile says. What the server's own environment holds is left
alone.
"""


def format_reference() -> str:
    """Return the whole page."""
    searched, injectable, forbidden = (
        [variable for variable in CATALOGUE.values() if variable.kind is kind] for kind in Kind
    )
    return "".join(
        (
            _HEAD,
            _SEARCHED_HEAD,
            *(_section(variable) for variable in searched),
            _INJECTABLE_HEAD,
            *(_section(variable) for variable in injectable),
            _PINNED_HEAD,
            _table(("variable", "reason"), ((f"`{name}`", why) for name, why in PINNED.items())),
            _FORBIDDEN_HEAD,
            _table(
                ("variable", "effect", "reason"),
                ((f"`{it.name}`", it.summary, it.reason) for it in forbidden),
            ),
        )
    )


def _section(variable: Variable) -> str:
    facts = (
        ("accepted", _with_unit(variable.domain, variable.unit)),
        ("proposed", _choices(variable)),
        ("default", variable.default),
        ("read", variable.read_at.value),
        ("since", variable.since),
        ("until", variable.until),
        ("SGLang writes", variable.sglang),
        (f"why {variable.kind.value}", variable.reason),
    )
    lines = "".join(f"- {label}: {text}\n" for label, text in facts if text)
    return f"\n### {variable.name}\n\n{variable.summary}\n\n{lines}"


def _choices(variable: Variable) -> str:
    return ", ".join(f"`{choice}`" for choice in variable.choices or ())


def _with_unit(domain: str, unit: str) -> str:
    return f"{domain} ({unit})" if unit else domain


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    written = [head, ("---",) * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in written)
