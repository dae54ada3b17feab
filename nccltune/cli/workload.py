"""From options and a launch command to the workload; every verb that measures uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import FileError, UsageProblem
from nccltune.payloads.derive import (
    SpeculationShape,
    Workload,
    default_workload,
    parse_payload_option,
    uses_from_options,
    workload_from_model,
    workload_from_payloads,
)
from nccltune.payloads.model_config import load_model_shape
from nccltune.payloads.shapes import KIMI_K25, ModelShape
from nccltune.sglang.command import (
    LaunchCommand,
    parse_launch,
    payload_doubts,
    speculation_shape,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_TP = 8
"""Where neither a launch nor GPUs say it. Only decides which batch sizes SGLang captures, and those
are the same from 4 on; and what each rank contributes to an all-gather."""

MAX_TP = 1024
"""More ranks than one host could hold."""


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What was typed about the all-reduces; None and empty where nothing was."""

    model: str | None = None
    tp: int | None = None
    num_steps: int | None = None
    eagle_topk: int | None = None
    num_draft_tokens: int | None = None
    batches: Sequence[str] = ()
    payloads: Sequence[str] = ()
    launch: Sequence[str] = ()

    @property
    def speculation(self) -> Mapping[str, int]:
        """Numbers of the speculation that were given, by option."""
        given = {
            "--num-steps": self.num_steps,
            "--eagle-topk": self.eagle_topk,
            "--num-draft-tokens": self.num_draft_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}

    def format_again(self) -> list[str]:
        """Write the same options for another verb."""
        named = {"--model": self.model, "--tp": self.tp, **self.speculation}
        words = [word for k, v in named.items() if v is not None for word in (k, str(v))]
        for name, values in (("--batch", self.batches), ("--payload", self.payloads)):
            words += [word for value in values for word in (name, value)]
        return [*words, *(["--", *self.launch] if self.launch else [])]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be tuned for.

    Attributes:
        tp: ranks; None where nobody said, so that every visible GPU takes part.
        command: the launch, where one was given.
        doubts: what makes the derived counts uncertain, one line each.
        decoding: how it decodes, in words; empty where payloads were given as they are.
        shape: the model, where it was read or is the default.
    """

    workload: Workload
    tp: int | None
    command: LaunchCommand | None = None
    doubts: tuple[str, ...] = ()
    decoding: str = ""
    shape: ModelShape | None = None


def workload_from_options(options: WorkloadOptions) -> Demand:
    """Build the workload that the options ask for.

    Raises:
        UsageProblem: options that contradict each other, or numbers that no launch can have.
        FileError: the model's config cannot be used.
    """
    command = parse_launch(options.launch) if options.launch else None
    tp = options.tp if options.tp is not None else (command.tp_size if command else None)
    _check_ranks(tp)
    if options.payloads:
        return _given(options, command, tp)
    if command is None and options.model is None:
        doubts: list[str] = []
        decoding = _speculation(options, None, KIMI_K25, tp, doubts)
        # Typing out a default asks for nothing else than leaving it out.
        if decoding == SpeculationShape(decoding.tp):
            workload = default_workload(uses_from_options(options.batches) or None, decoding.tp)
            return Demand(workload, tp, doubts=tuple(doubts), decoding=_decoding(decoding))
    return _derived(options, command, tp)


def _check_ranks(tp: int | None) -> None:
    if tp == 1:
        raise UsageProblem(
            "tensor parallel size 1 makes no all-reduce: nothing to tune; give --tp 2 or more",
            code="no_all_reduce",
        )
    if tp is not None and not 1 < tp <= MAX_TP:
        raise UsageProblem(
            f"tensor parallel size {tp}: give --tp from 2 to {MAX_TP}", code="bad_value"
        )


def _given(options: WorkloadOptions, command: LaunchCommand | None, tp: int | None) -> Demand:
    others = {"--model": options.model, "--batch": options.batches or None, **options.speculation}
    for name, value in others.items():
        if value is not None:
            raise UsageProblem(
                f"--payload gives the all-reduces as they are, so {name} has nothing to say: "
                "leave one of the two out",
                code="conflicting_options",
            )
    workload = workload_from_payloads(parse_payload_option(text) for text in options.payloads)
    return Demand(workload, tp, command)


def _derived(options: WorkloadOptions, command: LaunchCommand | None, tp: int | None) -> Demand:
    doubts = list(payload_doubts(command)) if command else []
    shape = _shape(options, command)
    draft = _draft_shape(command, shape, doubts)
    decoding = _speculation(options, command, shape, tp, doubts)
    workload = workload_from_model(
        shape,
        decoding,
        uses_from_options(options.batches) or None,
        draft=draft,
        name=_name(shape),
    )
    return Demand(workload, tp, command, tuple(doubts), _decoding(decoding), shape)


def _shape(options: WorkloadOptions, command: LaunchCommand | None) -> ModelShape:
    path = options.model
    if path == "":
        raise UsageProblem(
            "--model is empty: give the folder that holds the model, or leave the option out",
            code="no_model",
        )
    if path is None and command is not None:
        path = command.model_path
    if path is not None:
        return load_model_shape(path)
    if command is not None:
        raise UsageProblem(
            "the launch command names no model: add --model-path to it, or give --model DIR",
            code="no_model",
        )
    return KIMI_K25


def _draft_shape(
    command: LaunchCommand | None, shape: ModelShape, doubts: list[str]
) -> ModelShape | None:
    """Read the draft model's shape; where it is not here, one layer of the target stands for it."""
    path = command.draft_model_path if command else None
    if path is None or command is None or path == command.model_path:
        return None
    try:
        return load_model_shape(path, is_draft=True)
    except FileError as error:
        doubts.append(f"draft model: {error}; taken as one layer of {shape.hidden_size} wide rows")
        return None


