"""One finding of the doctor. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """What a check found."""

    OK = "ok"
    WARN = "warn"
    """It may make launches slower, or a measurement worthless."""
    FAIL = "fail"
    """Something that was set up does not work."""
    SKIP = "skip"
    """It could not be looked at here, or does not apply."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        id: stable name, for scripts.
        message: one sentence: what was found.
        fix: what to do about it; empty where nothing has to be done.
    """

    id: str
    status: Status
    message: str
    fix: str = ""


def counted(count: int, one: str, many: str = "") -> str:
    """Write a number with what it counts; the plural is that with an s unless given.

    >>> counted(1, "setting"), counted(0, "setting"), counted(2, "rank runs", "ranks run")
    ('1 setting', '0 settings', '2 ranks run')
    """
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def split_advice(text: str) -> tuple[str, str]:
    """Part a message of an error of ours into what is wrong and what to do.

    >>> split_advice("no driver found; install it; reboot")
    ('no driver found', 'install it; reboot')
    """
    message, _, fix = text.partition("; ")
    return message, fix
