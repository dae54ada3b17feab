"""Typed access to the objects of a recording's file; complaints name line, key and value."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccltune.errors import FileError
    from nccltune.jsontext import JsonText, Place

_SHOWN_CHARS = 60


class ObjectReader:
    """Takes the keys of one object, one by one; `finish` refuses it when some are left over.

    Raises:
        FileError: from every method, for a missing key or a value of the wrong kind.
    """

    def __init__(self, document: JsonText, value: object, what: str, *place: str | int) -> None:
        self._document = document
        self._what = what
        self._place: Place = place
        if not isinstance(value, dict):
            raise self.problem(f"must be an object, not {_shown(value)}")
        self._left: dict[str, object] = dict(value)

    def problem(self, reason: str, *place: str | int) -> FileError:
        """Build the error for this object, or for the value at a place in it."""
        return self._document.problem(f"{self._what} {reason}", *self._place, *place)

    def has(self, key: str) -> bool:
        """Say whether a key is there, not null, and not taken yet."""
        return self._left.get(key) is not None

    def take(self, key: str) -> object:
        """Take a value of any kind."""
        if key not in self._left:
            raise self.problem(f"lacks {key!r}")
        return self._left.pop(key)

    def text(self, key: str) -> str:
        """Take a string that says something."""
        value = self.take(key)
        if not isinstance(value, str) or not value:
            raise self._bad(key, "a string that is not empty", value)
        return value

    def optional_text(self, key: str) -> str | None:
        """Take a string; None when the key is absent or null."""
        if not self.has(key):
            self._left.pop(key, None)
            return None
        return self.text(key)

    def moment(self, key: str) -> str:
        """Take an ISO 8601 date or moment, as it was written."""
        value = self.text(key)
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise self._bad(key, "an ISO 8601 date or time", value) from None
        return value

    def count(self, key: str, *, minimum: int = 1) -> int:
        """Take a whole number."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._bad(key, f"a whole number of at least {minimum}", value)
        return value

    def flag(self, key: str) -> bool:
        """Take true or false."""
        value = self.take(key)
        if not isinstance(value, bool):
            raise self._bad(key, "true or false", value)
        return value

    def number(self, key: str) -> float:
        """Take a finite number above zero: a time, in the unit that the key names."""
        return self._check_number(self.take(key), key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Take an array, not empty, of finite numbers above zero."""
        values = self.items(key)
        if not values:
            raise self._bad(key, "an array that is not empty", values)
        return tuple(self._check_number(value, key) for value in values)

    def items(self, key: str) -> list[object]:
        """Take an array."""
        value = self.take(key)
        if not isinstance(value, list):
            raise self._bad(key, "an array", value)
        return value

    def mapping(self, key: str) -> dict[str, object]:
        """Take an object as it is."""
        value = self.take(key)
        if not isinstance(value, dict):
            raise self._bad(key, "an object", value)
        return dict(value)

    def texts(self, key: str) -> dict[str, str]:
        """Take an object whose values are all strings, as an environment has them."""
        texts: dict[str, str] = {}
        for name, value in self.mapping(key).items():
            if not isinstance(value, str):
                raise self._bad(key, f"an object with a string for {name!r}", value)
            texts[name] = value
        return texts

    def finish(self) -> None:
        """Refuse keys that nobody asked for: a typing error would lose a measurement unnoticed."""
        for key in self._left:
            raise self.problem(f"has a key that this version does not know: {key!r}", key)

    def _check_number(self, value: object, key: str) -> float:
        wanted = "a finite number above zero"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(key, wanted, value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0.0:
            raise self._bad(key, wanted, value)
        return number

    def _bad(self, key: str, wanted: str, value: object) -> FileError:
        return self.problem(f"needs {wanted} as {key!r}, not {_shown(value)}", key)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
