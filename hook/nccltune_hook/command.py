"""Reads the launch out of SGLang's own arguments: what it speculates by, over which GPUs.

The same reading as ``nccltune.sglang``, for the few flags that decide here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePath
from typing import NamedTuple

SPELLINGS = {
    "attention_data_parallel_size": "attn_dp_size",
    "attn_dp_size": "attn_dp_size",
    "base_gpu_id": "base_gpu_id",
    "config": "config",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
    "dp_size": "dp_size",
    "enable_dp_attention": "enable_dp_attention",
    "gpu_id_step": "gpu_id_step",
    "nnodes": "nnodes",
    "pipeline_parallel_size": "pp_size",
    "pp": "pp_size",
    "pp_size": "pp_size",
    "speculative_algorithm": "speculative_algorithm",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "tp_size": "tp_size",
}
"""Flags that are looked at, by each of their spellings. argparse takes a beginning that one flag of
SGLang alone has; one that several have ends SGLang itself."""

_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?")


class Unreadable(Exception):
    """SGLang will not take this launch, or not as it is read here."""


class Command(NamedTuple):
    """A launch.

    Attributes:
        tokens: what is asked of SGLang, whatever program stands before it.
        algorithm: of the speculation, in capitals; None for none.
        replicas: groups of ranks with GPUs of their own: replicas times pipeline stages.
    """

    tokens: list[str]
    algorithm: str | None
    tp_size: int
    nnodes: int
    replicas: int
    base_gpu_id: int
    gpu_id_step: int


def server_tokens(argv: list[str]) -> list[str] | None:
    """Return the tokens for SGLang's parser; None where this process launches no server."""
    if not argv:
        return None
    if argv[0].endswith("sglang/launch_server.py"):
        return argv[1:]
    if PurePath(argv[0]).name != "sglang" or argv[1:2] != ["serve"]:
        return None
    tokens = argv[2:]
    if "--model-type" in tokens:
        idx = tokens.index("--model-type")
        del tokens[idx : idx + 2]
    tokens = [token for token in tokens if not token.startswith("--model-type=")]
    if tokens and not tokens[0].startswith("-"):
        return ["--model-path", *tokens]
    return tokens


def read_command(tokens: list[str]) -> Command:
    """Read the flags that decide.

    Raises:
        Unreadable: a flag without its value, or a value that SGLang does not take.
    """
    flags = _read_flags(tokens)
    if "config" in flags:
        flags = {**_read_config(_text(flags, "config") or "", tokens), **flags}
    algorithm = (_text(flags, "speculative_algorithm") or "NONE").upper()
    dp_size = _integer(flags, "dp_size", 1)
    if "enable_dp_attention" in flags:
        dp_size = 1  # then it counts parts of the attention, not replicas
    return Command(
        tokens=tokens,
        algorithm=None if algorithm == "NONE" else algorithm,
        tp_size=_integer(flags, "tp_size", 1),
        nnodes=_integer(flags, "nnodes", 1),
        replicas=dp_size * _integer(flags, "pp_size", 1),
        base_gpu_id=_integer(flags, "base_gpu_id", 0, minimum=0),
        gpu_id_step=_integer(flags, "gpu_id_step", 1),
    )


def canonical_name(spelled: str) -> str:
    """Return a flag's name here, whatever its spelling."""
    name = spelled.replace("-", "_")
    if name in SPELLINGS:
        return SPELLINGS[name]
    begun = {SPELLINGS[flag] for flag in SPELLINGS if flag.startswith(name)}
    return begun.pop() if len(begun) == 1 else name


def _read_flags(tokens: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            spelled, equals, value = token[2:].partition("=")
            current = [value] if equals else []
            flags[canonical_name(spelled)] = current
            current = None if equals else current
        elif token.startswith("-") and not _NEGATIVE_NUMBER.fullmatch(token):
            current = None
        elif current is None:
            raise Unreadable(f"{token!r} belongs to no flag")
        else:
            current.append(token)
    return flags


def _read_config(name: str, tokens: list[str]) -> dict[str, list[str]]:
    """Read the flags of SGLang's configuration file, with the parser that SGLang reads it with."""
    if "--config" not in tokens:
        raise Unreadable(f"SGLang ignores --config={name}; write --config {name}")
    try:
        import yaml

        data = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except ImportError:
        raise Unreadable("--config needs PyYAML, which is not installed here") from None
    except Exception as error:  # noqa: BLE001 - YAML has many ways to be wrong
        raise Unreadable(f"--config {name} cannot be read: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise Unreadable(f"--config {name} is not a mapping of flags to values")
    flags: dict[str, list[str]] = {}
    for key, value in data.items():
        if value is None:
            raise Unreadable(f"{key} has no value in {name}")
        if value is not False and value != []:  # SGLang leaves these out
            flags[canonical_name(str(key))] = _words(value)
    return flags


def _words(value: object) -> list[str]:
    if value is True:
        return []
    if isinstance(value, list):
        return [str(each) for each in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _text(flags: dict[str, list[str]], name: str) -> str | None:
    if name not in flags:
        return None
    if len(flags[name]) != 1 or not flags[name][0]:
        raise Unreadable(f"--{name.replace('_', '-')} takes one value")
    return flags[name][0]


def _integer(flags: dict[str, list[str]], name: str, default: int, *, minimum: int = 1) -> int:
    text = _text(flags, name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise Unreadable(f"--{name.replace('_', '-')} {text} is no whole number from {minimum} on")
    return value
