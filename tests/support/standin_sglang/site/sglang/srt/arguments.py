"""The launch flags that matter to the stand-in; every other flag is taken and shown."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from sglang.srt import wishes

ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "model": "model_path",
    "speculative_draft_model": "speculative_draft_model_path",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "cuda_graph_bs": "cuda_graph_bs_decode",
}


@dataclass
class ServerArgs:
    """Flags by name; a switch is True."""

    values: dict[str, object] = field(default_factory=dict)

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name, default)
        return " ".join(value) if isinstance(value, list) else str(value)

    def integer(self, name: str, default: int) -> int:
        return int(self.text(name, str(default)))

    def has(self, name: str) -> bool:
        return bool(self.values.get(name))

    @property
    def tp_size(self) -> int:
        return self.integer("tp_size", 1)

    @property
    def tp_ranks(self) -> range:
        """The ranks of this node."""
        count = max(1, self.tp_size // self.integer("nnodes", 1))
        first = count * self.integer("node_rank", 0)
        return range(first, first + count)

    @property
    def is_speculative(self) -> bool:
        return self.text("speculative_algorithm", "NONE").upper() != "NONE"

    @property
    def num_steps(self) -> int:
        return self.integer("speculative_num_steps", 3) if self.is_speculative else 0

    @property
    def host(self) -> str:
        return self.text("host", "127.0.0.1")

    @property
    def port(self) -> int:
        return self.integer("port", 30000)

    @property
    def capture_sizes(self) -> list[int]:
        """The batch sizes that are captured, smallest first."""
        if given := self.text("cuda_graph_bs_decode"):
            return sorted(int(size) for size in given.split())
        limit = self.integer("cuda_graph_max_bs_decode", 8)
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4)]
        return [size for size in sizes if size <= limit]

    def as_dict(self) -> dict[str, object]:
        """Every flag, with the resolved values that ``/server_info`` shows."""
        resolved: dict[str, object] = {
            "model_path": self.text("model_path"),
            "tokenizer_path": self.text("model_path"),
            "host": self.host,
            "port": self.port,
            "tp_size": self.tp_size,
            "dp_size": self.integer("dp_size", 1),
            "nnodes": self.integer("nnodes", 1),
            "node_rank": self.integer("node_rank", 0),
            "speculative_algorithm": self.text("speculative_algorithm") or None,
            "speculative_num_steps": self.num_steps or None,
            "speculative_eagle_topk": 1 if self.is_speculative else None,
            "speculative_num_draft_tokens": self.num_steps + 1 if self.is_speculative else None,
            "disable_custom_all_reduce": self.has("disable_custom_all_reduce"),
            "enable_symm_mem": self.has("enable_symm_mem"),
            "enable_mscclpp": self.has("enable_mscclpp"),
            "enable_torch_symm_mem": self.has("enable_torch_symm_mem"),
            "flashinfer_allreduce_fusion_backend": None,
            "mem_fraction_static": float(self.text("mem_fraction_static", "0.88")),
        }
        return {**self.values, **resolved}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"ServerArgs({shown})"


def parse_arguments(words: list[str], *, program: str) -> ServerArgs:
    """Read the flags as argparse would, ending the process with status 2 where it would."""
    if wishes.fails("usage"):
        _refuse(program, "unrecognized arguments: --no-such-flag")
    if words and not words[0].startswith("-"):
        words = ["--model-path", *words]
    values = _read_flags(words)
    if "config" in values:
        values = {**_read_config(Path(str(values["config"]))), **values}
    if "model_path" not in values:
        _refuse(program, "the following arguments are required: --model-path/--model")
    return ServerArgs(values)


def without_model_type(words: list[str]) -> list[str]:
    """Take out what only ``sglang serve`` knows."""
    kept = [word for word in words if not word.startswith("--model-type=")]
    if "--model-type" in kept:
        place = kept.index("--model-type")
        del kept[place : place + 2]
    return kept


def _refuse(program: str, reason: str) -> NoReturn:
    sys.stderr.write(f"usage: {program} [-h] --model-path MODEL_PATH ...\n")
    sys.stderr.write(f"{program}: error: {reason}\n")
    sys.exit(2)


def _name(flag: str) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    return ALIASES.get(name, name)


def _read_flags(words: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    current = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            current = "" if equals else _name(flag)
            found[_name(flag)] = value if equals else True
        elif current:
            before = found[current]
            if before is True:
                found[current] = word
            else:
                found[current] = [*(before if isinstance(before, list) else [before]), word]
    return found


def _read_config(path: Path) -> dict[str, object]:
    """Read a flat YAML file: one ``flag: value`` a line is all that is needed here."""
    found: dict[str, object] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, colon, value = line.split(" #")[0].partition(":")
        if not colon or not key.strip() or key.lstrip().startswith("#"):
            continue
        try:
            scalar = json.loads(value)
        except ValueError:
            scalar = value.strip().strip("'\"")
        if scalar is not False:
            found[_name(key.strip())] = scalar if isinstance(scalar, bool) else str(scalar)
    return found
