"""What tests of ``verify`` need: launches of the stand-in whose models are there, small loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nccltune.profile import Profile
from nccltune.verify.arms import make_arms
from nccltune.verify.load.rounds import LoadPlan
from nccltune.verify.spec import VerifyProgress, VerifySpec
from tests.support.standin_sglang.program import (
    free_port,
    module_command,
    read_records,
    standin_environ,
)

QUICK_FLAGS = ("--cuda-graph-max-bs-decode", "2")
QUICK_LOAD = LoadPlan(run_count=2, tokens=20, ttft_repetitions=1)
FOLK = Profile("folk", {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"})


def model_folder(folder: Path, name: str) -> Path:
    """Make a model that is there, as far as its config goes."""
    path = folder / name
    path.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def verify_command(folder: Path, *flags: str, port: int, tp: int = 2) -> tuple[str, ...]:
    """Return ``python -m sglang.launch_server ...`` for EAGLE-3, with models below ``folder``."""
    words = module_command("--disable-custom-all-reduce", *QUICK_FLAGS, *flags, port=port, tp=tp)
    models = {
        "/models/target": str(model_folder(folder, "target")),
        "/models/draft": str(model_folder(folder, "draft")),
    }
    return tuple(models.get(word, word) for word in words)


def without_flag(words: Sequence[str], flag: str) -> tuple[str, ...]:
    """Return a command without one flag and its value."""
    place = list(words).index(flag)
    return (*words[:place], *words[place + 2 :])


@dataclass
class Watcher:
    """Keeps what a verify told, and may interfere."""

    on_update: Callable[[VerifyProgress], None] = lambda _progress: None
    told: list[VerifyProgress] = field(default_factory=list)

    def update(self, progress: VerifyProgress) -> None:
        self.told.append(progress)
        self.on_update(progress)


def make_spec(
    folder: Path,
    *flags: str,
    arms: Sequence[str] = ("default", "folk"),
    num_steps: Sequence[int] = (),
    port: int | None = None,
    tp: int = 2,
    wishes: Mapping[str, str | float] | None = None,
    environ: Mapping[str, str] | None = None,
    **changes: object,
) -> VerifySpec:
    """Return a verify of the stand-in; its processes write themselves down in ``processes_of``."""
    launch = verify_command(folder, *flags, port=free_port() if port is None else port, tp=tp)
    wished = {"record": str(folder / "processes.jsonl"), **(wishes or {})}
    parts: dict[str, object] = {
        "launch": launch,
        "arms": make_arms(launch, arms=arms, num_steps=num_steps, find=lambda _word: FOLK),
        "environ": standin_environ({**os.environ, **(environ or {})}, **wished),
        "load": QUICK_LOAD,
        "boots": 2,
        **changes,
    }
    return VerifySpec(**parts)  # type: ignore[arg-type]


def processes_of(folder: Path) -> list[dict[str, object]]:
    """Return what every process of every server wrote down: role, pid, environ."""
    path = folder / "processes.jsonl"
    return read_records(path) if path.exists() else []
