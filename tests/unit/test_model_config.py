from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nccltune.errors import ExitCode, FileError
from nccltune.payloads.model_config import load_model_shape

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "torch_dtype": "float16",
    "vocab_size": 128256,
}
KIMI: dict[str, object] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "torch_dtype": "bfloat16",
        "vocab_size": 163840,
    },
}


@pytest.fixture(autouse=True)
def _no_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def write(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config, indent=2))
    return path


def without(config: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in config.items() if name != key}


# --- good configs


def test_load_model_shape_of_folder_reads_flat_config(tmp_path: Path) -> None:
    path = write(tmp_path / "llama", LLAMA)

    shape = load_model_shape(tmp_path / "llama")

    assert (shape.architecture, shape.model_type) == ("LlamaForCausalLM", "llama")
    assert (shape.hidden_size, shape.layer_count, shape.vocab_size) == (8192, 80, 128256)
    assert (shape.dtype, shape.dtype_bytes) == ("float16", 2)
    assert shape.source == str(path)


def test_load_model_shape_of_file_equals_that_of_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)

    assert load_model_shape(str(path)) == load_model_shape(str(tmp_path))


def test_load_model_shape_of_kimi_reads_text_config_not_vision(tmp_path: Path) -> None:
    shape = load_model_shape(write(tmp_path, KIMI))

    assert shape.architecture == "KimiK25ForConditionalGeneration"
    assert (shape.hidden_size, shape.layer_count, shape.vocab_size) == (7168, 61, 163840)
    assert shape.pass_count == 123
    assert shape.payload_bytes(3) == 43008


@pytest.mark.parametrize("key", ["text_config", "language_config", "llm_config"])
def test_load_model_shape_reads_any_name_of_the_nested_config(tmp_path: Path, key: str) -> None:
    nested = {key: KIMI["text_config"], **without(KIMI, "text_config")}

    assert load_model_shape(write(tmp_path, nested)).hidden_size == 7168


def test_load_model_shape_takes_nested_architecture_where_top_has_none(tmp_path: Path) -> None:
    shape = load_model_shape(write(tmp_path, without(KIMI, "architectures")))

    assert shape.architecture == "DeepseekV3ForCausalLM"


def test_load_model_shape_of_new_dtype_key_reads_it(tmp_path: Path) -> None:
    config = {**without(LLAMA, "torch_dtype"), "dtype": "bfloat16"}

    assert load_model_shape(write(tmp_path, config)).dtype == "bfloat16"


def test_load_model_shape_of_gemma3_has_no_embedding_all_reduce(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 62}

    assert load_model_shape(write(tmp_path, config)).pass_count == 124


def test_load_model_shape_of_draft_takes_any_architecture(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}

    assert load_model_shape(write(tmp_path, config), is_draft=True).pass_count == 3


@pytest.mark.parametrize(
    ("changes", "draft_vocab_size", "has_sharded_fc"),
    [
        ({"draft_vocab_size": 32000}, 32000, False),
        ({"draft_vocab_size": None}, None, False),
        ({}, None, False),
        ({"draft_vocab_size": 32000, "tie_word_embeddings": True}, None, False),
        ({"draft_vocab_size": True}, None, False),
        ({"draft_vocab_size": 0}, None, False),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, None, True),
    ],
)
def test_load_model_shape_of_draft_knows_what_its_passes_gather(
    tmp_path: Path, changes: dict[str, object], draft_vocab_size: int | None, has_sharded_fc: bool
) -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], **changes}

    shape = load_model_shape(write(tmp_path, config), is_draft=True)

    assert shape.vocab_size == 128256
    assert (shape.draft_vocab_size, shape.has_sharded_fc) == (draft_vocab_size, has_sharded_fc)


def test_load_model_shape_of_target_has_no_draft_vocabulary(tmp_path: Path) -> None:
    shape = load_model_shape(write(tmp_path, {**LLAMA, "draft_vocab_size": 32000}))

    assert shape.draft_vocab_size is None


# --- hub ids


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", None])
def test_load_model_shape_of_hub_id_finds_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    if variable is None:
        hub = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    else:
        monkeypatch.setenv(variable, str(tmp_path / "set"))
        hub = tmp_path / "set" / below[variable]
    path = write(hub / "models--meta--Llama" / "snapshots" / "abc", LLAMA)

    assert load_model_shape("meta/Llama").source == str(path)


