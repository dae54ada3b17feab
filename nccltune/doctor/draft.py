"""Whether an EAGLE-3 draft fits the target model.

A draft wired to other layers than it was trained on serves without an error, and guesses badly.
SGLang's rules were read in 0.5.15.post1 and 0.5.23. A layer id of a draft's config becomes the
point before which the target's hidden state is taken; families of models count that differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.doctor.check import Check, Status
from nccltune.errors import FileError, NccltuneError
from nccltune.jsontext import parse_json
from nccltune.payloads.model_config import load_model_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nccltune.doctor.case import Case
    from nccltune.payloads.shapes import ModelShape

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
CONFIG_KEY = "eagle_config"
_DEFAULT_COUNT = 3

_DEEPSEEK_FAMILY = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "KimiK25ForConditionalGeneration",
    }
)
"""These take ids as they stand, unless the first is 1: then one more, as the others do."""

_GPT_OSS = "GptOssForCausalLM"
"""Takes ids as they stand where the largest is the number of layers, from 0.5.2x on."""

_SHIFTING_FAMILY = frozenset(
    {
        "Glm4MoeForCausalLM",
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""These take the output of layer i before layer i + 1, so that the last one's never is taken."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What a draft's config says about the target.

    Attributes:
        target_hidden_size: width of the target's hidden states that it was made for.
        layer_ids: where SGLang reads them; None where it finds none there.
        stray_ids: the same key at the top of the file, where SGLang does not look for it.
        count: hidden states that the draft's first matrix takes.
    """

    source: str
    target_hidden_size: int
    layer_ids: tuple[int, ...] | None
    stray_ids: tuple[int, ...] | None
    count: int
    uses_layers: bool = True


def read_draft_config(path: str) -> DraftConfig:
    """Read a draft model's config.

    Raises:
        FileError: no such file, or not a model config.
    """
    shape = load_model_shape(path, is_draft=True)
    config_path = Path(shape.source)
    try:
        text = config_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(config_path, f"cannot be read: {reason}") from None
    data = parse_json(text, config_path).data
    config: Mapping[str, object] = data if isinstance(data, dict) else {}
    inner = config.get(CONFIG_KEY)
    inside: Mapping[str, object] = inner if isinstance(inner, dict) else {}
    layer_ids = _ids(config_path, inside.get(IDS_KEY))
    stray_ids = _ids(config_path, config.get(IDS_KEY))
    count = config.get("num_aux_hidden_states")
    if not isinstance(count, int):
        count = len(layer_ids or stray_ids or ()) or _DEFAULT_COUNT
    width = config.get("target_hidden_size")
    return DraftConfig(
        source=shape.source,
        target_hidden_size=width if isinstance(width, int) else shape.hidden_size,
        layer_ids=layer_ids,
        stray_ids=stray_ids,
        count=count,
        uses_layers=inside.get("use_aux_hidden_state", True) is not False,
    )


