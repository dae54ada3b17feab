from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import replace

import pytest

from nccltune.errors import UsageProblem
from nccltune.payloads.derive import (
    DEFAULT_GUARDS,
    Batch,
    Gather,
    Guard,
    ModelShape,
    Payload,
    SpeculationShape,
    Workload,
    captured_batch_sizes,
    default_workload,
    parse_batch_option,
    parse_payload_option,
    payload_rows,
    uses,
    uses_from_options,
    workload_from_model,
    workload_from_payloads,
)
from nccltune.payloads.shapes import KIMI_K25, padded_batch_size

# "1-8 step 1, 10-32 step 2, 40-64 step 4, ...", cut at 48 running requests: 23 sizes.
CAPTURED_UP_TO_48 = (*range(1, 9), *range(10, 33, 2), 40, 44, 48)
LLAMA_70B = ModelShape("LlamaForCausalLM", "llama", 8192, 80)


def two_steps(**changes: int) -> SpeculationShape:
    return replace(SpeculationShape(tp=8), **changes)  # type: ignore[arg-type]


def sizes(payloads: tuple[Payload, ...]) -> list[int]:
    return [payload.size_bytes for payload in payloads]


# --- captured batch sizes


def test_captured_batch_sizes_at_48_requests_are_sglangs_23() -> None:
    assert captured_batch_sizes(48) == CAPTURED_UP_TO_48
    assert len(CAPTURED_UP_TO_48) == 23


def test_captured_batch_sizes_with_limit_between_steps_include_the_limit() -> None:
    assert captured_batch_sizes(33)[-2:] == (32, 33)


def test_captured_batch_sizes_above_256_go_in_steps_of_16() -> None:
    assert captured_batch_sizes(300)[-4:] == (256, 272, 288, 300)


def test_captured_batch_sizes_without_speculation_are_coarser() -> None:
    assert captured_batch_sizes(33, is_speculative=False) == (1, 2, 4, 8, 12, 16, 24, 32, 33)


@pytest.mark.parametrize(("size", "padded"), [(1, 1), (8, 8), (9, 10), (33, 40), (45, 48)])
def test_padded_batch_size_rounds_up_to_captured(size: int, padded: int) -> None:
    assert padded_batch_size(size, CAPTURED_UP_TO_48) == padded


def test_padded_batch_size_above_largest_captured_stays() -> None:
    assert padded_batch_size(49, CAPTURED_UP_TO_48) == 49


def test_captured_without_flags_is_cut_at_48_running_requests() -> None:
    assert two_steps().captured == CAPTURED_UP_TO_48


def test_captured_listed_by_launch_is_cut_at_running_requests() -> None:
    shape = SpeculationShape(tp=8, max_running_requests=10, captured_sizes=(16, 4, 1, 8))

    assert shape.captured == (1, 4, 8, 10)


def test_captured_without_speculation_has_sglangs_default_maximum() -> None:
    assert SpeculationShape(tp=8, is_speculative=False).captured[-1] == 512
    assert SpeculationShape(tp=2, is_speculative=False).captured[-1] == 256


# --- shapes


def test_model_shape_of_kimi_makes_123_all_reduces_a_pass() -> None:
    assert KIMI_K25.pass_count == 123


def test_speculation_shape_with_topk_1_forces_steps_plus_one_tokens() -> None:
    assert SpeculationShape(tp=8, num_steps=5, topk=1, num_draft_tokens=9).num_draft_tokens == 6


def test_speculation_shape_with_wider_topk_keeps_its_tokens() -> None:
    assert SpeculationShape(tp=8, num_steps=5, topk=4, num_draft_tokens=8).num_draft_tokens == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 0},
        {"tp": -8},
        {"num_steps": 0},
        {"topk": 0},
        {"num_draft_tokens": 0, "topk": 2},
        {"max_running_requests": 0},
        {"cuda_graph_max_bs": -1},
        {"chunked_prefill_size": 0},
    ],
    ids=str,
)
def test_speculation_shape_with_impossible_number_names_it(changes: dict[str, int]) -> None:
    name, value = next(iter(changes.items()))

    with pytest.raises(UsageProblem, match=f"{name.replace('_', '-')} {value}"):
        two_steps(**changes)


