"""What ``docker run --env-file`` makes of a file (cli/pkg/kvfile as of 28.2).

Blanks before a line are dropped, ``#`` starts a comment there only, and everything after the first
``=`` is the value: quotes, comments and blanks at its end included.
"""

from __future__ import annotations


class DockerRefusalError(ValueError):
    """A line for which docker refuses to start the container."""


def read(text: str) -> dict[str, str]:
    """Return the container's environment; a name without ``=`` would be taken from the caller's."""
    found: dict[str, str] = {}
    for raw in text.removeprefix("\ufeff").split("\n"):
        line = raw.removesuffix("\r").lstrip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not name:
            raise DockerRefusalError(f"no variable name on line {raw!r}")
        if any(char.isspace() for char in name):
            raise DockerRefusalError(f"variable {name!r} contains whitespaces")
        if equals:
            found[name] = value
    return found
