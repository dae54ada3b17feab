"""A launch command searched in a recording: guards that it does not hold are left out aloud."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nccltune.cli import main

CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840},
}


def launch(model: Path, *more: str) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(model), "--tp", "2"]
    spec = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2"]
    return [*words, *spec, "--speculative-eagle-topk", "1", *more]


@pytest.fixture
def cached_model(tmp_path: Path) -> Path:
    folder = tmp_path / "models--moonshotai--Kimi-K2.5" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_search_of_a_recording_for_a_launch_names_the_guards_left_out(
    cached_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["search", "--recording", "h200-2x-shm", "--trials", "12", "--json", "--anyway", "--"]

    code = main([*argv, *launch(cached_model, "--speculative-num-draft-tokens", "3")])

    envelope = json.loads(capsys.readouterr().out)
    assert code == 0, envelope["errors"]
    assert envelope["data"]["workload"] == "Kimi-K2.5"
    assert any("holds no guard of 2064384 B, 117440512 B" in text for text in envelope["warnings"])
    guards = [row["bytes"] for row in envelope["data"]["payloads"] if row["is_guard"]]
    assert guards == [14336]
