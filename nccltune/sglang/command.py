"""Reads an SGLang launch command: what it serves, over how many GPUs, how it speculates.

Nothing is started and SGLang is not imported. What a launch leaves open is filled in by SGLang's
own rules, read in its releases 0.5.10.post1 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccltune.errors import UsageProblem
from nccltune.payloads.shapes import DEFAULT_CHUNKED_PREFILL_SIZE, ModelShape, SpeculationShape
from nccltune.regular_files import read_regular
from nccltune.sglang.argv import env_effects, split_launch
from nccltune.sglang.flags import (
    FileReader,
    Flags,
    is_true,
    likely_typos,
    read_flags,
    with_config_file,
)

EAGLE_FAMILY = frozenset({"EAGLE", "EAGLE3", "NEXTN"})
"""Algorithms with a draft model of a layer or a few, whose all-reduces are known here."""

_LONG_CHAIN_ARCHITECTURES = frozenset({"LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM"})
_DEFAULT_MAX_PREFILL_TOKENS = 16384
_MAX_CAPTURED = 1 << 16


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A launch as it was typed; None where it leaves the choice to SGLang.

    Attributes:
        environment: variables that the command itself sets, through ``env NAME=VALUE``.
        flags: every flag by its canonical name (``tp_size``), with its values; a switch has none.
        attn_dp_size: width of data-parallel attention, in the old spelling
            (``--enable-dp-attention --dp-size N``) too; 1 where it is off.
        dp_size: whole replicas of the model; 1 where ``--dp-size`` means attention.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    flags: Mapping[str, tuple[str, ...]]
    model_path: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    ep_size: int = 1
    dcp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    speculative_algorithm: str | None = None
    draft_model_path: str | None = None
    num_steps: int | None = None
    eagle_topk: int | None = None
    num_draft_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    cuda_graph_max_bs: int | None = None
    cuda_graph_sizes: tuple[int, ...] | None = None

    def has(self, name: str) -> bool:
        """Tell whether a flag was given, by its canonical name."""
        return name in self.flags

    def value(self, name: str) -> str | None:
        """Return the first value of a flag; None for a switch or where it was not given."""
        values = self.flags.get(name, ())
        return values[0] if values else None

    @property
    def is_speculative(self) -> bool:
        """Whether a draft is proposed and verified at all."""
        return self.speculative_algorithm is not None

    @property
    def is_eagle_launch(self) -> bool:
        """Whether the draft is of the EAGLE family, MTP layers (NEXTN) among it."""
        return self.speculative_algorithm in EAGLE_FAMILY

    @property
    def is_eagle3_launch(self) -> bool:
        """Whether this is EAGLE-3."""
        return self.speculative_algorithm == "EAGLE3"

    @property
    def is_deterministic(self) -> bool:
        """Whether results must not depend on the batch, for which SGLang pins NCCL's algorithm."""
        return self.has("enable_deterministic_inference") or self.has("rl_on_policy_target")

    @property
    def has_dp_attention(self) -> bool:
        """Whether attention is data-parallel, so that most sums are gathers and scatters."""
        return self.attn_dp_size > 1

    @property
    def has_decode_graphs(self) -> bool:
        """Whether decode and verify run from CUDA graphs."""
        is_off = self.value("cuda_graph_backend_decode") == "disabled"
        return not (is_off or self.has("disable_cuda_graph"))


def parse_launch(argv: Sequence[str], read: FileReader = read_regular) -> LaunchCommand:
    """Read a launch command, wrappers such as ``env`` and ``numactl`` included.

    Args:
        argv: the command.
        read: reads its ``--config`` file.

    Raises:
        UsageProblem: not an SGLang launch, or numbers that SGLang cannot serve with.
        FileError: the ``--config`` file cannot be used.
    """
    argv = tuple(argv)
    start, tokens = split_launch(argv)
    flags = with_config_file(read_flags(tokens), tokens, read)
    algorithm = (flags.text("speculative_algorithm") or "NONE").upper()
    dp_size = flags.integer("dp_size", minimum=1) or 1
    attn_dp_size = flags.integer("attn_dp_size", minimum=1) or 1
    if "enable_dp_attention" in flags.values:
        attn_dp_size, dp_size = (dp_size if attn_dp_size == 1 else attn_dp_size), 1
    command = LaunchCommand(
        argv=argv,
        environment=env_effects(argv[:start]).assigned,
        flags=flags.values,
        model_path=flags.text("model_path"),
        tp_size=flags.integer("tp_size", minimum=1) or 1,
        pp_size=flags.integer("pp_size", minimum=1) or 1,
        dp_size=dp_size,
        attn_dp_size=attn_dp_size,
        ep_size=flags.integer("ep_size", minimum=1) or 1,
        dcp_size=flags.integer("dcp_size", minimum=1) or 1,
        nnodes=flags.integer("nnodes", minimum=1) or 1,
        node_rank=flags.integer("node_rank", minimum=0) or 0,
        speculative_algorithm=None if algorithm == "NONE" else algorithm,
        draft_model_path=flags.text("speculative_draft_model_path"),
        num_steps=flags.integer("speculative_num_steps", minimum=1),
        eagle_topk=flags.integer("speculative_eagle_topk", minimum=1),
        num_draft_tokens=flags.integer("speculative_num_draft_tokens", minimum=1),
        chunked_prefill_size=flags.integer("chunked_prefill_size", minimum=-1),
        max_prefill_tokens=flags.integer("max_prefill_tokens", minimum=1),
        max_running_requests=flags.integer("max_running_requests", minimum=1),
        cuda_graph_max_bs=flags.integer(
            "cuda_graph_max_bs_decode", minimum=1, maximum=_MAX_CAPTURED
        ),
        cuda_graph_sizes=flags.integers("cuda_graph_bs_decode", minimum=1),
    )
    _check_speculation(command, flags)
    return command


