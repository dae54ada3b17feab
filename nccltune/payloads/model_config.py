"""Reads a model's Hugging Face ``config.json`` for the shape that decides its all-reduces.

Only architectures whose pass is known to be two all-reduces a layer are accepted: a wrong count
would tune for the wrong payload without a word.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from nccltune.errors import FileError
from nccltune.jsontext import JsonText, parse_json
from nccltune.payloads.shapes import ModelShape
from nccltune.seen_files import OWN, SeenFiles, is_dir, is_file

TWO_A_LAYER_ARCHITECTURES = frozenset(
    {
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "InternLM2ForCausalLM",
        "InternLM3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlamaForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MistralLarge3ForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Decoders that end attention and MLP (or experts) with one all-reduce each, in SGLang 0.5.23."""

REPLICATED_EMBEDDING_ARCHITECTURES = frozenset(
    {"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"}
)
"""SGLang keeps the whole embedding table of these on every GPU: no all-reduce for it."""

SHARDED_FC_ARCHITECTURES = frozenset({"Eagle3DeepseekV2ForCausalLM"})
"""Drafts whose input layer SGLang splits over the GPUs and gathers: those with Kimi's attention."""

_TEXT_KEYS = ("text_config", "language_config", "llm_config")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_SIZE = 1 << 20
# Configs are some kilobytes; anything near this is a weights file given by mistake.
_MAX_CONFIG_BYTES = 8 << 20
_MAX_REF_BYTES = 4096


def load_model_shape(
    path: str | os.PathLike[str],
    *,
    is_draft: bool = False,
    files: SeenFiles = OWN,
    environ: Mapping[str, str] | None = None,
) -> ModelShape:
    """Read the shape from a model folder, a ``config.json``, or a hub id in the local cache.

    A draft model may have an architecture of any name, as they all are one plain layer or a few.

    Args:
        path: folder, file or hub id.
        is_draft: it is a draft model.
        files: as the server sees them.
        environ: of the server; this process's if None.

    Raises:
        FileError: no such file, not a model config, or an architecture whose all-reduces are not
            known.
    """
    config_path = _find_config(path, files, os.environ if environ is None else environ)
    document = parse_json(_read_text(config_path, files), config_path)
    if not isinstance(document.data, dict):
        raise document.problem("not a model config: the top of the file is not an object")
    config: Mapping[str, object] = document.data
    place = _text_place(config)
    text = config[place[0]] if place else config
    if not isinstance(text, dict):
        raise document.problem("is not an object", *place)
    architecture = _architecture(document, config, text, place, is_draft=is_draft)
    draft_size = None
    if is_draft and not text.get("tie_word_embeddings"):
        draft_size = _count_or_none(text.get("draft_vocab_size"))
    dtype = text.get("dtype") or text.get("torch_dtype")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    return ModelShape(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        hidden_size=_positive_integer(document, text, place, "hidden_size"),
        layer_count=_positive_integer(document, text, place, "num_hidden_layers"),
        vocab_size=_count_or_none(text.get("vocab_size")),
        dtype=dtype if isinstance(dtype, str) else "bfloat16",
        source=str(config_path),
        embedding_count=0 if architecture in REPLICATED_EMBEDDING_ARCHITECTURES else 1,
        draft_vocab_size=draft_size,
        has_sharded_fc=is_draft and architecture in SHARDED_FC_ARCHITECTURES,
    )


def _find_config(
    given: str | os.PathLike[str], files: SeenFiles, environ: Mapping[str, str]
) -> Path:
    """Return the config file meant by a folder, a file or a hub id."""
    text = os.fspath(given)
    path = _expanded(text, environ)
    if is_dir(files, path):
        if not is_file(files, path / "config.json"):
            raise FileError(
                path, "no config.json in this folder: give the folder that holds the model",
                code="no_model",
            )  # fmt: skip
        return path / "config.json"
    if files.stat(path) is not None:
        return path
    if _HUB_ID.fullmatch(text):
        cached = _cached_config(text, files, environ)
        if cached is not None:
            return cached
        reason = (
            "no such folder, and no such model in the Hugging Face cache "
            f"{_hub_cache_dir(environ)}; "
            "give a local folder that holds config.json"
        )
        raise FileError(text, reason, code="no_model")
    raise FileError(
        path, "no such file or folder; give a model folder or its config.json", code="no_model"
    )


