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
    from collections.abc import Mapping, Sequence

    from nccltune.host.fingerprint import Fingerprint
    from nccltune.profile import Profile
    from nccltune.verify.judging.prediction import Prediction

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


ELSEWHERE = "its times were measured on other GPUs"


def host_of(*gpus: int) -> Fingerprint:
    """Return a host of these GPUs, in this order."""
    count = len(gpus)
    links = tuple(tuple("X" if i == j else "NV18" for j in range(count)) for i in range(count))
    return replace(
        HOST,
        gpu_names=("H200",) * count,
        gpu_uuids=tuple(f"GPU-{gpu}" for gpu in gpus),
        link_matrix=links,
        numa_nodes=(0,) * count,
        world_size=count,
    )


def doubts(prediction: Prediction, baseline_ms: float = 10.0) -> list[str]:
    """Return what is said of a prediction besides the figures and what they do not count."""
    check = check_prediction(
        prediction, baseline_ms=baseline_ms, effect_pct=1.0, effect_ci_pct=None
    )
    _figures, *rest = check.sentence.split("; ")
    return [each for each in rest if not each.endswith(("left out", "in the prediction"))]


@pytest.mark.parametrize(
    ("made_on", "seen", "flags", "told"),
    [
        ((0, 1), (0, 1), (), []),
        ((1, 0), (0, 1), (), []),
        ((0, 1), range(8), (), []),
        ((4, 6), range(8), ("--base-gpu-id", "4", "--gpu-id-step", "2"), []),
        ((4, 6), range(8), ("--base-gpu-id", "4"), [ELSEWHERE]),
        ((0, 2), (0, 1), (), [ELSEWHERE]),
        ((0, 1), range(8), ("--dp-size", "2"), [ELSEWHERE]),
        ((0, 1), (0,), (), [ELSEWHERE]),
        (range(8), range(8), (), ["its times are of 8 ranks, this launch has 2"]),
        (range(8), (0, 1), (), ["its times are of 8 ranks, this launch has 2"]),
        (
            range(2, 6),
            range(8),
            (),
            [ELSEWHERE, "its times are of 4 ranks, this launch has 2"],
        ),
        (range(8), None, (), ["its times are of 8 ranks, this launch has 2"]),
        ((5, 6), None, (), []),
    ],
)
@pytest.mark.parametrize("is_searched", [False, True])
def test_times_of_other_gpus_or_ranks_than_the_launch_uses_are_told(
    launch: tuple[str, ...],
    made_on: Sequence[int],
    seen: Sequence[int] | None,
    flags: tuple[str, ...],
    told: list[str],
    is_searched: bool,
) -> None:
    fingerprint = host_of(*made_on).to_json()
    profile = replace(FAST, measured=measured(), fingerprint=fingerprint)
    if is_searched:
        profile = FAST
    found = predictions_for(
        arms((*launch, *flags), profile),
        batch_size=1,
        host=None if seen is None else host_of(*seen),
        searches=[{**search(), "fingerprint": fingerprint}],
    )["fast"]

    assert doubts(found) == told


@pytest.mark.parametrize(
    "made_on",
    [
        None,
        {},
        {"gpu_uuids": ["GPU-7", "GPU-8"]},
        {**HOST.to_json(), "gpu_uuids": [["GPU-0"], ["GPU-1"]]},
        {**HOST.to_json(), "gpu_uuids": [{}, None]},
        {**HOST.to_json(), "gpu_uuids": "GPU-7"},
        {**HOST.to_json(), "world_size": "8"},
        {**HOST.to_json(), "world_size": 10**400},
    ],
)
def test_times_of_whom_nobody_knows_are_said_to_be_of_nobody_else(
    launch: tuple[str, ...], made_on: Mapping[str, object] | None
) -> None:
    profile = replace(FAST, measured=measured(), fingerprint=made_on)

    found = predictions_for(arms(launch, profile), batch_size=1, host=HOST)["fast"]

    assert doubts(found) == []


NO_NUMBERS: list[object] = [
    None,
    "10",
    True,
    -1,
    0,
    0.0,
    1e308,
    1e7 + 1,
    10**400,
    [],
    {},
    [1],
    float("nan"),
]


