"""Writes a model of Kimi's width and depth and its EAGLE-3 draft: configurations and a tokenizer.

    python benchmarks/kimi_shaped_model.py DIR [--layers 61]

There are no weights: SGLang serves DIR/target and DIR/draft with ``--load-format dummy``. It is a
dense Llama, for the all-reduces are the same (two a layer and one of the embedding, of hidden size
7168) and any GPU of 24 GB holds it. What it writes is noise; only its times mean something, under
an acceptance that ``SGLANG_SIMULATE_ACC_LEN`` sets.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HIDDEN_SIZE = 7168
VOCABULARY = 32000
CONTEXT_TOKENS = 8192
SPECIAL = ("<unk>", "<s>", "</s>")


def shape(layers: int) -> dict[str, object]:
    """Return what target and draft have in common, as ``config.json`` says it."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "max_position_embeddings": CONTEXT_TOKENS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


def write_tokenizer(folder: Path) -> None:
    """Write one token a word: ``t3``, ``t4``, ...; any other word is unknown, and still a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL, *(f"t{number}" for number in range(len(SPECIAL), VOCABULARY))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": SPECIAL[0],
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "model_max_length": CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write one configuration file."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Write both models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=61)
    options = parser.parse_args()
    target = {**shape(options.layers), "architectures": ["LlamaForCausalLM"]}
    # No vocabulary of its own: a map between the two would have to be loaded.
    draft = {
        **shape(1),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": None,
        "target_hidden_size": HIDDEN_SIZE,
    }
    for name, config in (("target", target), ("draft", draft)):
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        write_tokenizer(folder)
    print(f"{options.out}: target of {options.layers} layers, draft of 1")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
