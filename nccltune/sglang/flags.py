"""Flags of an SGLang launch as its own parser sees them: command line, aliases, ``--config`` file.

Nothing is looked up in SGLang itself: a flag that this module does not know is kept by its name.
Read in SGLang 0.5.10.post1 to 0.5.23.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nccltune.errors import FileError, NccltuneError, UsageProblem
from nccltune.regular_files import read_regular

ALIASES: Mapping[str, str] = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "decode_context_parallel_size": "dcp_size",
    "model": "model_path",
    "speculative_draft_model": "speculative_draft_model_path",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",  # renamed; gone in 0.5.20
    "cuda_graph_bs": "cuda_graph_bs_decode",
}
"""Other spellings of a flag, among them the ones that SGLang has renamed."""

KNOWN = frozenset(
    {
        "chunked_prefill_size",
        "config",
        "cuda_graph_backend_decode",
        "disable_cuda_graph",
        "disable_cuda_graph_padding",
        "disable_custom_all_reduce",
        "enable_deterministic_inference",
        "enable_dp_attention",
        "enable_flashinfer_allreduce_fusion",
        "enable_kv_cache_sharding",
        "enable_memory_saver",
        "enable_mscclpp",
        "enable_nccl_nvls",
        "enable_symm_mem",
        "enable_torch_symm_mem",
        "enforce_disable_flashinfer_allreduce_fusion",
        "flashinfer_allreduce_fusion_backend",
        "max_prefill_tokens",
        "max_running_requests",
        "moe_a2a_backend",
        "nnodes",
        "node_rank",
        "rl_on_policy_target",
        "speculative_adaptive",
        "speculative_algorithm",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        *ALIASES.values(),
    }
)
"""Flags that are looked at here. A unique beginning of one stands for it, as argparse has it; no
other flag of SGLang 0.5.23 is the beginning of one of these."""

FileReader = Callable[[Path, int], bytes]
"""From a file and a limit in bytes to its content; raises OSError."""

_MAX_CONFIG_BYTES = 64 << 10
"""A file of flags has a few hundred bytes, and each costs time to parse."""
_MAX_NUMBER = 2**31 - 1
_MAX_WORDS = 4096
_TYPO_LIKENESS = 0.9
_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in a config file a flag was set."""

    path: Path
    line: int
    text: str


@dataclass(slots=True)
class Flags:
    """Flag -> its values; a flag without a value (``--disable-...``) has none.

    Attributes:
        origins: where flags came from that the command line does not have.
    """

    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    def problem(self, name: str, reason: str) -> NccltuneError:
        """Build the error for one flag: its line in the config file, or its text as typed."""
        shown = " ".join([f"--{name.replace('_', '-')}", *self.values.get(name, ())])
        if (origin := self.origins.get(name)) is not None:
            return FileError(origin.path, f"{shown}: {reason}", line=origin.line, text=origin.text)
        return UsageProblem(f"{shown}: {reason}", code="bad_launch")

    def text(self, name: str) -> str | None:
        """Return the one value of a flag, None where it was not given."""
        if name not in self.values:
            return None
        values = self.values[name]
        if len(values) != 1 or not values[0]:
            raise self.problem(name, "takes one value")
        return values[0]

    def integer(self, name: str, *, minimum: int, maximum: int | None = None) -> int | None:
        """Return the one whole number of a flag, None where it was not given."""
        text = self.text(name)
        if text is None:
            return None
        value = self._integer(name, text, minimum)
        if maximum is not None and value > maximum:
            raise self.problem(name, f"must be {maximum} or less")
        return value

    def integers(self, name: str, *, minimum: int) -> tuple[int, ...] | None:
        """Return the whole numbers of a flag that takes several."""
        if name not in self.values:
            return None
        if not self.values[name]:
            raise self.problem(name, "takes at least one value")
        return tuple(self._integer(name, text, minimum) for text in self.values[name])

    def _integer(self, name: str, text: str, minimum: int) -> int:
        try:
            value = int(text)
        except ValueError:
            raise self.problem(name, f"{text!r} is not a whole number") from None
        if value < minimum:
            raise self.problem(name, f"must be {minimum} or more")
        if value > _MAX_NUMBER:
            raise self.problem(name, f"must be {_MAX_NUMBER} or less")
        return value


def canonical_name(spelled: str) -> str:
    """Return the name that a flag has here, whatever its spelling.

    >>> canonical_name("tensor-parallel-size"), canonical_name("speculative-algo")
    ('tp_size', 'speculative_algorithm')
    """
    name = spelled.replace("-", "_")
    if name in ALIASES or name in KNOWN:
        return ALIASES.get(name, name)
    begun = {ALIASES.get(flag, flag) for flag in (*ALIASES, *KNOWN) if flag.startswith(name)}
    return begun.pop() if len(begun) == 1 else name


