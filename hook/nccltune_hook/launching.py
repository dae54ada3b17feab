"""Decides about one launch, sets what it is given, and writes it down.

The rules are those of ``nccltune run``; where this code cannot tell as much, it sets nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from nccltune_hook import say, store
from nccltune_hook.command import Command, Unreadable, read_command, server_tokens
from nccltune_hook.host import Foreign, Unsure, check_fit, is_insisted_on

MARKER = "NCCLTUNE_APPLIED"
NOTHING_APPLIED = "none:"
KEEP_ENVIRON = "SPT_NOENV"
ANY_HOST_VARIABLE = "NCCLTUNE_ANY_HOST"
RUN_DIR_VARIABLE = "NCCLTUNE_RUN_DIR"
SYSTEM_RUN_DIR = "/run/nccltune"
SHARED_SOURCE = "shared-gpu"
RECORDING_SOURCE = "recording:"

MAX_MESSAGE_BYTES = 2048
_SHORT_CHARS = 200
_OTHER_NAMES = {
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_CTAS": "NCCL_MAX_NCHANNELS",
}
_ADVICE = f"'nccltune run -- ...' looks closer, and {ANY_HOST_VARIABLE}=1 overrides"


class Decision(NamedTuple):
    """What a launch is given.

    Attributes:
        reason: one line for people.
        digest: of the profile's settings; None where no profile is applied.
        applied: variables to set.
        kept: variables of the profile that the operator has set, with the operator's values.
        is_degraded: a profile is meant for this launch and is not used.
        is_silent: nothing worth a line.
    """

    reason: str
    name: str | None = None
    digest: str | None = None
    applied: dict[str, str] = {}  # noqa: RUF012 - never changed
    kept: dict[str, str] = {}  # noqa: RUF012 - never changed
    is_degraded: bool = False
    is_silent: bool = False


def tune(argv: list[str], environ: Any) -> None:
    """Set what the active profile says, where this process launches a server and nobody has yet.

    Args:
        argv: of this process.
        environ: of this process; variables are set in it.
    """
    tokens = server_tokens(argv)
    if tokens is None or is_decided(environ):
        return
    decision = decide(tokens, environ)
    if decision.digest is None:
        environ[MARKER] = NOTHING_APPLIED
    else:
        environ.update(decision.applied)
        environ[MARKER] = f"{decision.digest}:{','.join(sorted(decision.applied))}"
        environ.setdefault(KEEP_ENVIRON, "1")
    if not decision.is_silent:
        say(decision.reason)
    record(tokens, environ, decision)


def is_decided(environ: Any) -> bool:
    """Tell whether another route has decided about this launch, be it to give it nothing."""
    mark = environ.get(MARKER, "")
    digest, colon, _ = mark.partition(":")
    is_digest = len(digest) == store.DIGEST_CHARS and set(digest) <= set("0123456789abcdef")
    return mark == NOTHING_APPLIED or (bool(colon) and is_digest)


def decide(tokens: list[str], environ: Any) -> Decision:
    """Decide what a launch is given; what is wrong with store or host ends in a reason."""
    name: str | None = None
    try:
        folder = store.reading_dir(environ)
        active = store.read_active(folder)
        name = active.name
        if name is None:
            return Decision("no profile is active", is_silent=True)
        command = read_command(tokens)
        is_any_host = environ.get(ANY_HOST_VARIABLE) == "1"
        refusal = _uncovered(command, folder, is_any_host=is_any_host)
        if refusal is not None:
            return Decision(f"no profile for this launch: {refusal}")
        profile = store.load_profile(folder, active)
        fit = (
            f"{ANY_HOST_VARIABLE} is set"
            if is_any_host
            else _fit(profile, command, environ, active.any_host_gpus)
        )
        return _with(profile, fit, environ)
    except store.Refused as problem:
        shown = f"profile {name} cannot be used" if name else "the profile cannot be looked up"
        return Decision(f"warning: {shown}: {problem}", is_degraded=True)
    except Unreadable as problem:
        return Decision(f"warning: no profile for this launch: {problem}", is_degraded=True)
    except Foreign as problem:
        reason = f"profile {name} was made for another kind of host: {problem}"
        return Decision(f"warning: {reason}; {_ADVICE}", is_degraded=True)
    except Unsure as problem:
        reason = f"profile {name} is not applied, for it may not fit: {problem}"
        return Decision(f"warning: {reason}; {_ADVICE}", is_degraded=True)


def _uncovered(command: Command, folder: Path, *, is_any_host: bool) -> str | None:
    """Return why a launch gets no profile by policy; None where it may get one."""
    try:
        policy = store.policy(folder)
    except store.Refused as problem:
        say(f"warning: {problem}; EAGLE-3 launches alone get a profile")
        policy = "eagle3"
    algorithm = command.algorithm
    what = f"this one speculates by {algorithm}" if algorithm else "this one does not speculate"
    if policy == "eagle3" and algorithm != "EAGLE3":
        return f"the policy covers EAGLE-3 launches, and {what}"
    if policy == "speculative" and algorithm is None:
        return f"the policy covers speculative launches, and {what}"
    if is_any_host:
        return None
    if command.nnodes > 1:
        return f"it runs over {command.nnodes} nodes"
    return "tensor parallel size 1 has no all-reduce to tune" if command.tp_size < 2 else None


def _fit(profile: store.Profile, command: Command, environ: Any, any_host_gpus: list[Any]) -> str:
    if is_insisted_on(any_host_gpus, environ):
        return "activated here with --any-host"
    if profile.source == SHARED_SOURCE:
        raise Foreign("it was found with all ranks on one GPU")
    if profile.source.startswith(RECORDING_SOURCE):
        raise Foreign("it was found in a recording")
    if profile.fingerprint is None:
        return "it names no host"
    return f"{check_fit(profile.fingerprint, command, environ)} host"


def _with(profile: store.Profile, fit: str, environ: Any) -> Decision:
    applied, kept = share_out(profile.settings, environ)
    yours = {name: value for name, value in kept.items() if value != profile.settings.get(name)}
    parts = [f"profile {profile.name} is applied ({fit})"]
    parts += [" ".join(f"{name}={value}" for name, value in sorted(applied.items()))]
    parts += [f"kept as you set it: {name}={value}" for name, value in sorted(yours.items())]
    digest = store.settings_digest(profile.settings)
    return Decision("; ".join(filter(None, parts)), profile.name, digest, applied, kept)


def share_out(settings: dict[str, str], environ: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Sort a profile's settings into those to set and those where the operator's values win."""
    applied: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, value in settings.items():
        theirs = next((n for n in (name, _OTHER_NAMES.get(name)) if n and n in environ), None)
        if theirs is None:
            applied[name] = value
        else:
            kept[theirs] = environ[theirs]
    for name in _misfits(applied, environ):
        del applied[name]
    return applied, kept


