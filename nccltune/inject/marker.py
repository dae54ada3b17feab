"""The mark of the first route that decides: no later one takes our values for the operator's.

Pure: text in, text out. The hook in SGLang's interpreter writes and reads the same text by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MARKER = "NCCLTUNE_APPLIED"
"""``<digest>:<key>,<key>...``: digest of the profile, and the variables that were set from it."""

NOTHING_APPLIED = "none:"
"""The mark of a route that has looked at a launch and gives it nothing: no later one does."""

KEEP_ENVIRON = "SPT_NOENV"
"""setproctitle overwrites the environment that procfs shows, unless this is set."""

KEEP_ENVIRON_VALUE = "1"

OWN_NAMES = frozenset({MARKER, KEEP_ENVIRON})
"""What is set beside the variables of a profile, and nothing else ever is."""

_DIGEST_CHARS = 16
_HEX = frozenset("0123456789abcdef")
_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")


class Marker(NamedTuple):
    """What a marker says.

    Attributes:
        digest: of the profile's settings, see ``settings_digest``.
        keys: variables that were set from it, in alphabetical order.
    """

    digest: str
    keys: tuple[str, ...]


def settings_digest(settings: Mapping[str, str]) -> str:
    """Return the short name of a profile's settings: 16 hex digits, the same for equal settings.

    >>> settings_digest({"NCCL_ALGO": "Ring"})
    '37c51c0d22e6f82c'
    """
    text = json.dumps(dict(settings), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def format_marker(digest: str, keys: Iterable[str]) -> str:
    """Return the marker's value.

    >>> format_marker("0123456789abcdef", ["NCCL_PROTO", "NCCL_ALGO"])
    '0123456789abcdef:NCCL_ALGO,NCCL_PROTO'
    """
    return f"{digest}:{','.join(sorted(keys))}"


def parse_marker(text: str | None) -> Marker | None:
    """Read a marker's value; None where nothing was applied, or where nobody of ours wrote it.

    >>> parse_marker("0123456789abcdef:")
    Marker(digest='0123456789abcdef', keys=())
    >>> parse_marker("yes") is None, parse_marker("none:") is None
    (True, True)
    """
    if text is None:
        return None
    digest, colon, names = text.partition(":")
    keys = tuple(names.split(",")) if names else ()
    is_ours = len(digest) == _DIGEST_CHARS and _HEX.issuperset(digest) and colon
    if not is_ours or not all(key and _NAME_CHARS.issuperset(key) for key in keys):
        return None
    return Marker(digest, keys)