# --- default workload


def test_default_workload_is_as_documented() -> None:
    workload = default_workload()

    assert uses(workload) == {1: 4.0, 2: 2.0, 4: 1.0, 8: 1.0}
    scored = [workload.scored(batch) for batch in workload.batches]
    assert [sizes(payloads) for payloads in scored] == [[43008], [86016], [172032], [344064]]
    assert {payload.count for payloads in scored for payload in payloads} == {126}
    assert {payload.graph_count for payloads in scored for payload in payloads} == {123}


def test_default_workload_guards_are_exactly_three() -> None:
    assert [(one.size_bytes, one.graph_count, one.origin) for one in default_workload().guards] == [
        (14336, 123, "draft_step"),
        (1376256, 123, "verify"),
        (67108864, 4, "prefill"),
    ]


def test_default_workload_first_batch_has_verify_extend_and_one_draft_step() -> None:
    assert default_workload().batches[0] == Batch(
        size=1,
        padded_size=1,
        use=4.0,
        payloads=(
            Payload(43008, 126, 123, "verify+draft_extend"),
            Payload(14336, 3, 123, "draft_step"),
        ),
        gathers=(Gather(122880, 2, "verify+draft_extend"), Gather(40960, 1, "draft_step")),
    )


def test_default_workload_with_own_batches_keeps_guards_that_are_not_scored() -> None:
    workload = default_workload({32: 1.0})

    assert sizes(workload.scored(workload.batches[0])) == [1376256]
    assert [guard.size_bytes for guard in workload.guards] == [14336, 67108864]


def test_default_workload_equals_the_derived_one_but_for_its_fixed_guards() -> None:
    derived = workload_from_model(KIMI_K25, two_steps())

    assert derived.batches == default_workload().batches


# --- derived workloads


@pytest.mark.parametrize(
    ("batch", "size_bytes"),
    [
        (1, 43008),
        (2, 86016),
        (4, 172032),
        (8, 344064),
        (16, 688128),
        (32, 1376256),
        (48, 2064384),
    ],
)
def test_workload_from_model_of_kimi_has_known_verify_sizes(batch: int, size_bytes: int) -> None:
    workload = workload_from_model(KIMI_K25, two_steps(), {batch: 1.0})

    assert workload.batches[0].payloads[0].size_bytes == size_bytes


def test_workload_from_model_of_llama_70b_starts_at_49152_bytes() -> None:
    workload = workload_from_model(LLAMA_70B, two_steps(), {1: 1.0})

    assert workload.batches[0].payloads[0] == Payload(49152, 164, 161, "verify+draft_extend")


def test_workload_from_model_pads_to_the_captured_batch() -> None:
    batch = workload_from_model(KIMI_K25, two_steps(), {9: 1.0}).batches[0]

    assert (batch.size, batch.padded_size) == (9, 10)
    assert batch.payloads[0].size_bytes == 10 * 3 * 7168 * 2


def test_workload_from_model_above_the_graphs_does_not_pad() -> None:
    launch = two_steps(cuda_graph_max_bs=8)

    assert workload_from_model(KIMI_K25, launch, {9: 1.0}).batches[0].padded_size == 9


def test_workload_from_model_without_speculation_has_one_row_a_request() -> None:
    launch = SpeculationShape(tp=8, is_speculative=False)

    workload = workload_from_model(KIMI_K25, launch, {3: 1.0})

    assert workload.batches[0].payloads == (Payload(4 * 7168 * 2, 123, 123, "decode"),)
    assert [guard.origin for guard in workload.guards] == ["decode", "prefill"]


def test_workload_from_model_with_one_step_has_no_draft_step() -> None:
    workload = workload_from_model(KIMI_K25, two_steps(num_steps=1), {1: 1.0})

    assert [one.origin for one in workload.batches[0].payloads] == ["verify+draft_extend"]
    assert [guard.origin for guard in workload.guards] == ["verify", "prefill"]


