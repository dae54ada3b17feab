"""What NCCL makes of a configuration file: the reader that the product itself uses."""

from __future__ import annotations

from nccltune.host.conf_files import parse_conf


def read(text: str) -> dict[str, str]:
    """Return NCCL's settings.

    Raises:
        ValueError: NCCL would read something else than was probably meant.
    """
    settings, problems = parse_conf(text.encode())
    if problems:
        raise ValueError("; ".join(problems))
    return settings
