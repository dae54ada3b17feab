"""Every failure that a user can meet, with the code and exit status that scripts rely on.

NccltuneError
├── UsageProblem     exit 2    the command line asks for something that makes no sense
├── HostError        exit 5    this host cannot do it: no GPU, driver mismatch, /dev/shm too small
├── FileError        exit 6    a profile, recording, study or config file cannot be used
├── RankError        exit 7    rank processes could not be started or answered nonsense
├── ServerError      exit 8    the server under test is unusable
├── BusyError        exit 9    somebody else holds the GPUs or the search lock
└── DeadlineError    exit 124  the time given is over

Anything else that escapes is a bug of ours (exit 1). A message says what is wrong, with which
value, and what to do next, in one line.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit status of every command but ``run`` (which follows env(1) for its own failures)."""

    DONE = 0
    BUG = 1
    USAGE = 2
    NO = 3
    UNKNOWN = 4
    HOST = 5
    FILE = 6
    RANKS = 7
    SERVER = 8
    BUSY = 9
    DEADLINE = 124
    INTERRUPTED = 130


class NccltuneError(Exception):
    """Base of every failure with a message meant for people.

    Attributes:
        code: stable, machine-readable name of the failure (``errors[].code`` of the JSON envelope).
        exit_code: process exit status.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class UsageProblem(NccltuneError):
    """The request makes no sense as it stands; the message names the option and the value."""

    exit_code = ExitCode.USAGE


class HostError(NccltuneError):
    """This host cannot do what was asked."""

    exit_code = ExitCode.HOST


class FileError(NccltuneError):
    """A file cannot be used; the message is ``PATH:LINE: reason: offending text``."""

    exit_code = ExitCode.FILE

    def __init__(
        self,
        path: Path | str,
        reason: str,
        *,
        line: int | None = None,
        text: str | None = None,
        code: str = "bad_file",
    ) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        shown = f": {text.strip()[:120]!r}" if text is not None else ""
        super().__init__(f"{where}: {reason}{shown}", code=code)
        self.path = Path(path)
        self.line = line


class RankError(NccltuneError):
    """The rank processes could not be started, or did not speak the protocol."""

    exit_code = ExitCode.RANKS


class ServerError(NccltuneError):
    """The server under test cannot be measured."""

    exit_code = ExitCode.SERVER


class BusyError(NccltuneError):
    """The GPUs or a lock are in somebody else's hands; trying again later may help."""

    exit_code = ExitCode.BUSY


class DeadlineError(NccltuneError):
    """The overall time limit ended before the answer was known."""

    exit_code = ExitCode.DEADLINE
