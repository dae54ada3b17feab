"""What each arm's settings should save in a step, where a search has measured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.payloads.derive import workload_from_model
from nccltune.payloads.model_config import load_model_shape
from nccltune.sglang.command import parse_launch, speculation_shape
from nccltune.verify.judging.prediction import Prediction, predict

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.payloads.workload import Batch
    from nccltune.sglang.command import LaunchCommand
    from nccltune.verify.model import Arm

OTHER_LOGITS_FLAGS = ("enable_dp_lm_head", "enable_fp32_lm_head", "speculative_token_map")
"""Flags under which logits have another group, type or width than is derived here."""


def predictions_for(
    arms: Sequence[Arm],
    *,
    batch_size: int,
    searches: Sequence[Mapping[str, object]] = (),
    host: Fingerprint | None = None,
) -> dict[str, Prediction]:
    """Predict each arm that differs from the baseline in its settings alone.

    Args:
        arms: the first is the baseline; what was measured holds against SGLang's own environment,
            so that any other baseline gets no prediction.
        batch_size: requests that decode at the same time.
        searches: answers of searches of this host, oldest first.
        host: where the arms run; None where that is not known.
    """
    baseline, *candidates = arms
    if baseline.profile is not None and baseline.profile.settings:
        return {}
    batch = _batch(baseline.argv, batch_size)
    if batch is None:
        return {}
    found: dict[str, Prediction] = {}
    for arm in candidates:
        measured = _measured(arm, searches)
        if arm.argv != baseline.argv or measured is None:
            continue
        prediction = predict(batch.payloads, measured, batch.gathers)
        if prediction is not None:
            is_elsewhere = host is not None and _is_elsewhere(arm, host)
            found[arm.name] = replace(prediction, is_from_elsewhere=is_elsewhere)
    return found


def _batch(argv: Sequence[str], batch_size: int) -> Batch | None:
    """Return the collectives of a step; None where model or launch cannot be read here."""
    try:
        command = parse_launch(argv)
        if command.tp_size < 2 or command.model_path is None:
            return None
        shape = load_model_shape(command.model_path)
        path = command.draft_model_path
        draft = None
        if path is not None and path != command.model_path:
            draft = load_model_shape(path, is_draft=True)
        decoding = speculation_shape(command, shape)
        workload = workload_from_model(shape, decoding, {batch_size: 1.0}, draft=draft)
    except NccltuneError:
        return None
    (batch,) = workload.batches
    return batch if _has_plain_logits(command) else replace(batch, gathers=())


def _has_plain_logits(command: LaunchCommand) -> bool:
    """Whether the gathers of logits are those that are derived from the models alone."""
    return not (command.has_dp_attention or any(map(command.has, OTHER_LOGITS_FLAGS)))


def _is_elsewhere(arm: Arm, host: Fingerprint) -> bool:
    """Whether a profile's own times come from other GPUs."""
    if arm.profile is None or not arm.profile.measured.get("payloads"):
        return False
    made_on = (arm.profile.fingerprint or {}).get("gpu_uuids")
    return isinstance(made_on, Sequence) and not set(host.gpu_uuids) <= set(made_on)


def _measured(arm: Arm, searches: Sequence[Mapping[str, object]]) -> Mapping[str, object] | None:
    """Return times under these settings: the profile's own, else from a search that tried them."""
    if arm.profile is None or not arm.profile.settings:
        return None
    if arm.profile.measured.get("payloads"):
        return arm.profile.measured
    for answer in reversed(searches):
        comparisons = answer.get("comparisons")
        for each in comparisons if isinstance(comparisons, list) else ():
            if each.get("settings") == dict(arm.profile.settings) and each.get("ratios"):
                return {"payloads": _rows(answer.get("payloads"), each["ratios"])}
    return None


def _rows(payloads: object, ratios: Mapping[str, float]) -> list[dict[str, object]]:
    """Turn the ratios of a candidate into its times, by the baseline's of the same search."""
    rows: list[dict[str, object]] = []
    for row in payloads if isinstance(payloads, list) else ():
        size, baseline_us = row["bytes"], row["baseline_us"]
        ratio = ratios.get(str(size))
        if ratio is not None and baseline_us is not None:
            rows.append(
                {"bytes": size, "baseline_us": baseline_us, "tuned_us": baseline_us * ratio}
            )
    return rows