def _misfits(applied: dict[str, str], environ: Any) -> list[str]:
    """Find what NCCL would not follow, or would not start with, beside the operator's values."""
    pairs = (
        (("NCCL_ALGO", "NCCL_PROTO"), _is_prefix_conflict),
        (
            ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"),
            _is_crossed,
        ),
    )
    found = []
    for names, is_conflict in pairs:
        ours = [name for name in names if name in applied]
        beside = {name: environ[name] for name in names if environ.get(name)}
        if ours and beside and is_conflict({**{name: applied[name] for name in ours}, **beside}):
            found += ours
    return found


def _is_prefix_conflict(settings: dict[str, str]) -> bool:
    """Whether an algorithm for some collectives stands beside a protocol for all of them."""
    algo, proto = (settings.get(name, "").split(";")[0] for name in ("NCCL_ALGO", "NCCL_PROTO"))
    return ":" in algo and bool(proto) and ":" not in proto


def _is_crossed(settings: dict[str, str]) -> bool:
    """Whether the least number of channels is above the greatest."""
    try:
        low, high = (
            [int(value) for name, value in settings.items() if name.startswith(f"NCCL_{end}_")]
            for end in ("MIN", "MAX")
        )
    except ValueError:
        return True
    return bool(low) and bool(high) and max(low) > min(high)


def record(tokens: list[str], environ: Any, decision: Decision) -> None:
    """Add this launch to the records of nccltune, where there is a place and a right to."""
    try:
        folder = store.reading_dir(environ)
        if not folder.is_dir():
            return
        data = _launch_data(tokens, environ, decision)
        try:
            _append(folder / "launches.jsonl", _line(data))
        except OSError:
            _hand_over(data, environ)
    except (OSError, store.Refused):
        return  # the record is for roll-back and status; the launch does not need it


def _launch_data(tokens: list[str], environ: Any, decision: Decision) -> dict[str, Any]:
    command = "\0".join(tokens).encode(errors="surrogateescape")
    return {
        "route": "hook",
        "pid": os.getpid(),
        # The name before it may hold blanks and brackets.
        "started_ticks": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "launched_at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "command_digest": hashlib.sha256(command).hexdigest()[: store.DIGEST_CHARS],
        "profile_name": decision.name,
        "digest": decision.digest,
        "settings": decision.applied,
        "kept": {name: value[:60] for name, value in decision.kept.items()},
        "reason": decision.reason[:500],
        "is_degraded": decision.is_degraded,
        "invocation_id": environ.get("INVOCATION_ID", ""),
    }


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _hand_over(data: dict[str, Any], environ: Any) -> None:
    """Give the record to the service: the store is somebody else's, root's most often."""
    # Loaded here, for it is hardly ever needed.
    import socket

    given = environ.get(RUN_DIR_VARIABLE, "")
    folder = Path(given if given.startswith("/") else SYSTEM_RUN_DIR)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(_message(data), str(folder / "launches.sock"))


def _message(data: dict[str, Any]) -> bytes:
    """Return the record as one datagram, with fewer words for people where it has no room for them.

    The operator's own values are nobody else's business; their names are enough.
    """
    kept = dict.fromkeys(data["kept"], "")
    message = _line({**data, "kept": kept, "reason": data["reason"][:_SHORT_CHARS]})
    if len(message) > MAX_MESSAGE_BYTES:
        message = _line({**data, "kept": {}, "reason": ""})
    return message


def _append(path: Path, line: bytes) -> None:
    """Write one line to the end, after a line break where the last line lacks one.

    Not forced to disk: a disk that is busy would hold up the start. The file is moved away under
    the store's lock, by nccltune itself, when it has grown large.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if is_torn else line)
    finally:
        os.close(descriptor)