def test_load_model_shape_of_hub_id_prefers_main(tmp_path: Path) -> None:
    model = tmp_path / "home/.cache/huggingface/hub/models--org--name"
    write(model / "snapshots" / "old", LLAMA)
    write(model / "snapshots" / "new", KIMI)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("old\n")

    assert load_model_shape("org/name").architecture == "LlamaForCausalLM"


def test_load_model_shape_of_hub_id_without_main_takes_the_newest(tmp_path: Path) -> None:
    model = tmp_path / "home/.cache/huggingface/hub/models--org--name"
    os.utime(write(model / "snapshots" / "b", LLAMA), (1000, 1000))
    os.utime(write(model / "snapshots" / "a", KIMI), (2000, 2000))

    assert load_model_shape("org/name").hidden_size == 7168


def test_load_model_shape_of_hub_id_not_in_cache_asks_for_a_folder() -> None:
    with pytest.raises(FileError, match=r"moonshotai/Kimi-K2\.5: .*give a local folder") as caught:
        load_model_shape("moonshotai/Kimi-K2.5")

    assert caught.value.code == "no_model"
    assert caught.value.exit_code == ExitCode.FILE


# --- bad files


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere/model", "/nowhere/config.json"])
def test_load_model_shape_of_missing_path_names_it(name: str) -> None:
    with pytest.raises(FileError, match=r"nowhere/\S+: no such file or folder"):
        load_model_shape(name)


def test_load_model_shape_of_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no config\.json in this folder"):
        load_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        ("{", "not JSON"),
        ('{\n "hidden_size": 8192,\n "num_hidden_layers" 80\n}', r":3: not JSON.*num_hidden_lay"),
        ("[1, 2]", "not an object"),
        ('"text"', "not an object"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "cut", "colon", "list", "string", "deep"],
)
def test_load_model_shape_of_no_json_object_says_where(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(FileError, match=complaint):
        load_model_shape(write(tmp_path, text))


def test_load_model_shape_of_binary_file_asks_for_the_config(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x80\x00" * 9)

    with pytest.raises(FileError, match="not a text file"):
        load_model_shape(path)


def test_load_model_shape_of_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with path.open("wb") as stream:
        stream.truncate(9 << 20)

    with pytest.raises(FileError, match="too large for a model config"):
        load_model_shape(path)


def test_load_model_shape_of_unknown_architecture_advises_payload(tmp_path: Path) -> None:
    path = write(tmp_path, {**LLAMA, "architectures": ["MambaForCausalLM"]})

    with pytest.raises(FileError, match=r"'MambaForCausalLM'.*give --payload") as caught:
        load_model_shape(path)

    assert caught.value.code == "unknown_architecture"
    assert caught.value.line == 2


@pytest.mark.parametrize("value", [None, [], [7], "LlamaForCausalLM"], ids=str)
def test_load_model_shape_without_architecture_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(FileError, match="no architectures"):
        load_model_shape(write(tmp_path, {**LLAMA, "architectures": value}))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8192", None, True, [1]], ids=str)
def test_load_model_shape_with_impossible_number_names_line_and_text(
    tmp_path: Path, key: str, value: object
) -> None:
    path = write(tmp_path, {**LLAMA, key: value})
    line = next(
        idx for idx, text in enumerate(path.read_text().splitlines(), start=1) if key in text
    )

    with pytest.raises(FileError, match=f":{line}: {key} must be a whole number.*{key}"):
        load_model_shape(path)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
def test_load_model_shape_without_number_names_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(FileError, match=f"no {key}"):
        load_model_shape(write(tmp_path, without(LLAMA, key)))


def test_load_model_shape_with_bad_nested_number_points_into_text_config(tmp_path: Path) -> None:
    text_config = {"hidden_size": -7168, "num_hidden_layers": 61}
    path = write(tmp_path, {**KIMI, "text_config": text_config})

    with pytest.raises(FileError, match='\'"hidden_size": -7168') as caught:
        load_model_shape(path)

    assert caught.value.line is not None
    assert "-7168" in path.read_text().splitlines()[caught.value.line - 1]


def test_load_model_shape_without_nested_hidden_size_names_the_nested_config(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, {**KIMI, "text_config": {"num_hidden_layers": 61}})

    with pytest.raises(FileError, match="no hidden_size in text_config"):
        load_model_shape(path)