def search(ratio: object = 0.9, baseline_us: object = 10.0) -> dict[str, object]:
    """Return the answer of a search that tried the settings of ``FAST``."""
    return {
        "payloads": [{"bytes": VERIFY_BYTES, "baseline_us": baseline_us}],
        "comparisons": [
            {"settings": dict(FAST.settings), "ratios": {str(VERIFY_BYTES): ratio}},
        ],
    }


NO_ROWS: list[object] = [None, "abc", 5, {}, [None], ["x"], [5], [[5]]]
NO_SIZES: list[object] = [None, [], {}, str(VERIFY_BYTES), float(VERIFY_BYTES), 10**400]
NO_RATIOS: list[object] = [None, "abc", 5, [1], {}, {"x": 1.0}]
DAMAGED = [
    *(search(baseline_us=value) for value in NO_NUMBERS),
    *(search(ratio=value) for value in NO_NUMBERS),
    search(ratio=1e6, baseline_us=1e6),
    *({**search(), "comparisons": value} for value in NO_ROWS),
    *({**search(), "payloads": value} for value in NO_ROWS),
    {**search(), "payloads": [{"bytes": VERIFY_BYTES}]},
    {**search(), "payloads": [{"baseline_us": 10.0}]},
    *({**search(), "payloads": [{"bytes": value, "baseline_us": 10.0}]} for value in NO_SIZES),
    *(
        {**search(), "comparisons": [{"settings": dict(FAST.settings), "ratios": value}]}
        for value in NO_RATIOS
    ),
]


@pytest.mark.parametrize("answer", DAMAGED, ids=lambda answer: f"{answer!r:.120}")
def test_what_is_damaged_in_a_search_is_left_out(
    launch: tuple[str, ...], answer: dict[str, object]
) -> None:
    pair = arms(launch, FAST)

    assert predictions_for(pair, batch_size=1, searches=[answer]) == {}
    # One that is whole is used whatever is newer.
    found = predictions_for(pair, batch_size=1, searches=[search(), answer])["fast"]
    assert found.tuned_ms == pytest.approx(0.9 * found.baseline_ms)


@pytest.mark.parametrize("name", ["bytes", "baseline_us", "tuned_us"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: f"{value!r:.20}")
def test_what_is_damaged_in_a_profile_is_left_out(
    launch: tuple[str, ...], name: str, value: object
) -> None:
    row = {"bytes": VERIFY_BYTES, "baseline_us": 10.0, "tuned_us": 8.0, name: value}
    profile = replace(FAST, measured={"payloads": [row], "gathers": [row]})
    good = replace(FAST, measured={**measured(), "gathers": [row]})

    assert predictions_for(arms(launch, profile), batch_size=1) == {}
    found = predictions_for(arms(launch, good), batch_size=1)["fast"]
    assert {each.baseline_us for each in found.gathers} == {None}


@pytest.mark.parametrize("us", [1e7, 1e3])
def test_times_that_no_step_could_hold_are_called_implausible(
    launch: tuple[str, ...], us: float
) -> None:
    row = {"bytes": VERIFY_BYTES, "baseline_us": us, "tuned_us": us}
    profile = replace(FAST, measured={"payloads": [row]})

    found = predictions_for(arms(launch, profile), batch_size=1)["fast"]

    count = 9 + 3  # two of each layer and the embedding's: the verify pass, the draft extension
    whole_ms = 1e-3 * us * count
    assert found.baseline_ms == pytest.approx(whole_ms)
    assert doubts(found) == [
        f"implausible: its collectives alone would take {whole_ms:.2f} ms of a step of 10.00 ms"
    ]
    assert doubts(found, baseline_ms=1.01 * whole_ms) == []


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
    other = {"settings": {"NCCL_PROTO": "Simple"}, "ratios": {str(VERIFY_BYTES): 3.0}}
    own = {"settings": dict(FAST.settings), "ratios": {str(VERIFY_BYTES): 0.9}}
    searches: list[Mapping[str, object]] = [{}, {**search(), "comparisons": [other, own]}]

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