def test_workload_from_model_with_many_steps_scores_the_draft_steps() -> None:
    workload = workload_from_model(KIMI_K25, two_steps(num_steps=5), {1: 1.0})

    assert [(one.size_bytes, one.count) for one in workload.scored(workload.batches[0])] == [
        (86016, 126),
        (14336, 12),
    ]
    assert 14336 not in [guard.size_bytes for guard in workload.guards]


def test_workload_from_model_with_equal_draft_rows_merges_all_passes() -> None:
    launch = SpeculationShape(tp=8, num_steps=3, topk=4, num_draft_tokens=4)

    workload = workload_from_model(KIMI_K25, launch, {1: 1.0})

    assert workload.batches[0].payloads == (
        Payload(4 * 7168 * 2, 123 + 3 + 6, 123, "verify+draft_extend+draft_step"),
    )


def test_workload_from_model_with_narrower_draft_keeps_its_sizes_apart() -> None:
    draft = ModelShape("LlamaForCausalLMEagle3", "llama", 6144, 1)

    workload = workload_from_model(LLAMA_70B, two_steps(), {1: 1.0}, draft=draft)

    assert [(one.size_bytes, one.count, one.origin) for one in workload.batches[0].payloads] == [
        (3 * 8192 * 2, 161, "verify"),
        (3 * 6144 * 2, 3, "draft_extend"),
        (6144 * 2, 3, "draft_step"),
    ]


def test_workload_from_model_guards_smallest_draft_largest_verify_and_prefill() -> None:
    workload = workload_from_model(KIMI_K25, two_steps(chunked_prefill_size=8192))

    assert workload.guards == (
        Guard(14336, 123, "draft_step"),
        Guard(2064384, 123, "verify"),
        Guard(8192 * 7168 * 2, 4, "prefill"),
    )


def test_workload_from_model_at_32_requests_guards_the_documented_verify_size() -> None:
    workload = workload_from_model(KIMI_K25, two_steps(max_running_requests=32))

    assert workload.guards[1] == Guard(1376256, 123, "verify")


def test_workload_from_model_with_largest_batch_scored_guards_the_next_one() -> None:
    workload = workload_from_model(KIMI_K25, two_steps(max_running_requests=8))

    assert workload.guards[1].size_bytes == 7 * 3 * 7168 * 2


def test_workload_from_model_without_graphs_still_guards_the_largest_verify() -> None:
    launch = SpeculationShape(tp=8, captured_sizes=())

    workload = workload_from_model(KIMI_K25, launch, {9: 1.0})

    assert workload.batches[0].padded_size == 9
    assert workload.guards[1].size_bytes == 2064384


def test_workload_from_model_default_uses_stop_at_the_running_requests() -> None:
    assert uses(workload_from_model(KIMI_K25, two_steps(max_running_requests=3))) == {1: 4, 2: 2}


def test_workload_from_model_with_batch_above_running_requests_is_refused() -> None:
    with pytest.raises(UsageProblem, match="batch size 64: this launch runs at most 48"):
        workload_from_model(KIMI_K25, two_steps(), {64: 1.0})


def test_workload_from_model_with_one_gpu_is_refused() -> None:
    with pytest.raises(UsageProblem, match="tensor parallel size 1 makes no all-reduce"):
        workload_from_model(KIMI_K25, two_steps(tp=1))


@pytest.mark.parametrize(
    "given", [{0: 1.0}, {-1: 1.0}, {1: 0.0}, {1: -2.0}, {1: float("nan")}, {1: float("inf")}, {}]
)
def test_workload_from_model_with_impossible_use_is_refused(given: dict[int, float]) -> None:
    with pytest.raises(UsageProblem, match="batch"):
        workload_from_model(KIMI_K25, two_steps(), given)


