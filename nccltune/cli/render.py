"""Writes answers to the terminal: the only module that prints.

rich is imported inside the functions that draw, so that an envelope, a failure or an answer of
plain lines costs nothing.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nccltune.cli.envelope import Envelope, one_line
from nccltune.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console, RenderableType

UNWRAPPED_WIDTH = 10_000
"""Columns used where the output is not a terminal and COLUMNS says nothing: whatever reads it wants
names and lines whole."""


class OutputError(FileError):
    """The answer is known and cannot be handed over."""


def make_console(stream: TextIO) -> Console:
    """Return a console that takes text as it is: no markup, no emoji, no guessed colours.

    rich itself honours NO_COLOR, TERM=dumb and COLUMNS.
    """
    from rich.console import Console

    width = None
    if not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = UNWRAPPED_WIDTH
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)


def prepare_streams() -> None:
    """Let text that the terminal cannot encode be replaced instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def print_report(parts: Iterable[RenderableType]) -> None:
    """Print what people see, on stdout.

    Raises:
        OutputError: stdout cannot take it, usually because it is a file on a full disk.
    """
    if sys.stdout is None:
        return
    with _writing():
        console: Console | None = None
        lines: list[str] = []
        for part in parts:
            if isinstance(part, str):
                # It may be a path or a command that has to survive being copied: never wrapped.
                lines += _lines_of(part or "\n")
                continue
            console = console or make_console(sys.stdout)
            with _wide_enough(console, part):
                if console.is_terminal:
                    _write(lines)
                    lines.clear()
                    console.print(part)
                    continue
                with console.capture() as drawn:
                    console.print(part)
            lines += _lines_of(drawn.get())
        # rich flushes stdout after every capture, and ends the process when its reader has left
        _write(lines)


@contextmanager
def _wide_enough(console: Console, part: RenderableType) -> Iterator[None]:
    """Draw wider than the terminal where a name is: the terminal wraps it, and copies it whole."""
    from rich.measure import Measurement

    options = console.options.update(width=UNWRAPPED_WIDTH)
    width = console.width
    console.width = max(width, Measurement.get(console, options, part).minimum)
    try:
        yield
    finally:
        console.width = width


def _lines_of(text: str) -> Iterator[str]:
    return (f"{line.rstrip()}\n" for line in text.splitlines())


def _write(lines: Iterable[str]) -> None:
    sys.stdout.writelines(lines)
    sys.stdout.flush()


def print_envelope(envelope: Envelope) -> None:
    """Print the one JSON line on stdout.

    Raises:
        OutputError: as for ``print_report``.
    """
    if sys.stdout is None:
        return
    text = envelope.format()
    with _writing():
        print(text, flush=True)


@contextmanager
def _writing() -> Iterator[None]:
    """Take a reader that left early for no failure, any other fault of stdout for its end."""
    try:
        yield
    except BrokenPipeError:
        _drop_stdout()
    except OSError as error:
        _drop_stdout()
        reason = (error.strerror or type(error).__name__).lower()
        raise OutputError("standard output", reason, code="no_output") from error


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def print_failure(message: str) -> None:
    """Print one line about what went wrong, on stderr."""
    _print_diagnostic(f"nccltune: {one_line(message)}")


def print_note(message: str) -> None:
    """Print one line worth knowing before the answer, on stderr."""
    _print_diagnostic(f"nccltune: {one_line(message)}")


def print_warnings(warnings: Sequence[str]) -> None:
    """Print one line a warning, on stderr."""
    for warning in warnings:
        _print_diagnostic(f"nccltune: warning: {one_line(warning)}")


def print_traceback(error: BaseException) -> None:
    """Print the traceback that NCCLTUNE_DEBUG asks for, on stderr."""
    import traceback

    _print_diagnostic("".join(traceback.format_exception(error)).rstrip())


def _print_diagnostic(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return  # nobody is left to be told