def likely_typos(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield flags that are not looked at here and nearly spelled like one that is, with that one.

    >>> list(likely_typos(["speculativ_num_steps", "port"]))
    [('speculativ_num_steps', 'speculative_num_steps')]
    """
    known = sorted({*KNOWN, *ALIASES})
    for name in names:
        if name not in KNOWN:
            for meant in difflib.get_close_matches(name, known, 1, _TYPO_LIKENESS):
                yield name, meant


def is_true(value: str | None) -> bool:
    """Tell whether SGLang takes a value of one of its own variables as yes."""
    return value is not None and value.lower() in ("true", "1", "yes", "y")


def is_false(value: str | None) -> bool:
    """Tell whether SGLang takes a value of one of its own variables as no."""
    return value is not None and value.lower() in ("false", "0", "no", "n")


def read_flags(tokens: Iterable[str]) -> Flags:
    """Sort the tokens after the program into flags; the last of two equal flags wins.

    Raises:
        UsageProblem: a value that follows no flag.
    """
    found: dict[str, list[str]] = {}
    current: str | None = None
    for count, token in enumerate(tokens):
        if count == _MAX_WORDS:
            raise UsageProblem(f"a launch command of over {_MAX_WORDS} words", code="bad_launch")
        if token.startswith("--") and len(token) > 2:
            spelled, equals, value = token[2:].partition("=")
            name = canonical_name(spelled)
            found[name] = [value] if equals else []
            current = None if equals else name
        elif token.startswith("-") and not _NEGATIVE_NUMBER.fullmatch(token):
            current = None
        elif current is None:
            raise UsageProblem(
                f"{token!r} in the launch command belongs to no flag", code="bad_launch"
            )
        else:
            found[current].append(token)
    return Flags({name: tuple(values) for name, values in found.items()})


def with_config_file(flags: Flags, tokens: Sequence[str], read: FileReader = read_regular) -> Flags:
    """Add what the ``--config`` file sets; the command line wins.

    Args:
        flags: of the command line.
        tokens: that they were read from.
        read: reads the file.

    Raises:
        UsageProblem: two config files, or one that SGLang itself would not read.
        FileError: not YAML, or not a mapping.
    """
    if "config" not in flags.values:
        return flags
    if tokens.count("--config") > 1:
        raise flags.problem("config", "SGLang takes one config file")
    path = Path(flags.text("config") or "")
    if "--config" not in tokens:
        # SGLang looks for the bare word and ignores --config=FILE without a sound (0.5.23).
        raise UsageProblem(
            f"--config={path}: SGLang ignores this spelling; write --config {path}",
            code="bad_launch",
        )
    merged = _read_config_file(path, read)
    for name, values in flags.values.items():
        merged.values[name] = values
        merged.origins.pop(name, None)
    return merged


def _read_config_file(path: Path, read: FileReader) -> Flags:
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise FileError(path, "SGLang reads only .yaml and .yml as --config")
    try:
        text = read(path, _MAX_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(path, "--config is not UTF-8 text") from None
    except OSError as error:
        raise FileError(path, f"--config cannot be read: {error.strerror or error}") from error
    data, lines = _load_yaml(path, text)
    rows = text.splitlines()
    flags = Flags()
    for key, value in data.items():
        name = canonical_name(key)
        line = lines.get(key, 1)
        origin = Origin(path, line, rows[line - 1])
        if value is False or value == []:
            continue  # SGLang leaves out switches that are off and empty lists
        if value is None:
            raise FileError(path, f"{key} has no value", line=line, text=origin.text)
        try:
            flags.values[name] = _texts(value)
        except (TypeError, ValueError):  # a date in a list, a number of 5000 digits
            raise FileError(path, "no value of a flag", line=line, text=origin.text) from None
        flags.origins[name] = origin
    return flags


def _texts(value: object) -> tuple[str, ...]:
    """Turn a YAML value into the words that SGLang makes of it."""
    if value is True:
        return ()
    if isinstance(value, list):
        return tuple(str(item) for item in value)
    return (json.dumps(value) if isinstance(value, dict) else str(value),)


def _load_yaml(path: Path, text: str) -> tuple[dict[str, object], dict[str, int]]:
    """Return the mapping at the top of a YAML file, and the line of each of its keys."""
    # Loaded here, for most launches have no such file and `nccltune run` must start at once.
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Takes no anchors, for aliases of aliases make a short file stand for a huge one."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if getattr(event, "anchor", None):
                reason = "anchors and aliases (& and *) are not read here"
                raise yaml.composer.ComposerError(None, None, reason, event.start_mark)
            return super().compose_node(parent, index)

    rows = text.splitlines() or [""]
    loader = PlainLoader(text)
    try:
        root = loader.get_single_node()
        data = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        reason = f"not YAML: {error.problem or error.context}"
        raise FileError(
            path, reason, line=line, text=[*rows, ""][min(line, len(rows)) - 1]
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileError(path, f"not YAML: {str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()
    if data is None:
        return {}, {}
    if not isinstance(data, dict) or not isinstance(root, yaml.MappingNode):
        raise FileError(path, "not a mapping of flags to values", line=1, text=rows[0])
    lines: dict[str, int] = {}
    for key, _ in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
            shown = repr(key.value)[:80]
            raise FileError(path, f"{shown} is not the name of a flag", line=line)
        lines[key.value] = line
    return data, lines