def speculation_shape(command: LaunchCommand, shape: ModelShape | None) -> SpeculationShape:
    """Return how this launch decodes, with SGLang's own values where it leaves them open.

    Args:
        command: the launch.
        shape: its model; needed only where SGLang chooses the number of steps by it.

    Raises:
        UsageProblem: a way of speculating whose all-reduces are not known here.
    """
    steps, topk, draft_tokens = _speculation_numbers(command, shape)
    chunk = command.chunked_prefill_size
    if chunk is None:
        chunk = DEFAULT_CHUNKED_PREFILL_SIZE
    elif chunk < 1:  # chunking is off: one prefill takes up to this many tokens
        chunk = command.max_prefill_tokens or _DEFAULT_MAX_PREFILL_TOKENS
    sizes = command.cuda_graph_sizes
    if command.has("disable_cuda_graph_padding") and sizes is None:
        max_bs = command.cuda_graph_max_bs or (512 if command.tp_size >= 4 else 256)
        sizes = tuple(range(1, max_bs + 1))
    return SpeculationShape(
        tp=command.tp_size,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=draft_tokens,
        max_running_requests=command.max_running_requests,
        cuda_graph_max_bs=command.cuda_graph_max_bs,
        chunked_prefill_size=chunk,
        is_speculative=command.is_speculative,
        captured_sizes=sizes if command.has_decode_graphs else (),
    )


def payload_doubts(command: LaunchCommand) -> tuple[str, ...]:
    """Say what in this launch makes the derived all-reduce counts uncertain, one line each."""
    a2a = command.value("moe_a2a_backend") or "none"
    embed = command.environment.get("SGLANG_ENABLE_EMBED_REPLICATION")
    doubts = {
        f"--pp-size {command.pp_size}: each stage runs only its own layers": command.pp_size > 1,
        f"attention data parallel {command.attn_dp_size}: most sums are gathers and scatters": (
            command.has_dp_attention
        ),
        f"--dcp-size {command.dcp_size}: attention has collectives of its own": (
            command.dcp_size > 1
        ),
        f"--moe-a2a-backend {a2a}: experts exchange tokens instead of summing": a2a != "none",
        "--speculative-adaptive: the number of draft tokens changes while it runs": (
            command.has("speculative_adaptive")
        ),
        "--cuda-graph-config: captured batch sizes set there are not read": (
            command.has("cuda_graph_config")
        ),
        "SGLANG_ENABLE_EMBED_REPLICATION: DeepSeek models make one all-reduce fewer a pass": (
            is_true(embed)
        ),
    }
    typos = [
        f"--{name.replace('_', '-')}: not read here; did you mean --{meant.replace('_', '-')}?"
        for name, meant in likely_typos(command.flags)
    ]
    return (*typos, *(text for text, is_so in doubts.items() if is_so))


def _speculation_numbers(command: LaunchCommand, shape: ModelShape | None) -> tuple[int, int, int]:
    """Return steps, top-k and draft tokens."""
    if not command.is_speculative:
        return 1, 1, 1
    if not command.is_eagle_launch:
        raise UsageProblem(
            f"--speculative-algorithm {command.speculative_algorithm}: its all-reduces are not "
            "known here; give --payload BYTES:COUNT",
            code="unknown_speculation",
        )
    if command.num_steps is not None:
        topk = command.eagle_topk or 1
        return command.num_steps, topk, command.num_draft_tokens or command.num_steps + 1
    if command.has("speculative_adaptive"):
        raise UsageProblem(
            "--speculative-adaptive without --speculative-num-steps: the number of draft tokens is "
            "not known before it runs; give --payload BYTES:COUNT",
            code="unknown_speculation",
        )
    if shape is None:
        raise UsageProblem(
            "SGLang chooses the number of steps by the model, which is not known: "
            "give --speculative-num-steps or the model",
            code="unknown_speculation",
        )
    # What SGLang writes into the launch by itself (speculative_hook.py in 0.5.23).
    return (5, 4, 8) if shape.architecture in _LONG_CHAIN_ARCHITECTURES else (3, 1, 4)


def _check_speculation(command: LaunchCommand, flags: Flags) -> None:
    """Refuse the combinations that stop SGLang at start."""
    if not command.is_eagle_launch or command.has("speculative_adaptive"):
        return
    others = ("speculative_eagle_topk", "speculative_num_draft_tokens")
    if command.num_steps is None:
        for name in others:
            if name in flags.values:
                raise flags.problem(name, "needs --speculative-num-steps too")
    elif command.eagle_topk is None:
        raise flags.problem("speculative_num_steps", "needs --speculative-eagle-topk too")
    elif command.eagle_topk > 1 and command.num_draft_tokens is None:
        raise flags.problem("speculative_eagle_topk", "needs --speculative-num-draft-tokens too")
