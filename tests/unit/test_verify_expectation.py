"""Which arm's saving can be predicted, and from what."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.verify.expectation import predictions_for
from nccltune.verify.judging.prediction import check_prediction
from nccltune.verify.model import Arm
from tests.support.boots import FAST, HOST, LAUNCH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nccltune.profile import Profile

HIDDEN_SIZE = 1024
VERIFY_BYTES = 2 * HIDDEN_SIZE * 3
"""bf16, one request of three draft tokens."""


@pytest.fixture
def launch(tmp_path: Path) -> tuple[str, ...]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 4,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tuple(str(tmp_path) if word == "/models/kimi" else word for word in LAUNCH)


def measured(tuned_us: float = 8.0) -> dict[str, object]:
    return {"payloads": [{"bytes": VERIFY_BYTES, "baseline_us": 10.0, "tuned_us": tuned_us}]}


def arms(launch: tuple[str, ...], profile: Profile) -> tuple[Arm, Arm]:
    return Arm("default", launch), Arm("fast", launch, profile)


def test_saving_is_counts_of_the_launch_times_what_the_search_measured(
    launch: tuple[str, ...],
) -> None:
    profile = replace(FAST, measured=measured())

    prediction = predictions_for(arms(launch, profile), batch_size=1)["fast"]

    (row,) = [row for row in prediction.rows if row.size_bytes == VERIFY_BYTES]
    # 4 layers with two all-reduces each are below the verify pass and the embedding's
    assert row.count >= 8
    assert prediction.saved_ms == pytest.approx(1e-3 * 2.0 * row.count)


@pytest.mark.parametrize(
    ("made_on", "is_told"),
    [
        (None, False),
        (["GPU-0", "GPU-1"], False),
        (["GPU-3", "GPU-1", "GPU-0"], False),
        (["GPU-0", "GPU-2"], True),
    ],
)
def test_times_of_other_gpus_are_told(
    launch: tuple[str, ...], made_on: list[str] | None, is_told: bool
) -> None:
    fingerprint = None if made_on is None else {"gpu_uuids": made_on}
    profile = replace(FAST, measured=measured(), fingerprint=fingerprint)
    host = replace(HOST, gpu_uuids=("GPU-0", "GPU-1"))

    prediction = predictions_for(arms(launch, profile), batch_size=1, host=host)["fast"]

    check = check_prediction(prediction, baseline_ms=10.0, effect_pct=1.0, effect_ci_pct=None)
    assert prediction.is_from_elsewhere is is_told
    assert ("on other GPUs than these" in check.sentence) is is_told


VERIFY_LOGITS_BYTES = 3 * 512 // 2 * 2


def test_all_gathers_of_the_launch_are_counted_where_the_profile_has_their_times(
    launch: tuple[str, ...],
) -> None:
    times = {"bytes": VERIFY_LOGITS_BYTES, "baseline_us": 9.0, "tuned_us": 5.0}
    new = replace(FAST, measured={**measured(), "gathers": [times]})
    old = replace(FAST, measured=measured())

    with_gathers = predictions_for(arms(launch, new), batch_size=1)["fast"]
    without = predictions_for(arms(launch, old), batch_size=1)["fast"]

    (row,) = [row for row in with_gathers.gathers if row.baseline_us is not None]
    assert (row.size_bytes, row.origin) == (VERIFY_LOGITS_BYTES, "verify+draft_extend")
    assert with_gathers.saved_ms - without.saved_ms == pytest.approx(1e-3 * 4.0 * 2)
    assert [row.size_bytes for row in without.gathers] == [
        r.size_bytes for r in with_gathers.gathers
    ]


@pytest.mark.parametrize(
    "flags",
    [("--enable-fp32-lm-head",), ("--speculative-token-map", "/m.pt"), ("--enable-dp-lm-head",)],
)
def test_all_gathers_of_other_logits_are_not_guessed(
    launch: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    pair = arms((*launch, *flags), replace(FAST, measured=measured()))

    assert predictions_for(pair, batch_size=1)["fast"].gathers == ()


def test_batch_size_chooses_the_payload(launch: tuple[str, ...]) -> None:
    profile = replace(FAST, measured=measured())

    found = predictions_for(arms(launch, profile), batch_size=8)

    sizes = [row.size_bytes for each in found.values() for row in each.rows if row.baseline_us]
    assert VERIFY_BYTES not in sizes


def test_a_profile_without_figures_takes_those_of_a_search_that_tried_it(
    launch: tuple[str, ...],
) -> None:
    searches: list[Mapping[str, object]] = [
        {},
        {
            "payloads": [{"bytes": VERIFY_BYTES, "baseline_us": 10.0}],
            "comparisons": [
                {"settings": {"NCCL_PROTO": "Simple"}, "ratios": {str(VERIFY_BYTES): 3.0}},
                {"settings": dict(FAST.settings), "ratios": {str(VERIFY_BYTES): 0.9}},
            ],
        },
    ]

    found = predictions_for(arms(launch, FAST), batch_size=1, searches=searches)["fast"]

    assert found.tuned_ms == pytest.approx(0.9 * found.baseline_ms)


@pytest.mark.parametrize(
    "change",
    [
        lambda pair: (pair[0], replace(pair[1], profile=replace(FAST, measured={}))),
        lambda pair: (replace(pair[0], profile=FAST), pair[1]),
        lambda pair: (pair[0], replace(pair[1], argv=(*pair[1].argv, "--enable-mixed-chunk"))),
        lambda pair: tuple(
            replace(arm, argv=tuple("1" if word == "2" else word for word in arm.argv[:6]))
            for arm in pair
        ),
    ],
    ids=["nothing measured", "another baseline", "another launch", "one rank"],
)
def test_nothing_is_predicted_where_it_would_be_a_guess(
    launch: tuple[str, ...], change: object
) -> None:
    pair = arms(launch, replace(FAST, measured=measured()))

    assert predictions_for(change(pair), batch_size=1) == {}  # type: ignore[operator]


def test_a_model_that_cannot_be_read_predicts_nothing() -> None:
    pair = arms(LAUNCH, replace(FAST, measured=measured()))

    assert predictions_for(pair, batch_size=1) == {}
