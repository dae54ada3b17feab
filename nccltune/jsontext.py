"""JSON files that people edit: read strictly, and every complaint names its line.

``json`` alone forgets where things stood, and lets the last of two equal keys win without a word.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from nccltune.errors import FileError

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s{}\[\],:"]+')

_CONSTANTS = ("NaN", "Infinity", "-Infinity")

# Far above any file of ours; each level costs memory for every place below it.
_MAX_DEPTH = 64

Place = tuple[str | int, ...]
"""Keys and list positions from the top of the document down to one value."""


@dataclass(frozen=True, slots=True)
class JsonText:
    """A document that was read, and can still say where each of its values stands."""

    path: Path
    text: str
    data: object

    @property
    def lines(self) -> Mapping[Place, int]:
        """Line of every key and list element; found anew each time, since only errors need it."""
        return _index_lines(self.path, self.text)

    def problem(self, reason: str, *place: str | int, code: str = "bad_file") -> FileError:
        """Build the error for the value at ``place``: file, line, reason and the line's text."""
        lines = self.lines
        line = lines[place] if place in lines else lines.get(place[:-1], 1)
        return _problem(self.path, self.text, line, reason, code)

    def as_object(self, schema: str, what: str) -> dict[str, Any]:
        """Return the object that the whole document is, of the one schema that is read.

        Args:
            schema: what its ``schema`` has to be.
            what: names such a document, for the complaint.
        """
        if not isinstance(self.data, dict):
            raise self.problem(f"{what} is an object in {{}}")
        given = self.data.get("schema")
        if given != schema:
            found = "no schema" if given is None else f"schema {json.dumps(given)[:80]}"
            reason = f'{found}, and this version reads "{schema}" only'
            raise self.problem(reason, "schema", code="unknown_schema")
        return self.data

    def check_keys(self, mapping: Mapping[str, object], known: Iterable[str]) -> None:
        """Refuse a key at the top of the document that nobody reads, a typing error most often."""
        names = list(known)
        for key in mapping:
            if key not in names:
                close = difflib.get_close_matches(key, names, 1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
                raise self.problem(f"unknown key {key!r}; {hint}", key)


def parse_json(text: str, path: Path) -> JsonText:
    """Read a JSON document.

    Raises:
        FileError: not JSON (a file cut short, most often), NaN or infinite numbers, one key twice
            in the same object, text that is not valid Unicode, or absurdly deep nesting.
    """
    has_repeated_key = False

    def note_repeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal has_repeated_key
        mapping = dict(pairs)
        has_repeated_key |= len(mapping) != len(pairs)
        return mapping

    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=note_repeated)
    except json.JSONDecodeError as error:
        raise _syntax_problem(path, text, error) from None
    except RecursionError:
        raise FileError(path, "is nested too deeply", code="bad_json") from None
    except ValueError as error:
        shown = str(error) if str(error) in _CONSTANTS else "it has thousands of digits"
        reason = f"holds a number that cannot be used: {shown}"
        raise FileError(path, reason, code="bad_json") from None
    if has_repeated_key or _is_too_deep(data):
        _index_lines(path, text)
    try:
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        reason = r"holds half of a \ud... pair, which is no text"
        raise FileError(path, reason, code="bad_json") from None
    return JsonText(path, text, data)


def _is_too_deep(data: object) -> bool:
    level = [data]
    for _ in range(_MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
    return any(isinstance(value, dict | list) for value in level)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _syntax_problem(path: Path, text: str, error: json.JSONDecodeError) -> FileError:
    if text.startswith("\ufeff"):
        reason = "begins with a byte order mark; save it as UTF-8 without one"
        return FileError(path, reason, line=1, code="bad_json")
    if not text.strip():
        return FileError(path, "is empty", line=1, code="bad_json")
    # A JSON string holds no raw line break, so an unterminated one reaches to the end of the file.
    is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    if is_cut:
        line = text.rstrip().count("\n") + 1
        reason = "not JSON: the file ends too early (cut short?)"
        return _problem(path, text, line, reason, "bad_json")
    reason = f"not JSON: {error.msg[0].lower()}{error.msg[1:]}"
    return _problem(path, text, error.lineno, reason, "bad_json")


def _problem(path: Path, text: str, line: int, reason: str, code: str) -> FileError:
    shown = text.split("\n")[line - 1] if text else ""
    return FileError(path, reason, line=line, text=shown, code=code)


@dataclass(slots=True)
class _Frame:
    """One object or list that is open while the text is walked."""

    is_object: bool
    key: str | int
    is_key_next: bool
    seen: set[str] = field(default_factory=set)

    def open_key(self, key: str) -> None:
        """Enter the value of ``key``."""
        self.seen.add(key)
        self.key, self.is_key_next = key, False

    def open_next(self) -> None:
        """Go past a comma: the next list element, or the next key."""
        if isinstance(self.key, int):
            self.key += 1
        self.is_key_next = self.is_object


def _index_lines(path: Path, text: str) -> dict[Place, int]:
    """Walk the tokens of valid JSON, without recursion, and note where everything stands.

    Raises:
        FileError: a key stands twice in one object, or the nesting is too deep.
    """
    lines: dict[Place, int] = {(): 1}
    frames: list[_Frame] = []
    line, position = 1, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        line += text.count("\n", position, match.start())
        position = match.start()
        top = frames[-1] if frames else None
        if token in "}]":
            frames.pop()
        elif token == "," and top is not None:
            top.open_next()
        elif top is not None and top.is_key_next:
            key = json.loads(token)
            if key in top.seen:
                reason = f"key {key!r} appears twice; keep one"
                raise _problem(path, text, line, reason, "bad_file")
            top.open_key(key)
            lines[tuple(frame.key for frame in frames)] = line
        elif token != ":":
            if top is not None and not top.is_object:
                lines[tuple(frame.key for frame in frames)] = line
            if token in "{[":
                if len(frames) == _MAX_DEPTH:
                    raise _problem(path, text, line, "is nested too deeply", "bad_json")
                frames.append(_Frame(token == "{", "" if token == "{" else 0, token == "{"))
    return lines