def _speculation(
    options: WorkloadOptions,
    command: LaunchCommand | None,
    shape: ModelShape,
    tp: int | None,
    doubts: list[str],
) -> SpeculationShape:
    decoding = SpeculationShape(tp=tp if tp is not None else DEFAULT_TP)
    if command is not None:
        decoding = replace(speculation_shape(command, shape), tp=tp or command.tp_size)
        if options.speculation and not decoding.is_speculative:
            name = next(iter(options.speculation))
            raise UsageProblem(
                f"{name}: the launch command does not speculate; leave it out, or add "
                "--speculative-algorithm to the command",
                code="conflicting_options",
            )
    given = options.speculation
    topk = given.get("--eagle-topk", decoding.topk)
    tokens = given.get("--num-draft-tokens", decoding.num_draft_tokens)
    steps = given.get("--num-steps", decoding.num_steps)
    if topk == 1 and "--num-steps" not in given and "--num-draft-tokens" in given:
        if tokens < 2:
            raise UsageProblem(
                f"--num-draft-tokens {tokens}: one verify pass checks 2 or more", code="bad_value"
            )
        steps = tokens - 1
    found = replace(decoding, num_steps=steps, topk=topk, num_draft_tokens=tokens)
    if "--num-draft-tokens" in given and found.num_draft_tokens != tokens:
        doubts.append(
            f"--num-draft-tokens {tokens}: with top-k 1 SGLang forces num-steps + 1, "
            f"which is {found.num_draft_tokens}"
        )
    return found


def _name(shape: ModelShape) -> str:
    """Name the workload after the model's folder, which is how people call the model."""
    if shape is KIMI_K25:
        return default_workload().name
    path = Path(shape.source)
    folder = path.parent if path.name == "config.json" else path
    if folder.parent.name == "snapshots":  # the hub's cache: models--ORG--NAME/snapshots/REVISION
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def _decoding(shape: SpeculationShape) -> str:
    if not shape.is_speculative:
        return "plain decoding, one row a request"
    return (
        f"EAGLE: {shape.num_steps} steps, top-k {shape.topk}, "
        f"{shape.num_draft_tokens} draft tokens a request"
    )