def _hub_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return where huggingface_hub keeps downloads, by its own variables and in its order."""
    if cache := environ.get("HF_HUB_CACHE"):
        return _expanded(cache, environ)
    if home := environ.get("HF_HOME"):
        return _expanded(home, environ) / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(base, environ) / "huggingface" / "hub"


def _expanded(text: str, environ: Mapping[str, str]) -> Path:
    """Put the home folder in place of ``~``, where there is one."""
    home = environ.get("HOME")
    if home and (text == "~" or text.startswith("~/")):
        return Path(home + text[1:])
    # Path's own fails without a home.
    return Path(os.path.expanduser(text) if environ is os.environ else text)  # noqa: PTH111


def _cached_config(hub_id: str, files: SeenFiles, environ: Mapping[str, str]) -> Path | None:
    """Return the config that a hub id has in the cache: its ``main``, else the newest snapshot."""
    model_dir = _hub_cache_dir(environ) / f"models--{hub_id.replace('/', '--')}"
    try:
        main = files.read(model_dir / "refs" / "main", _MAX_REF_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    snapshots = model_dir / "snapshots"
    preferred = snapshots / main / "config.json"
    if main and is_file(files, preferred):
        return preferred
    dated = (
        (status.st_mtime, path)
        for path in (snapshots / name / "config.json" for name in files.names(snapshots))
        if (status := files.stat(path)) is not None and stat.S_ISREG(status.st_mode)
    )
    return max(dated, default=(0.0, None))[1]


def _read_text(path: Path, files: SeenFiles) -> str:
    try:
        return files.read(path, _MAX_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(path, "not a text file; give the model's config.json") from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            reason = "too large for a model config; give the model's config.json"
            raise FileError(path, reason) from None
        raise FileError(path, f"cannot be read: {error.strerror or error}") from error


def _text_place(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the key of the nested text model, or nothing where the config is flat."""
    if "hidden_size" in config and "num_hidden_layers" in config:
        return ()
    return next(((key,) for key in _TEXT_KEYS if isinstance(config.get(key), dict)), ())


def _architecture(
    document: JsonText,
    config: Mapping[str, object],
    text: Mapping[str, object],
    place: tuple[str, ...],
    *,
    is_draft: bool,
) -> str:
    """Return the architecture name, or refuse it."""
    where: tuple[str, ...] = ("architectures",)
    names = config.get("architectures")
    if names is None and place:
        where, names = (*place, "architectures"), text.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise document.problem("no architectures: [NAME] in this config", *where)
    if not is_draft and names[0] not in TWO_A_LAYER_ARCHITECTURES:
        raise document.problem(
            f"unknown architecture {names[0]!r}: how many all-reduces it makes is not known here; "
            "give --payload BYTES:COUNT instead",
            *where,
            code="unknown_architecture",
        )
    return names[0]


def _count_or_none(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if value > 0 else None


def _positive_integer(
    document: JsonText, text: Mapping[str, object], place: tuple[str, ...], key: str
) -> int:
    inside = f" in {place[0]}" if place else ""
    if key not in text:
        raise document.problem(f"no {key}{inside}", *place)
    value = _count_or_none(text[key])
    if value is None:
        raise document.problem(f"{key} must be a whole number of 1 or more", *place, key)
    if value > _MAX_SIZE:
        raise document.problem(f"{key} is larger than any model's ({_MAX_SIZE})", *place, key)
    return value
