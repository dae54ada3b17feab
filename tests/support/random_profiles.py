"""Seeded generators of profiles: every variable that one may hold, with values NCCL accepts."""

from __future__ import annotations

import random
import string
from functools import cache

from nccltune.envvars import CATALOGUE, Kind, check_setting, find_conflict
from nccltune.envvars.lists import ALGORITHMS, FUNCTIONS, PROTOCOLS
from nccltune.errors import UsageProblem

PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F))
_NUMBERS = tuple(str(number) for number in range(-2, 65))
_SIZES = tuple(str(2**power) for power in range(12, 31))
_WORDS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "PARALLEL", "GROUP", "160", "320", "640")


def random_settings(rng: random.Random) -> dict[str, str]:
    """Return settings of a valid profile, from none to all that fit each other."""
    names = [name for name, variable in CATALOGUE.items() if variable.kind is not Kind.FORBIDDEN]
    chosen = rng.sample(names, rng.choice([0, 1, 2, 6, len(names)]))
    settings: dict[str, str] = {}
    for name in chosen:
        settings[name] = _value(name, rng)
        if find_conflict(settings) is not None:
            del settings[name]
    return settings


def random_text(rng: random.Random) -> str:
    """Return a value of any printable characters that neither begins nor ends with a blank.

    No variable of the catalogue takes most of these; the spelling of a format has to hold anyway.
    """
    harsh = "\\\"'$`;#(){}%&|<>*?[]~!=: "
    alphabet = rng.choice([PRINTABLE, harsh, string.ascii_letters, harsh + "ab"])
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 24))).strip() or "x"


def _value(name: str, rng: random.Random) -> str:
    if name in ("NCCL_ALGO", "NCCL_PROTO"):
        return _list_value(name, rng)
    if name == "NCCL_THREAD_THRESHOLDS":
        return " ".join(rng.choice(["-2", "0", "4", "64", "99999"]) for _ in range(6))
    return rng.choice(_accepted(name))


def _list_value(name: str, rng: random.Random) -> str:
    elements = ALGORITHMS if name == "NCCL_ALGO" else PROTOCOLS
    while True:
        functions = rng.sample(FUNCTIONS, rng.randrange(1, len(FUNCTIONS) + 1))
        entries = [
            f"{function}:{','.join(rng.sample(elements, rng.randrange(1, 3)))}"
            for function in functions
        ]
        value = ";".join(entries)
        if _is_accepted(name, value):
            return value


@cache
def _accepted(name: str) -> tuple[str, ...]:
    variable = CATALOGUE[name]
    named = tuple(word.strip(",") for word in variable.domain.split())
    candidates = dict.fromkeys((*(variable.choices or ()), *_NUMBERS, *_SIZES, *_WORDS, *named))
    accepted = tuple(value for value in candidates if _is_accepted(name, value))
    assert accepted, f"no value known for {name}"
    return accepted


def _is_accepted(name: str, value: str) -> bool:
    try:
        check_setting(name, value)
    except UsageProblem:
        return False
    return True
