"""From options and a launch command to the workload."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.cli.workload import WorkloadOptions, workload_from_options
from nccltune.errors import FileError, UsageProblem
from nccltune.payloads.derive import default_workload

if TYPE_CHECKING:
    from pathlib import Path

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840},
}


@pytest.fixture
def kimi(tmp_path: Path) -> str:
    folder = tmp_path / "Kimi-K2.5"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KIMI))
    return str(folder)


def launch(model: str, *more: str) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", model, "--tp", "8"]
    return [*words, *more]


EAGLE3 = (
    "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2",
    "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3",
)  # fmt: skip


def test_no_option_is_the_default_workload_on_every_visible_gpu() -> None:
    demand = workload_from_options(WorkloadOptions())

    assert demand.workload == default_workload()
    assert demand.tp is None
    assert "2 steps" in demand.decoding


DEFAULTS: dict[str, Any] = {"num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3}


@pytest.mark.parametrize(
    "names", [names for count in (1, 2, 3) for names in combinations(DEFAULTS, count)], ids=" ".join
)
@pytest.mark.parametrize("tp", [None, 2])
def test_defaults_that_are_typed_out_ask_for_the_default_workload(
    names: tuple[str, ...], tp: int | None
) -> None:
    given = {name: DEFAULTS[name] for name in names}

    demand = workload_from_options(WorkloadOptions(tp=tp, **given))

    assert demand == workload_from_options(WorkloadOptions(tp=tp))


def test_batches_that_are_typed_out_ask_for_the_default_workload() -> None:
    asked = WorkloadOptions(batches=("1:4", "2:2", "4:1", "8:1"), num_steps=2)

    assert workload_from_options(asked) == workload_from_options(WorkloadOptions())


@pytest.mark.parametrize(
    ("name", "value"), [("num_steps", 3), ("eagle_topk", 2), ("num_draft_tokens", 4)]
)
def test_any_other_number_asks_for_another_workload(name: str, value: int) -> None:
    asked: dict[str, Any] = {name: value}

    demand = workload_from_options(WorkloadOptions(**asked))

    assert demand.workload != default_workload()


def test_model_of_the_default_shape_scores_the_same_payloads(kimi: str) -> None:
    demand = workload_from_options(WorkloadOptions(model=kimi, tp=4))

    assert demand.workload.batches == default_workload(tp=4).batches
    assert demand.workload.name == "Kimi-K2.5"
    assert demand.tp == 4


def test_launch_decides_model_ranks_and_speculation(kimi: str) -> None:
    demand = workload_from_options(WorkloadOptions(launch=launch(kimi, *EAGLE3)))

    assert demand.workload.batches == default_workload().batches
    assert demand.tp == 8
    assert demand.command is not None
    assert demand.shape is not None


def test_option_beats_the_launch(kimi: str) -> None:
    asked = WorkloadOptions(launch=launch(kimi, *EAGLE3), tp=2, num_steps=4, batches=("1:1",))

    demand = workload_from_options(asked)

    assert demand.tp == 2
    assert "4 steps, top-k 1, 5 draft tokens" in demand.decoding
    assert [batch.size for batch in demand.workload.batches] == [1]


def test_launch_without_speculation_decodes_one_row_a_request(kimi: str) -> None:
    demand = workload_from_options(WorkloadOptions(launch=launch(kimi)))

    assert demand.decoding == "plain decoding, one row a request"
    assert demand.workload.batches[0].payloads[0].size_bytes == 14336


def test_draft_model_that_is_not_here_is_a_doubt_and_no_failure(kimi: str) -> None:
    asked = launch(kimi, *EAGLE3, "--speculative-draft-model-path", "/nowhere")

    demand = workload_from_options(WorkloadOptions(launch=asked))

    assert len(demand.doubts) == 1
    assert demand.doubts[0].startswith("draft model: /nowhere")


def test_draft_tokens_alone_set_the_steps() -> None:
    demand = workload_from_options(WorkloadOptions(num_draft_tokens=5))

    assert "4 steps, top-k 1, 5 draft tokens" in demand.decoding
    assert demand.doubts == ()


def test_draft_tokens_that_sglang_would_overrule_are_a_doubt() -> None:
    demand = workload_from_options(WorkloadOptions(num_steps=2, num_draft_tokens=5))

    assert "3 draft tokens" in demand.decoding
    assert "which is 3" in demand.doubts[0]
    assert demand.workload == default_workload()


def test_payloads_are_taken_as_given_and_keep_the_ranks_of_the_launch(kimi: str) -> None:
    asked = WorkloadOptions(payloads=("43008:122",), launch=launch(kimi))

    demand = workload_from_options(asked)

    assert demand.workload.batches[0].payloads[0].count == 122
    assert demand.tp == 8
    assert demand.decoding == ""


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"payloads": ("4096:1",), "model": "x"}, "conflicting_options"),
        ({"payloads": ("4096:1",), "batches": ("1:1",)}, "conflicting_options"),
        ({"num_draft_tokens": 1}, "bad_value"),
        ({"num_steps": 0}, "bad_value"),
        ({"num_steps": 2, "tp": 1}, "no_all_reduce"),
        ({"launch": ("python", "server.py")}, "not_sglang"),
        ({"launch": ("sglang", "serve", "--tp", "8")}, "no_model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        workload_from_options(WorkloadOptions(**options))

    assert caught.value.code == code


def test_speculation_for_a_launch_that_does_not_speculate_is_refused(kimi: str) -> None:
    with pytest.raises(UsageProblem, match="does not speculate"):
        workload_from_options(WorkloadOptions(launch=launch(kimi), num_steps=2))


def test_model_that_is_not_there_is_a_file_problem() -> None:
    with pytest.raises(FileError):
        workload_from_options(WorkloadOptions(model="/nowhere"))


def test_options_can_be_written_again_for_another_verb(kimi: str) -> None:
    asked = WorkloadOptions(tp=2, num_steps=3, batches=("1:4", "2:1"), launch=("sglang", "serve"))

    again = " ".join(asked.format_again())

    assert again == "--tp 2 --num-steps 3 --batch 1:4 --batch 2:1 -- sglang serve"