def count_by_walking(
    layers: int, hidden: int, steps: int, topk: int, tokens: int, padded: int
) -> Counter[int]:
    """Walk one decode step all-reduce by all-reduce, as the model code does."""
    found: Counter[int] = Counter()

    def forward(rows: int, layer_count: int) -> None:
        found[rows * hidden * 2] += 1  # vocab-parallel embedding
        for _layer in range(layer_count):
            found[rows * hidden * 2] += 1  # attention output
            found[rows * hidden * 2] += 1  # MLP or experts

    forward(padded * tokens, layers)
    forward(padded * tokens, 1)
    for step in range(steps):
        if step > 0:  # the first tokens come out of the draft extend
            forward(padded * topk, 1)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_workload_from_model_counts_match_a_walk_through_the_decode_step(seed: int) -> None:
    dice = random.Random(seed)
    layers, hidden = dice.randint(1, 130), 8 * dice.randint(8, 2048)
    steps, topk = dice.randint(1, 7), dice.choice([1, 1, 2, 4, 8])
    tokens = steps + 1 if topk == 1 else dice.randint(2, 16)
    size = dice.randint(1, 48)
    shape = ModelShape("LlamaForCausalLM", "llama", hidden, layers)
    launch = SpeculationShape(tp=8, num_steps=steps, topk=topk, num_draft_tokens=tokens)

    batch = workload_from_model(shape, launch, {size: 1.0}).batches[0]

    padded = next(step for step in CAPTURED_UP_TO_48 if step >= size)
    expected = count_by_walking(layers, hidden, steps, topk, tokens, padded)
    assert batch.padded_size == padded
    assert {one.size_bytes: one.count for one in batch.payloads} == expected


@pytest.mark.parametrize("seed", range(30))
def test_workload_from_model_never_guards_what_it_scores(seed: int) -> None:
    dice = random.Random(seed)
    shape = ModelShape("LlamaForCausalLM", "llama", 1024, dice.randint(1, 80))
    launch = two_steps(num_steps=dice.randint(1, 5), max_running_requests=dice.randint(8, 200))

    workload = workload_from_model(shape, launch)

    guarded = [guard.size_bytes for guard in workload.guards]
    scored = {one.size_bytes for batch in workload.batches for one in workload.scored(batch)}
    assert not scored & set(guarded)
    assert guarded == sorted(set(guarded))


# --- all-gathers


def gathers_of(
    shape: ModelShape, launch: SpeculationShape, size: int = 1, draft: ModelShape | None = None
) -> tuple[Gather, ...]:
    return workload_from_model(shape, launch, {size: 1.0}, draft=draft).batches[0].gathers


def test_gathers_of_a_model_of_kimis_width_on_two_ranks() -> None:
    """Its vocabulary is small; the draft has none of its own."""
    shape = ModelShape("LlamaForCausalLM", "llama", 7168, 61, 32000)
    draft = ModelShape("LlamaForCausalLMEagle3", "llama", 7168, 1, 32000)

    assert gathers_of(shape, two_steps(tp=2), draft=draft) == (
        Gather(96000, 2, "verify+draft_extend"),
        Gather(32000, 1, "draft_step"),
    )


