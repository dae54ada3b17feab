"""The numbers that decide what a launch reduces: the model's shape and the way it decodes.

Pure. SGLang's own rules and defaults were read in its releases 0.5.10.post1 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nccltune.errors import UsageProblem

SPECULATIVE_MAX_RUNNING_REQUESTS = 48
"""What SGLang sets under speculation when the launch gives no --max-running-requests."""

VOCAB_PADDING = 64
"""SGLang rounds vocabularies up to a multiple of this before it splits them over the ranks."""

DEFAULT_CHUNKED_PREFILL_SIZE = 8192
"""SGLang's own on GPUs of 60 to 160 GB; it takes 16384 above that and 2048 or 4096 below."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's config says about its all-reduces.

    Attributes:
        dtype: name of the activation type; SGLang runs float32 checkpoints in half precision too.
        vocab_size: None where the config does not say.
        draft_vocab_size: tokens that a draft model can propose, where they are fewer.
        embedding_count: all-reduces of the embedding, 0 where SGLang keeps the whole table on
            every GPU.
        has_sharded_fc: a draft whose input layer is split over the ranks and gathered.
        source: the file it was read from, or a name.
    """

    architecture: str
    model_type: str
    hidden_size: int
    layer_count: int
    vocab_size: int | None = None
    dtype_bytes: int = 2
    dtype: str = "bfloat16"
    source: str = ""
    embedding_count: int = 1
    draft_vocab_size: int | None = None
    has_sharded_fc: bool = False

    @property
    def pass_count(self) -> int:
        """All-reduces in one forward pass."""
        return 2 * self.layer_count + self.embedding_count

    def payload_bytes(self, rows: int) -> int:
        """Size of the all-reduce over this many rows of activations."""
        return rows * self.hidden_size * self.dtype_bytes

    def logits_bytes(self, rows: int, tp: int) -> int | None:
        """Bytes that each rank contributes to the gather of so many rows of logits.

        None where the vocabulary is not known, cannot be split over the ranks, or is whole on
        every rank.
        """
        width = self.draft_vocab_size or self.vocab_size
        if width is None or self.embedding_count == 0:
            return None
        padded = -(-width // VOCAB_PADDING) * VOCAB_PADDING
        return None if padded % tp else rows * padded // tp * self.dtype_bytes

    def fc_bytes(self, rows: int, tp: int) -> int | None:
        """Bytes that each rank contributes to the gather behind a draft's input layer.

        None where there is no such gather.
        """
        if not self.has_sharded_fc or self.hidden_size % tp:
            return None
        return rows * self.hidden_size // tp * self.dtype_bytes


KIMI_K25 = ModelShape(
    "KimiK25ForConditionalGeneration", "kimi_k25", 7168, 61, 163840, source="Kimi-K2.5"
)
"""The model of the default workload."""


@dataclass(frozen=True, slots=True)
class SpeculationShape:
    """How a launch decodes.

    With ``topk`` 1 SGLang takes ``num_steps + 1`` draft tokens, whatever was asked; so does this.

    Attributes:
        max_running_requests: None where the launch does not say: 48 under speculation.
        cuda_graph_max_bs: largest captured batch; None where the launch does not say.
        captured_sizes: captured batch sizes, where the launch lists them itself; empty where it
            captures none.
    """

    tp: int
    num_steps: int = 2
    topk: int = 1
    num_draft_tokens: int = 3
    max_running_requests: int | None = None
    cuda_graph_max_bs: int | None = None
    chunked_prefill_size: int = DEFAULT_CHUNKED_PREFILL_SIZE
    is_speculative: bool = True
    captured_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no launch can have."""
        names = ["tp", "chunked_prefill_size"]
        names += ["num_steps", "topk", "num_draft_tokens"] if self.is_speculative else []
        for name in names:
            require_positive(name.replace("_", "-"), getattr(self, name))
        for name in ("max_running_requests", "cuda_graph_max_bs"):
            if (value := getattr(self, name)) is not None:
                require_positive(name.replace("_", "-"), value)
        if self.is_speculative and self.topk == 1:
            object.__setattr__(self, "num_draft_tokens", self.num_steps + 1)

    @property
    def rows_per_request(self) -> int:
        """Rows that one request brings to the target model's pass."""
        return self.num_draft_tokens if self.is_speculative else 1

    @property
    def running_limit(self) -> int | None:
        """Most requests that run at once; None where only memory limits them."""
        if self.max_running_requests is None and self.is_speculative:
            return SPECULATIVE_MAX_RUNNING_REQUESTS
        return self.max_running_requests

    @property
    def captured(self) -> tuple[int, ...]:
        """Batch sizes that SGLang captures as CUDA graphs, ascending."""
        limit = self.running_limit
        if self.captured_sizes is not None:
            listed = self.captured_sizes
            if limit is not None and listed and max(listed) > limit:
                listed = (*listed, limit)
            return tuple(sorted({size for size in listed if limit is None or size <= limit}))
        # SGLang's default on GPUs of 60 GB and more.
        max_bs = self.cuda_graph_max_bs or (512 if self.tp >= 4 else 256)
        max_bs = max_bs if limit is None else min(max_bs, limit)
        return captured_batch_sizes(max_bs, is_speculative=self.is_speculative)


def captured_batch_sizes(max_bs: int, *, is_speculative: bool = True) -> tuple[int, ...]:
    """List the batch sizes up to ``max_bs`` that SGLang captures; ``max_bs`` itself always is one.

    >>> captured_batch_sizes(11)
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)
    """
    require_positive("cuda-graph-max-bs", max_bs)
    if is_speculative:
        steps = ((1, 9, 1), (10, 33, 2), (40, 65, 4), (72, 257, 8), (272, max_bs + 1, 16))
    else:
        steps = ((1, 3, 1), (4, 13, 4), (16, 257, 8), (272, 512, 16), (512, max_bs + 1, 32))
    sizes = {size for step in steps for size in range(*step) if size <= max_bs}
    return tuple(sorted(sizes | {max_bs}))


def padded_batch_size(size: int, captured: Sequence[int]) -> int:
    """Round up to the next captured batch size; above the largest SGLang runs eagerly, unpadded."""
    return min((step for step in captured if step >= size), default=size)


def require_positive(name: str, value: object) -> None:
    """Refuse anything but a whole number above zero; ``name`` is what the operator calls it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageProblem(f"{name} {value}: must be a whole number of 1 or more", code="bad_value")
