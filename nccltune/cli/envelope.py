"""One answer of a command: as an envelope for scripts, and what becomes of an exception.

This is the only place that knows which failure ends with which status, code and message.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from nccltune.cli.usage_words import usage_message
from nccltune.errors import ExitCode, NccltuneError

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "nccltune.cli/1"
DEBUG_VARIABLE = "NCCLTUNE_DEBUG"

_STATUS_BY_EXIT_CODE: Mapping[int, str] = {
    ExitCode.DONE: "ok",
    ExitCode.NO: "no",
    ExitCode.UNKNOWN: "unknown",
}
_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "free some space and run it again; what was written before is kept",
    errno.EDQUOT: "your quota is used up; free some space and run it again",
    errno.EROFS: "set NCCLTUNE_HOME to a folder that can be written",
    errno.EACCES: "check who owns it, or set NCCLTUNE_HOME to a folder of yours",
    errno.EPERM: "check who owns it, or set NCCLTUNE_HOME to a folder of yours",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the host has no file handles left",
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """One entry of ``errors``: a stable name and a line for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb gives back.

    Attributes:
        data: for scripts; anything that JSON can hold, numbers unrounded.
        show: builds what people see; called only when they are the ones who read it.
        warnings: lines that belong to the answer whoever reads it.
    """

    data: Mapping[str, object]
    show: Callable[[], Iterable[RenderableType]]
    exit_code: ExitCode = ExitCode.DONE
    warnings: tuple[str, ...] = ()
    errors: tuple[Complaint, ...] = ()


@dataclass(frozen=True, slots=True)
class Envelope:
    """The one JSON object that ``--json`` prints."""

    command: str
    exit_code: int
    data: Mapping[str, object] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    errors: Sequence[Complaint] = ()

    def format(self) -> str:
        """Return the envelope as one line of strict JSON: no NaN, no infinity."""
        fields = {
            "schema": SCHEMA,
            "command": self.command,
            "status": status_of(self.exit_code),
            "exit_code": int(self.exit_code),
            "data": plain(self.data),
            "warnings": list(self.warnings),
            "errors": [{"code": each.code, "message": each.message} for each in self.errors],
        }
        return json.dumps(fields, allow_nan=False)


def status_of(exit_code: int) -> str:
    """Name the kind of answer that an exit status stands for; a server's own may be any."""
    return _STATUS_BY_EXIT_CODE.get(exit_code, "error")


def plain(value: object) -> object:
    """Copy a value into what JSON can hold; a number that is not finite becomes null.

    >>> plain({"ratio": float("nan"), 4096: (1.5, "x")})
    {'ratio': None, '4096': [1.5, 'x']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return str(value)


@dataclass(frozen=True, slots=True)
class Failure:
    """How an exception ends the process."""

    exit_code: ExitCode
    complaint: Complaint


def failure_from(error: BaseException, typed: str = "") -> Failure:
    """Turn whatever escaped a command, whose words were typed, into a status, a code and a line."""
    if isinstance(error, NccltuneError):
        return Failure(error.exit_code, Complaint(error.code, one_line(str(error))))
    if isinstance(error, click.ClickException):
        return Failure(ExitCode.USAGE, Complaint("usage", one_line(usage_message(error, typed))))
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return Failure(ExitCode.INTERRUPTED, Complaint("interrupted", "interrupted"))
    if isinstance(error, OSError) and (
        error.filename is not None or error.errno in _ADVICE_BY_ERRNO
    ):
        return Failure(ExitCode.FILE, Complaint(_os_code(error), _os_message(error)))
    message = (
        f"this is a bug in nccltune: {type(error).__name__}: {one_line(str(error))}; "
        f"run again with {DEBUG_VARIABLE}=1 for the traceback"
    )
    return Failure(ExitCode.BUG, Complaint("bug", message))


def one_line(text: str) -> str:
    r"""Fold text into one line without control characters, which could repaint a terminal.

    >>> one_line("a\n  b\x1b[31m")
    'a b[31m'
    """
    folded = " ".join(text.split())
    return "".join(char for char in folded if char.isprintable())


def _os_code(error: OSError) -> str:
    return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "os_error"


def _os_message(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    reason = (error.strerror or type(error).__name__).lower()
    advice = _ADVICE_BY_ERRNO.get(error.errno or 0, "")
    return one_line(f"{where}{reason}{': ' + advice if advice else ''}")
