"""Whether servers that are started one after the other are still the same ones. Pure.

A ``--config`` file may be edited and SGLang upgraded between two boots, and boots of different
servers are no samples of one thing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nccltune.errors import ServerError
from nccltune.live.server_facts import HIDDEN, redacted

if TYPE_CHECKING:
    from nccltune.sglang.command import LaunchCommand
    from nccltune.verify.model import Boot

Flags = Mapping[str, tuple[str, ...]]
"""Canonical name (``tp_size``) -> values."""

_SPECULATIVE = "speculative_"
_NEW_VERIFY = "verify again without --resume"


def visible(text: str) -> str:
    r"""Return text that can be kept and shown, whatever bytes stood in a command.

    >>> visible("m\udcff")
    'm\\xff'
    """
    try:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # no bytes of ours: half of a pair in somebody's JSON
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def hidden(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command as it is kept: nobody's key is."""
    return tuple(visible(word) for word in redacted(argv))


def without_secrets(text: str, argv: Sequence[str]) -> str:
    """Return what somebody said about a launch, without the secrets that the command names.

    >>> without_secrets("api_key='abc' is odd", ("sglang", "serve", "--api-key", "abc"))
    "api_key='***' is odd"
    """
    for word, shown in zip(argv, redacted(argv), strict=True):
        if word != shown and (secret := word.removeprefix(shown.removesuffix(HIDDEN))):
            text = text.replace(secret, HIDDEN)
    return text


def resolved_flags(command: LaunchCommand) -> Flags:
    """Return the flags of a launch, those of its ``--config`` file included, as they are kept."""
    return {
        visible(name): hidden((f"--{name.replace('_', '-')}", *values))[1:]
        for name, values in sorted(command.flags.items())
    }


def changed_flags(before: Flags, after: Flags) -> list[str]:
    """Name what is not the same in the flags of one launch at two times.

    >>> changed_flags({"tp_size": ("2",), "a": ()}, {"tp_size": ("4",), "a": ()})
    ['--tp-size (was 2, is 4)']
    """
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return [
        f"--{name.replace('_', '-')} (was {_words(before.get(name))}, is {_words(after.get(name))})"
        for name in names
    ]


def check_flags(before: Flags, now: Flags) -> None:
    """Refuse to start a server whose ``--config`` file was edited since the verify began.

    Raises:
        ServerError: its flags are others.
    """
    if changed := changed_flags(before, now):
        raise ServerError(
            f"the launch is another one than when this verify began, {', '.join(changed)}: put the "
            f"--config file back and go on with --resume, or {_NEW_VERIFY}",
            code="launch_changed",
        )


def check_boot(boot: Boot, earlier: Sequence[Boot]) -> None:
    """Refuse a boot of another server than the boots before it: its figures belong to nobody.

    Args:
        boot: the new one.
        earlier: of the same verify, of every arm.

    Raises:
        ServerError: its SGLang, or how it resolved its speculative flags, is not what it was.
    """
    versions = [one.seen.version for one in earlier if one.seen.version]
    if versions and boot.seen.version and boot.seen.version != versions[0]:
        raise ServerError(
            f"SGLang is {boot.seen.version}, and was {versions[0]} in the boots before: put that "
            f"back and go on with --resume, or {_NEW_VERIFY}",
            code="server_changed",
        )
    first = next((one for one in earlier if one.arm == boot.arm), None)
    if first is None:
        return
    before, now = first.seen.server_info, boot.seen.server_info
    for name in sorted({*before, *now}):
        if name.startswith(_SPECULATIVE) and before.get(name) != now.get(name):
            raise ServerError(
                f"the server says {name} {now.get(name)}, and said {before.get(name)} in boot "
                f"{first.position + 1}: it is another server; {_NEW_VERIFY}",
                code="server_changed",
            )


def _words(values: tuple[str, ...] | None) -> str:
    if values is None:
        return "not given"
    return " ".join(values) or "given"
