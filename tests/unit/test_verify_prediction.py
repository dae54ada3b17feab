from __future__ import annotations

from collections.abc import Mapping

import pytest

from nccltune.payloads.derive import SpeculationShape, workload_from_model
from nccltune.payloads.shapes import KIMI_K25
from nccltune.verify.judging.prediction import Prediction, check_prediction, predict

(BATCH,) = workload_from_model(KIMI_K25, SpeculationShape(tp=8), {1: 1.0}).batches
PAYLOADS, GATHERS = BATCH.payloads, BATCH.gathers
MEASURED = {
    "payloads": [
        {"bytes": 43008, "baseline_us": 40.0, "tuned_us": 30.0},
        {"bytes": 14336, "baseline_us": 20.0, "tuned_us": 21.0},
        {"bytes": 67108864, "baseline_us": 900.0, "tuned_us": 900.0},
    ]
}


def predicted(measured: Mapping[str, object]) -> Prediction:
    found = predict(PAYLOADS, measured)
    assert found is not None
    return found


def test_predict_multiplies_all_reduces_of_a_step_with_their_times() -> None:
    prediction = predicted(MEASURED)

    # 123 of the verify pass and 3 of the draft extension at 43008 B, 3 of a draft step at 14336 B.
    assert prediction.all_reduce_count == 129
    assert prediction.missing_count == 0
    assert prediction.baseline_ms == pytest.approx((126 * 40.0 + 3 * 20.0) / 1e3)
    assert prediction.saved_ms == pytest.approx((126 * 10.0 - 3 * 1.0) / 1e3)


def test_predict_size_that_was_not_measured_is_left_out_and_counted() -> None:
    measured: dict[str, object] = {"payloads": MEASURED["payloads"][:1]}
    prediction = predicted(measured)

    assert prediction.missing_count == 3
    assert prediction.saved_ms == pytest.approx(1.26)
    check = check_prediction(prediction, baseline_ms=20.0, effect_pct=6.0, effect_ci_pct=None)
    assert "3 of 129 all-reduces a step were not measured" in check.sentence


GATHERED = [
    {"bytes": 122880, "baseline_us": 50.0, "tuned_us": 30.0},
    {"bytes": 40960, "baseline_us": 20.0, "tuned_us": 15.0},
]
UNCOUNTED = "all-gathers a step (40960, 122880 bytes a rank) follow the same settings and are not"


def sentence(measured: Mapping[str, object], effect_pct: float = 9.0) -> str:
    found = predict(PAYLOADS, measured, GATHERS)
    assert found is not None
    interval = (effect_pct - 1.0, effect_pct + 1.0)
    return check_prediction(
        found, baseline_ms=20.0, effect_pct=effect_pct, effect_ci_pct=interval
    ).sentence


def test_predict_counts_all_gathers_that_were_measured() -> None:
    prediction = predict(PAYLOADS, {**MEASURED, "gathers": GATHERED}, GATHERS)

    assert prediction is not None
    # One of the verify pass and one of the draft extension, and one of a draft step.
    assert prediction.saved_ms == pytest.approx((126 * 10.0 - 3 + 2 * 20.0 + 5.0) / 1e3)
    assert prediction.baseline_ms == pytest.approx((126 * 40.0 + 60 + 2 * 50.0 + 20.0) / 1e3)
    assert (prediction.all_reduce_count, prediction.missing_count) == (129, 0)
    assert [(row.size_bytes, row.count, row.tuned_us) for row in prediction.gathers] == [
        (122880, 2, 30.0),
        (40960, 1, 15.0),
    ]
    words = sentence({**MEASURED, "gathers": GATHERED})
    assert words.endswith("more than its all-reduces and all-gathers alone should")


def test_predict_names_one_all_gather_that_was_not_measured() -> None:
    measured = {**MEASURED, "gathers": GATHERED[:1]}
    prediction = predict(PAYLOADS, measured, GATHERS)

    assert prediction is not None
    assert prediction.saved_ms == pytest.approx((126 * 10.0 - 3 + 2 * 20.0) / 1e3)
    assert sentence(measured).endswith(
        "; 1 all-gather a step (40960 bytes a rank) follows the same settings and is not in the "
        "prediction"
    )


@pytest.mark.parametrize("gathers", [[], None, "122880", [7, {"bytes": 122880}]])
def test_predict_without_measured_all_gathers_names_them_all(gathers: object) -> None:
    measured = {**MEASURED, "gathers": gathers}
    prediction = predict(PAYLOADS, measured, GATHERS)

    assert prediction is not None
    assert prediction.saved_ms == predicted(MEASURED).saved_ms
    assert f"more than its all-reduces alone should; 3 {UNCOUNTED}" in sentence(measured)
    assert sentence(measured) == sentence(MEASURED)


def test_predict_says_what_it_leaves_out_where_both_agree_too() -> None:
    words = sentence({"payloads": MEASURED["payloads"][:1]}, effect_pct=6.0)

    assert "they agree within that interval; 3 of 129 all-reduces a step were not" in words
    assert words.endswith(f"left out; 3 {UNCOUNTED} in the prediction")


def test_predict_all_gathers_alone_are_no_prediction() -> None:
    assert predict(PAYLOADS, {"gathers": GATHERED}, GATHERS) is None


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {"payloads": None},
        {"payloads": "43008"},
        {"payloads": [7, {"bytes": 43008, "baseline_us": None, "tuned_us": 30.0}]},
        {"payloads": [{"bytes": 43008, "baseline_us": 40.0, "tuned_us": 0.0}]},
        {"payloads": [{"bytes": 43008, "baseline_us": True, "tuned_us": float("nan")}]},
        {"payloads": [{"bytes": 999, "baseline_us": 40.0, "tuned_us": 30.0}]},
    ],
)
def test_predict_nothing_that_fits_gives_no_prediction(measured: Mapping[str, object]) -> None:
    assert predict(PAYLOADS, measured) is None


@pytest.mark.parametrize(
    ("effect_pct", "interval", "words"),
    [
        (6.0, (5.0, 7.0), "they agree within that interval"),
        (2.0, (1.0, 3.0), "the server saves 0.86 ms less than its all-reduces alone should"),
        (9.0, (8.0, 10.0), "the server saves 0.54 ms more than its all-reduces alone should"),
        (6.0, None, "too few boots to say how far they are apart"),
    ],
)
def test_check_says_how_far_prediction_and_measurement_are_apart(
    effect_pct: float, interval: tuple[float, float] | None, words: str
) -> None:
    check = check_prediction(
        predicted(MEASURED), baseline_ms=20.0, effect_pct=effect_pct, effect_ci_pct=interval
    )

    assert words in check.sentence
    assert check.measured_saved_ms == pytest.approx(0.2 * effect_pct)
    assert check.nccl_share == pytest.approx(5.1 / 20.0)