def test_gathers_of_a_draft_with_fewer_tokens_and_a_sharded_input() -> None:
    draft = ModelShape(
        "Eagle3DeepseekV2ForCausalLM",
        "kimi_k2",
        7168,
        1,
        163840,
        draft_vocab_size=32000,
        has_sharded_fc=True,
    )

    assert gathers_of(KIMI_K25, two_steps(num_steps=5), draft=draft) == (
        Gather(6 * 163840 // 8 * 2, 1, "verify"),
        Gather(6 * 32000 // 8 * 2, 1, "draft_extend"),
        Gather(6 * 7168 // 8 * 2, 1, "draft_fc"),
        Gather(32000 // 8 * 2, 4, "draft_step"),
    )


def test_gathers_of_padded_batches_have_their_padded_rows() -> None:
    """9 requests run as 10; the draft step has one row for each of the top 4."""
    launch = SpeculationShape(tp=8, num_steps=3, topk=4, num_draft_tokens=6)

    assert [(one.size_bytes, one.count) for one in gathers_of(KIMI_K25, launch, 9)] == [
        (10 * 6 * 40960, 2),
        (10 * 4 * 40960, 2),
    ]


def test_gathers_without_speculation_are_one_of_a_row_a_request() -> None:
    launch = SpeculationShape(tp=8, is_speculative=False)

    assert gathers_of(KIMI_K25, launch, 4) == (Gather(4 * 40960, 1, "decode"),)


def test_gathers_split_a_vocabulary_that_is_rounded_up() -> None:
    shape = ModelShape("LlamaForCausalLM", "llama", 4096, 32, 32001)

    assert gathers_of(shape, two_steps(tp=2))[0].size_bytes == 3 * 32064 // 2 * 2


@pytest.mark.parametrize(
    ("vocab_size", "embedding_count", "tp"), [(None, 1, 8), (32000, 1, 3), (32000, 0, 8)]
)
def test_gathers_that_are_not_known_are_left_out(
    vocab_size: int | None, embedding_count: int, tp: int
) -> None:
    shape = ModelShape(
        "LlamaForCausalLM", "llama", 4096, 32, vocab_size, embedding_count=embedding_count
    )

    assert gathers_of(shape, two_steps(tp=tp)) == ()


def test_gathers_of_a_draft_of_unknown_vocabulary_leave_those_of_the_target() -> None:
    draft = ModelShape("LlamaForCausalLMEagle3", "llama", 7168, 1)

    assert [one.origin for one in gathers_of(KIMI_K25, two_steps(), draft=draft)] == ["verify"]


@pytest.mark.parametrize("seed", range(30))
def test_gathers_are_one_for_each_forward_pass(seed: int) -> None:
    dice = random.Random(seed)
    steps, topk = dice.randint(1, 7), dice.choice([1, 2, 4])
    launch = SpeculationShape(
        tp=dice.choice([2, 4, 8]), num_steps=steps, topk=topk, num_draft_tokens=dice.randint(2, 16)
    )

    gathers = gathers_of(KIMI_K25, launch, dice.randint(1, 48))

    assert sum(one.count for one in gathers) == 1 + steps
    assert len({one.size_bytes for one in gathers}) == len(gathers)


def test_gathers_are_neither_scored_nor_guarded_nor_in_the_digest() -> None:
    workload = default_workload()
    without = dataclasses.replace(
        workload,
        batches=tuple(dataclasses.replace(batch, gathers=()) for batch in workload.batches),
    )

    assert workload.digest() == without.digest()
    assert payload_rows(workload) == payload_rows(without)
    # As stored studies and recordings have it.
    assert workload.digest() == "2c4186094cb0b044f9373d644dc1952de645cf740fe265e89c5d089169547137"


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_default_workload_differs_by_ranks_in_its_gathers_alone(tp: int) -> None:
    workload = default_workload(tp=tp)

    assert workload.digest() == default_workload().digest()
    assert workload.batches[0].gathers[0].size_bytes == 3 * 163840 // tp * 2


# --- given payloads


def test_workload_from_payloads_merges_equal_sizes() -> None:
    workload = workload_from_payloads([(43008, 100), (14336, 60), (43008, 26)])

    assert workload.batches[0].payloads == (
        Payload(14336, 60, 123, "given"),
        Payload(43008, 126, 123, "given"),
    )


def test_workload_from_payloads_turns_a_rare_one_into_a_guard() -> None:
    workload = workload_from_payloads([(43008, 126), (28672, 3)])

    assert sizes(workload.scored(workload.batches[0])) == [43008]
    assert Guard(28672, 123, "given") in workload.guards


def test_workload_from_payloads_keeps_the_default_guards_it_does_not_score() -> None:
    workload = workload_from_payloads([(14336, 1), (64 << 20, 1)])

    assert [guard.size_bytes for guard in workload.guards] == [1376256]
    assert DEFAULT_GUARDS[1] in workload.guards


def test_workload_from_payloads_gives_large_ones_a_short_graph() -> None:
    payloads = workload_from_payloads([((16 << 20) - 2, 5), (16 << 20, 5)]).batches[0].payloads

    assert [payload.graph_count for payload in payloads] == [123, 4]


def test_workload_from_payloads_with_many_equal_counts_scores_almost_all() -> None:
    workload = workload_from_payloads([(1024 * size, 1) for size in range(1, 101)])

    assert len(workload.scored(workload.batches[0])) == 98


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((0, 1), "payload bytes 0"),
        ((-4096, 1), "payload bytes -4096"),
        ((4097, 1), "payload bytes 4097: must be even"),
        ((4096, 0), "payload 4096: count 0"),
        ((4096, -3), "payload 4096: count -3"),
    ],
)
def test_workload_from_payloads_with_impossible_payload_names_it(
    given: tuple[int, int], complaint: str
) -> None:
    with pytest.raises(UsageProblem, match=complaint):
        workload_from_payloads([given])


def test_workload_from_payloads_with_none_is_refused() -> None:
    with pytest.raises(UsageProblem, match="no payload given"):
        workload_from_payloads([])


# --- options


@pytest.mark.parametrize(
    ("text", "expected"), [("1:4", (1, 4.0)), ("8:0.5", (8, 0.5)), ("16", (16, 1.0))]
)
def test_parse_batch_option_reads_size_and_use(text: str, expected: tuple[int, float]) -> None:
    assert parse_batch_option(text) == expected


@pytest.mark.parametrize("text", ["", "a:1", "1:b", "4M:1", "1:2:3", "1:", ":1", "0:1", "2:0"])
def test_parse_batch_option_with_bad_text_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match="batch"):
        parse_batch_option(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("43008:126", (43008, 126)), ("64KiB:3", (65536, 3)), ("64MiB:1", (64 << 20, 1))],
)
def test_parse_payload_option_reads_bytes_and_count(text: str, expected: tuple[int, int]) -> None:
    assert parse_payload_option(text) == expected


