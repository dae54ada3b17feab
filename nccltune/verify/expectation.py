"""What each arm's settings should save in a step, where a search has measured them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from nccltune.errors import NccltuneError
from nccltune.host.fingerprint import Fingerprint
from nccltune.host.match import gpu_groups
from nccltune.payloads.derive import workload_from_model
from nccltune.payloads.model_config import load_model_shape
from nccltune.sglang.command import parse_launch, speculation_shape
from nccltune.verify.judging.prediction import Prediction, predict, usable_number

if TYPE_CHECKING:
    from nccltune.payloads.workload import Batch
    from nccltune.sglang.command import LaunchCommand
    from nccltune.verify.model import Arm

OTHER_LOGITS_FLAGS = ("enable_dp_lm_head", "enable_fp32_lm_head", "speculative_token_map")
"""Flags under which logits have another group, type or width than is derived here."""
_MAX_RATIO = 1e3
_MAX_RANKS = 1 << 20


class _Times(NamedTuple):
    """Times of collectives under some settings, and the fingerprint of where they were measured.

    Both as a file holds them: anything may be missing or damaged.
    """

    measured: Mapping[str, object]
    made_on: object


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
        searches: answers of searches of this host, oldest first; what is damaged in them is left
            out.
        host: every GPU that the arms see; None where that is not known.
    """
    baseline, *candidates = arms
    if baseline.profile is not None and baseline.profile.settings:
        return {}
    try:
        command = parse_launch(baseline.argv)
        batch = _batch(command, batch_size)
    except NccltuneError:
        return {}
    if batch is None:
        return {}
    found: dict[str, Prediction] = {}
    for arm in candidates:
        if arm.argv != baseline.argv:
            continue
        for times in _times(arm, searches):
            prediction = predict(batch.payloads, times.measured, batch.gathers)
            if prediction is not None:
                found[arm.name] = _with_origin(prediction, times.made_on, host, command)
                break
    return found


def _batch(command: LaunchCommand, batch_size: int) -> Batch | None:
    """Return the collectives of a step; None where there are none, or the model is not said.

    Raises:
        NccltuneError: model or launch cannot be read here.
    """
    if command.tp_size < 2 or command.model_path is None:
        return None
    shape = load_model_shape(command.model_path)
    path = command.draft_model_path
    draft = None
    if path is not None and path != command.model_path:
        draft = load_model_shape(path, is_draft=True)
    decoding = speculation_shape(command, shape)
    (batch,) = workload_from_model(shape, decoding, {batch_size: 1.0}, draft=draft).batches
    return batch if _has_plain_logits(command) else replace(batch, gathers=())


def _has_plain_logits(command: LaunchCommand) -> bool:
    """Whether the gathers of logits are those that are derived from the models alone."""
    return not (command.has_dp_attention or any(map(command.has, OTHER_LOGITS_FLAGS)))


def _with_origin(
    prediction: Prediction, made_on: object, host: Fingerprint | None, command: LaunchCommand
) -> Prediction:
    """Note how the GPUs and ranks of the times differ from those that the launch uses."""
    try:
        there = Fingerprint.from_json(made_on)
    except ValueError:  # missing or damaged: where they come from is not known
        return prediction
    ranks = (there.world_size, command.tp_size)
    is_other = ranks[0] != ranks[1] and ranks[0] <= _MAX_RANKS
    return replace(
        prediction,
        is_from_elsewhere=host is not None and not _is_on(there, host, command),
        other_rank_counts=ranks if is_other else None,
    )


def _is_on(there: Fingerprint, host: Fingerprint, command: LaunchCommand) -> bool:
    """Whether a launch uses only GPUs of a fingerprint; those that it does not use are no matter.

    One that asks for GPUs that it does not see uses others, too.
    """
    uuids = dict(enumerate(host.gpu_uuids))
    return all(uuids.get(gpu) in there.gpu_uuids for group in gpu_groups(command) for gpu in group)


def _times(arm: Arm, searches: Sequence[Mapping[str, object]]) -> Iterator[_Times]:
    """Yield times under these settings: the profile's own, then of searches that tried them."""
    profile = arm.profile
    if profile is None or not profile.settings:
        return
    yield _Times(profile.measured, profile.fingerprint)
    for answer in reversed(searches):
        comparisons = answer.get("comparisons")
        for each in comparisons if isinstance(comparisons, list) else ():
            if isinstance(each, dict) and each.get("settings") == dict(profile.settings):
                rows = list(_rows(answer.get("payloads"), each.get("ratios")))
                yield _Times({"payloads": rows}, answer.get("fingerprint"))


def _rows(payloads: object, ratios: object) -> Iterator[dict[str, object]]:
    """Turn the ratios of a candidate into its times, by the baseline's of the same search."""
    if not (isinstance(payloads, list) and isinstance(ratios, dict)):
        return
    for row in payloads:
        if not isinstance(row, dict):
            continue
        size, baseline_us = row.get("bytes"), usable_number(row.get("baseline_us"))
        ratio = usable_number(ratios.get(str(size)), most=_MAX_RATIO)
        if baseline_us is not None and ratio is not None:
            yield {"bytes": size, "baseline_us": baseline_us, "tuned_us": baseline_us * ratio}
