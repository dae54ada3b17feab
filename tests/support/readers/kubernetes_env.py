"""What a container gets from ``env`` in a pod's spec: YAML, then Kubernetes' own substitution."""

from __future__ import annotations

import re

import yaml

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


class KubernetesRefusalError(ValueError):
    """A list that the API server would refuse."""


def read(text: str) -> dict[str, str]:
    """Return the container's environment; a reference sees the variables before it."""
    document = yaml.safe_load(text)
    if not isinstance(document, dict) or list(document) != ["env"]:
        raise KubernetesRefusalError(f"not one list named env: {document!r}")
    found: dict[str, str] = {}
    for entry in document["env"]:
        if not isinstance(entry, dict) or sorted(entry) != ["name", "value"]:
            raise KubernetesRefusalError(f"not a name and a value: {entry!r}")
        name, value = entry["name"], entry["value"]
        if not isinstance(name, str) or not isinstance(value, str):
            raise KubernetesRefusalError(f"not text: {entry!r}")
        found[name] = _expand(value, found)
    return found


def _expand(value: str, known: dict[str, str]) -> str:
    """Replace ``$(NAME)``, take ``$$`` for ``$``, and leave what names nothing as it is."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[1] is None else known.get(match[1], match[0])

    return _REFERENCE.sub(replaced, value)