@pytest.mark.parametrize(
    "text", ["", "43008", "43008:", "43008:x", "43008:0", "43009:1", "0:1", "-2:1", "4Q:1", "x:1"]
)
def test_parse_payload_option_with_bad_text_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match="payload"):
        parse_payload_option(text)


def test_parse_payload_option_with_bare_m_says_what_to_write() -> None:
    with pytest.raises(UsageProblem, match=r"--payload 4M:1: .*MiB"):
        parse_payload_option("4M:1")


def test_uses_from_options_adds_up_equal_sizes() -> None:
    assert uses_from_options(["1:4", "8:1", "1:2"]) == {1: 6.0, 8: 1.0}


# --- table and digest


def test_payload_rows_of_default_workload_list_batches_then_guards() -> None:
    rows = payload_rows(default_workload())

    assert [(row.batch, row.size_bytes) for row in rows] == [
        (1, 43008), (1, 14336), (2, 86016), (2, 28672), (4, 172032), (4, 57344),
        (8, 344064), (8, 114688), (None, 1376256), (None, 67108864),
    ]  # fmt: skip
    assert [row.size_bytes for row in rows if row.is_guard] == [14336, 1376256, 67108864]
    assert [row.size_bytes for row in rows if row.is_scored] == [43008, 86016, 172032, 344064]


def test_payload_row_says_where_it_comes_from() -> None:
    row = payload_rows(default_workload())[0]

    assert (row.padded, row.count, row.origin) == (1, 126, "verify+draft_extend")


def test_digest_does_not_depend_on_names() -> None:
    workload = default_workload()
    renamed = Workload("other", workload.batches, workload.guards)

    assert renamed.digest() == workload.digest()
    assert len(workload.digest()) == 64


@pytest.mark.parametrize(
    "other",
    [
        default_workload({1: 4.0, 2: 2.0, 4: 1.0}),
        default_workload({1: 4.0, 2: 2.0, 4: 1.0, 8: 2.0}),
        workload_from_model(KIMI_K25, two_steps()),
        workload_from_payloads([(43008, 126)]),
    ],
    ids=["batch", "use", "guards", "payloads"],
)
def test_digest_changes_with_what_is_measured(other: Workload) -> None:
    assert other.digest() != default_workload().digest()
