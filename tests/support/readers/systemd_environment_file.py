"""What systemd makes of an EnvironmentFile: the state machine of its env-file.c, as of 252.

A comment begins with ``#`` or ``;`` where a name could begin, and goes on over a line end that a
backslash hides. Quotes may open anywhere before an unquoted value, and a value ends at its line.
"""

from __future__ import annotations

import re
from enum import Enum, auto

_BLANKS = " \t\n\r"
_LINE_ENDS = "\n\r"
_ESCAPED_IN_DOUBLE_QUOTES = '"\\`$'


class _State(Enum):
    PRE_KEY = auto()
    KEY = auto()
    PRE_VALUE = auto()
    VALUE = auto()
    VALUE_ESCAPE = auto()
    SINGLE_QUOTED = auto()
    DOUBLE_QUOTED = auto()
    DOUBLE_QUOTED_ESCAPE = auto()
    COMMENT = auto()
    COMMENT_ESCAPE = auto()


class _Reader:
    def __init__(self) -> None:
        self.state = _State.PRE_KEY
        self.key = ""
        self.value = ""
        self.kept_chars = 0  # of the value: unquoted blanks after these are dropped at the end
        self.found: dict[str, str] = {}

    def take(self, char: str) -> None:
        getattr(self, f"_{self.state.name.lower()}")(char)

    def finish(self) -> None:
        if self.state in (_State.PRE_KEY, _State.KEY, _State.COMMENT, _State.COMMENT_ESCAPE):
            return
        self._push()

    def _push(self) -> None:
        name = self.key.rstrip(_BLANKS)
        value = self.value
        if self.state is _State.VALUE:
            value = value[: self.kept_chars] + value[self.kept_chars :].rstrip(_BLANKS)
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):  # others are dropped with a log line
            self.found[name] = value
        self.key = self.value = ""
        self.kept_chars = 0
        self.state = _State.PRE_KEY

    def _keep(self, char: str) -> None:
        self.value += char
        self.kept_chars = len(self.value)

    def _pre_key(self, char: str) -> None:
        if char in "#;":
            self.state = _State.COMMENT
        elif char not in _BLANKS:
            self.state = _State.KEY
            self.key = char

    def _key(self, char: str) -> None:
        if char in _LINE_ENDS:  # no "=": the line is dropped
            self.key, self.state = "", _State.PRE_KEY
        elif char == "=":
            self.state = _State.PRE_VALUE
        else:
            self.key += char

    def _pre_value(self, char: str) -> None:
        if char in _LINE_ENDS:
            self._push()
        elif char == "'":
            self.state = _State.SINGLE_QUOTED
        elif char == '"':
            self.state = _State.DOUBLE_QUOTED
        elif char == "\\":
            self.state = _State.VALUE_ESCAPE
        elif char not in _BLANKS:
            self.state = _State.VALUE
            self.value += char

    def _value(self, char: str) -> None:
        if char in _LINE_ENDS:
            self._push()
        elif char == "\\":
            self.kept_chars = len(self.value)
            self.state = _State.VALUE_ESCAPE
        else:
            self.value += char

    def _value_escape(self, char: str) -> None:
        self.state = _State.VALUE
        if char not in _LINE_ENDS:
            self._keep(char)

    def _single_quoted(self, char: str) -> None:
        if char == "'":
            self.state = _State.PRE_VALUE
        else:
            self._keep(char)

    def _double_quoted(self, char: str) -> None:
        if char == '"':
            self.state = _State.PRE_VALUE
        elif char == "\\":
            self.state = _State.DOUBLE_QUOTED_ESCAPE
        else:
            self._keep(char)

    def _double_quoted_escape(self, char: str) -> None:
        self.state = _State.DOUBLE_QUOTED
        if char in _ESCAPED_IN_DOUBLE_QUOTES:
            self._keep(char)
        elif char != "\n":
            self._keep(f"\\{char}")

    def _comment(self, char: str) -> None:
        if char == "\\":
            self.state = _State.COMMENT_ESCAPE
        elif char in _LINE_ENDS:
            self.state = _State.PRE_KEY

    def _comment_escape(self, _char: str) -> None:
        self.state = _State.COMMENT


def read(text: str) -> dict[str, str]:
    """Return the environment that a unit gets from this file; the last of a name wins."""
    reader = _Reader()
    for char in text:
        reader.take(char)
    reader.finish()
    return reader.found
