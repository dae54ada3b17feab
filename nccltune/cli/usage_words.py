"""What click says of a command line, in the words of every other message here."""

from __future__ import annotations

import re

import click

_INVALID = re.compile(r"Invalid value(?: for (.+?))?: ")
_OWN_WORDS = (
    (r"is not a valid integer( range)?$", "is not a whole number"),
    (r"is not a valid float( range)?$", "is not a number"),
    (r"is not in the range (\S+?)<=x<=(\S+)$", r"is not between \1 and \2"),
    (r"is not in the range x>=(\S+)$", r"is not \1 or more"),
    (r"is not in the range x<=(\S+)$", r"is not \1 or less"),
    (r"is not in the range x>(\S+)$", r"is not more than \1"),
    (r"is not in the range x<(\S+)$", r"is not less than \1"),
    (r"\. Choose from: ?", "; choose from: "),
)


def usage_message(error: click.ClickException, typed: str = "") -> str:
    """Say what is wrong with the command line, and where its help is.

    Args:
        error: from click.
        typed: the command's words, for an error that does not know its command: click's own for an
            option that lacks its argument.
    """
    message = _said(error)
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else f"nccltune {typed}".rstrip()
    joint = " See" if message.endswith("?") else "; see"
    return f"{message}{joint} {command} --help"


def _said(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        near = " or ".join(error.possibilities or ())
        question = f"; did you mean {near}?" if near else ""
        return f"no such option: {error.option_name}{question}"
    return in_own_words(error.format_message())


def in_own_words(said: str) -> str:
    r"""Fold what click says into one line without a capital in front or a full stop behind.

    >>> in_own_words("Invalid value for '--seed': 'abc' is not a valid integer range.")
    "--seed: 'abc' is not a whole number"
    >>> in_own_words("Missing option '--format'. Choose from:\n\tdocker,\n\tk8s")
    "missing option '--format'; choose from: docker, k8s"
    """
    line = " ".join(said.split()).rstrip(".")
    where = ""
    if invalid := _INVALID.match(line):
        line = line[invalid.end() :]
        names = (invalid[1] or "").replace("'", "")
        where = f"{names}: " if names else ""
    for pattern, ours in _OWN_WORDS:
        line = re.sub(pattern, ours, line)
    # A name in capitals keeps them.
    begins_a_sentence = re.match(r"[A-Z][a-z]*\b", line) is not None
    return where + (line[:1].lower() + line[1:] if begins_a_sentence else line)