def capture_points(
    architecture: str, layer_ids: Sequence[int] | None, layer_count: int
) -> tuple[int, ...]:
    """Return the layers before which SGLang takes the target's hidden state.

    >>> capture_points("KimiK25ForConditionalGeneration", [2, 30, 58], 61)
    (2, 30, 58)
    >>> capture_points("LlamaForCausalLM", [2, 30, 58], 61)
    (3, 31, 59)
    >>> capture_points("LlamaForCausalLM", None, 61)
    (2, 30, 58)
    """
    if layer_ids is None:
        return (2, layer_count // 2, layer_count - 3)
    is_as_written = architecture in _DEEPSEEK_FAMILY and layer_ids[0] != 1
    if architecture == _GPT_OSS and max(layer_ids) == layer_count:
        is_as_written = True
    return tuple(layer_ids) if is_as_written else tuple(layer + 1 for layer in layer_ids)


def check_draft(case: Case) -> Iterator[Check]:
    """Compare the draft's config with the target's."""
    name = "draft_layers"
    launch = case.launch
    if launch is None or not launch.is_eagle3_launch or launch.draft_model_path is None:
        reason = "no launch command was given" if launch is None else "no EAGLE-3 draft is launched"
        yield Check(name, Status.SKIP, reason)
        return
    if case.shape is None:
        yield Check(name, Status.SKIP, f"the target cannot be read: {case.shape_problem}")
        return
    try:
        draft = read_draft_config(launch.draft_model_path)
    except FileError as error:
        status = Status.SKIP if error.code == "no_model" else Status.FAIL
        yield Check(name, status, f"the draft cannot be read: {error}")
        return
    except NccltuneError as error:
        yield Check(name, Status.FAIL, f"the draft cannot be read: {error}")
        return
    yield _judge(name, draft, case.shape)


def _judge(name: str, draft: DraftConfig, target: ModelShape) -> Check:
    if draft.target_hidden_size != target.hidden_size:
        message = (
            f"the draft was made for hidden states of {draft.target_hidden_size}, and the target "
            f"has {target.hidden_size} ({draft.source})"
        )
        return Check(name, Status.FAIL, message, "use a draft that was trained for this target")
    if not draft.uses_layers:
        return Check(name, Status.OK, "the draft takes the target's last hidden state alone")
    points = capture_points(target.architecture, draft.layer_ids, target.layer_count)
    for find in (_stray_problem, _range_problem, _count_problem, _order_problem):
        found = find(draft, points, target)
        if found is not None:
            status, message, fix = found
            return Check(name, status, f"{message} ({draft.source})", fix)
    taken = f"before layers {_listed(points)} of {target.layer_count}"
    how = "" if draft.layer_ids is not None else ", SGLang's default: the draft names none"
    message = f"the draft takes the target's hidden states {taken}{how}"
    return Check(name, Status.OK, message)


_Problem = tuple[Status, str, str]


def _stray_problem(
    draft: DraftConfig, points: Sequence[int], target: ModelShape
) -> _Problem | None:
    """Find ids at the top of the file, where SGLang overlooks them."""
    if draft.stray_ids is None or draft.layer_ids is not None:
        return None
    meant = capture_points(target.architecture, draft.stray_ids, target.layer_count)
    if meant == points:
        return None
    message = (
        f"{IDS_KEY} {_listed(draft.stray_ids)} stands outside {CONFIG_KEY}, where SGLang does not "
        f"look: it takes its default, before layers {_listed(points)}"
    )
    return Status.FAIL, message, f"move {IDS_KEY} into {CONFIG_KEY} in the draft's config.json"


def _range_problem(
    draft: DraftConfig, points: Sequence[int], target: ModelShape
) -> _Problem | None:
    """Find layers that the target does not have, or whose output is never taken."""
    ids = draft.layer_ids if draft.layer_ids is not None else points
    count = target.layer_count
    outside = [layer for layer, point in zip(ids, points, strict=True) if not 0 <= point <= count]
    outside += [layer for layer in ids if layer < 0]
    fix = "use a draft that was trained for this target"
    if outside:
        message = f"the draft wants layers {_listed(outside)} of a target that has {count}"
        return Status.FAIL, message, fix
    if target.architecture == _GPT_OSS or count not in points:
        return None
    is_sure = target.architecture in _SHIFTING_FAMILY | _DEEPSEEK_FAMILY
    message = f"the draft wants the output of the last of {count} layers, which SGLang never takes"
    return (Status.FAIL if is_sure else Status.WARN), message, fix


def _count_problem(
    draft: DraftConfig, points: Sequence[int], _target: ModelShape
) -> _Problem | None:
    """Find a first matrix that is wider or narrower than what it is given."""
    given_count = len(set(points))
    if given_count == draft.count:
        return None
    message = (
        f"the draft's first matrix takes {draft.count} hidden states, and SGLang gives it "
        f"{given_count}, before layers {_listed(points)}"
    )
    return Status.FAIL, message, f"correct {IDS_KEY} in {CONFIG_KEY} of the draft's config.json"


def _order_problem(
    _draft: DraftConfig, points: Sequence[int], _target: ModelShape
) -> _Problem | None:
    if list(points) == sorted(points):
        return None
    message = (
        f"the draft lists layers out of order, and SGLang hands them over from the first to the "
        f"last: before layers {_listed(sorted(points))}"
    )
    return Status.WARN, message, "see that the draft was trained with this order"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _ids(path: Path, value: object) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    is_list = isinstance(value, list) and all(type(layer) is int for layer in value)
    if not is_list:
        raise FileError(path, f"{IDS_KEY} has to be a list of layer numbers, not {value!r:.60}")
    assert isinstance(value, list)  # noqa: S101 - it was just seen to be one
    return tuple(value)
