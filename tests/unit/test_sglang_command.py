from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.errors import FileError, UsageProblem
from nccltune.payloads.shapes import KIMI_K25, ModelShape
from nccltune.sglang.command import (
    LaunchCommand,
    parse_launch,
    payload_doubts,
    speculation_shape,
)
from nccltune.sglang.flags import canonical_name, read_flags

LLAMA = ModelShape("LlamaForCausalLM", "llama", 8192, 80)
MODULE = "python -m sglang.launch_server"
REFERENCE = (
    f"{MODULE} --model-path moonshotai/Kimi-K2.5 --tp 8 --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path /models/draft --speculative-num-steps 2 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 3 --mem-fraction-static 0.85 "
    "--trust-remote-code --disable-custom-all-reduce --num-continuous-decode-steps 4"
)


def launch(text: str) -> LaunchCommand:
    return parse_launch(text.split())


# --- recognising a launch


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang.launch_server --model m --tp 4",
        "python3.12 -u -m sglang.launch_server --model m --tp 4",
        "/opt/venv/bin/python3 -X dev -m sglang.launch_server --model m --tp 4",
        "python -msglang.launch_server --model m --tp 4",
        "python /usr/lib/python3/site-packages/sglang/launch_server.py --model m --tp 4",
        "sglang serve m --tp 4",
        "/usr/local/bin/sglang serve --model-path m --tp 4",
        "sglang serve --model-type llm m --tp 4",
        "sglang serve m --model-type=llm --tp 4",
        "env A=B python -m sglang.launch_server --model m --tp 4",
        "numactl --cpunodebind=0 --membind=0 python -m sglang.launch_server --model m --tp 4",
        "env A=B numactl -N 0 sglang serve m --tp 4",
        "bash wrapper.sh python -m sglang.launch_server --model m --tp 4",
        "uv run python -m sglang.launch_server --model m --tp 4",
    ],
)
def test_parse_launch_recognises(text: str) -> None:
    command = launch(text)

    assert (command.model_path, command.tp_size) == ("m", 4)
    assert command.argv == tuple(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "python train.py",
        "sglang",
        "sglang generate --model m",
        "vllm serve m",
        "python -m sglang.bench_serving",
        "-m sglang.launch_server",
        "sleep 5",
    ],
)
def test_parse_launch_of_something_else_says_what_was_expected(text: str) -> None:
    with pytest.raises(
        UsageProblem, match=r"not an SGLang launch.*sglang\.launch_server"
    ) as caught:
        launch(text)

    assert caught.value.code == "not_sglang"


def test_parse_launch_of_shell_script_asks_for_the_command_itself() -> None:
    with pytest.raises(UsageProblem, match="a shell hides its flags"):
        parse_launch(["bash", "-lc", "python -m sglang.launch_server --tp 8"])


@pytest.mark.parametrize("option", ["-S", "-vS", "-iS", "--split-string", "--split"])
def test_parse_launch_behind_words_that_env_splits_asks_for_them(option: str) -> None:
    for argv in (
        ["env", option, "sglang serve --tp 8"],
        ["env", option, "A=1", *MODULE.split(), "--model", "m"],
        ["nice", "env", f"{option}=x" if option.startswith("--") else f"{option}x", "sglang"],
    ):
        with pytest.raises(UsageProblem, match="env -S hides its words") as caught:
            parse_launch(argv)
        assert caught.value.code == "not_sglang"


def test_parse_launch_with_bare_assignment_says_how_to_set_it() -> None:
    with pytest.raises(UsageProblem, match="env NCCL_ALGO=Ring"):
        launch(f"NCCL_ALGO=Ring {MODULE} --model m")


@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [
        ("env A=1 B=x=y", {"A": "1", "B": "x=y"}),
        ("/usr/bin/env -i -u HOME A=1", {"A": "1"}),
        ("env A=1 B=2 env -u A C=3", {"B": "2", "C": "3"}),
        ("env A=1 env -vi B=2", {"B": "2"}),
        ("env --uns A B=2", {"B": "2"}),
        ("env -- A=1", {"A": "1"}),
        ("env - A=1", {"A": "1"}),
        ("env A=1 env A=2 B=3", {"A": "2", "B": "3"}),
        ("nice -n 5 env EMPTY=", {"EMPTY": ""}),
        ("env A=1 numactl NOT=taken", {"A": "1"}),
        ("numactl --membind=0", {}),
    ],
)
def test_parse_launch_collects_assignments_of_env(wrapper: str, expected: dict[str, str]) -> None:
    assert launch(f"{wrapper} {MODULE} --model m").environment == expected


# --- flags


def test_parse_launch_of_reference_reads_everything() -> None:
    command = launch(REFERENCE)

    assert command.model_path == "moonshotai/Kimi-K2.5"
    assert command.draft_model_path == "/models/draft"
    assert (command.tp_size, command.nnodes, command.node_rank) == (8, 1, 0)
    assert (command.num_steps, command.eagle_topk, command.num_draft_tokens) == (2, 1, 3)
    assert command.is_eagle3_launch
    assert command.is_eagle_launch
    assert command.has("disable_custom_all_reduce")
    assert command.value("mem_fraction_static") == "0.85"
    assert command.flags["trust_remote_code"] == ()
    assert not command.has_dp_attention


def test_parse_launch_without_flags_has_sglangs_defaults() -> None:
    command = launch(MODULE)

    assert command.model_path is None
    assert (command.tp_size, command.pp_size, command.dp_size, command.nnodes) == (1, 1, 1, 1)
    assert not command.is_speculative
    assert command.chunked_prefill_size is None


@pytest.mark.parametrize(
    "spelled", ["--tp 8", "--tp=8", "--tp-size 8", "--tp-size=8", "--tensor-parallel-size 8"]
)
def test_parse_launch_takes_every_spelling_of_tp(spelled: str) -> None:
    assert launch(f"{MODULE} --model m {spelled}").tp_size == 8


@pytest.mark.parametrize(
    "spelled", ["--model m", "--model-path m", "--model-path=m", "--model=m", "--model-pa m"]
)
def test_parse_launch_takes_every_spelling_of_model(spelled: str) -> None:
    assert launch(f"{MODULE} {spelled}").model_path == "m"


@pytest.mark.parametrize("flag", ["--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"])
def test_parse_launch_takes_old_and_new_graph_limit(flag: str) -> None:
    assert launch(f"{MODULE} {flag} 16").cuda_graph_max_bs == 16


@pytest.mark.parametrize("flag", ["--cuda-graph-bs", "--cuda-graph-bs-decode"])
def test_parse_launch_takes_old_and_new_list_of_graphs(flag: str) -> None:
    assert launch(f"{MODULE} {flag} 1 2 4 --tp 8").cuda_graph_sizes == (1, 2, 4)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "eagle3"])
def test_parse_launch_takes_a_unique_beginning_of_a_flag(algorithm: str) -> None:
    assert launch(f"{MODULE} --speculative-algo {algorithm}").speculative_algorithm == "EAGLE3"


def test_parse_launch_with_repeated_flag_takes_the_last() -> None:
    assert launch(f"{MODULE} --tp 4 --tp-size 8").tp_size == 8


def test_parse_launch_with_negative_value_takes_it_as_value() -> None:
    assert launch(f"{MODULE} --chunked-prefill-size -1").chunked_prefill_size == -1


@pytest.mark.parametrize(
    ("flags", "width", "replicas"),
    [
        ("--attn-dp-size 4", 4, 1),
        ("--enable-dp-attention --dp-size 4", 4, 1),
        ("--dp 4", 1, 4),
        ("--enable-dp-attention", 1, 1),
    ],
)
def test_parse_launch_tells_data_parallel_attention_from_replicas(
    flags: str, width: int, replicas: int
) -> None:
    command = launch(f"{MODULE} --tp 8 {flags}")

    assert (command.attn_dp_size, command.dp_size) == (width, replicas)
    assert command.has_dp_attention == (width > 1)


@pytest.mark.parametrize("flag", ["--enable-deterministic-inference", "--rl-on-policy-target fsdp"])
def test_parse_launch_sees_deterministic_inference(flag: str) -> None:
    assert launch(f"{MODULE} --tp 8 {flag}").is_deterministic


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--tp 0", "--tp-size 0: must be 1 or more"),
        ("--tp -8", "--tp-size -8: must be 1 or more"),
        ("--tp 8x", "'8x' is not a whole number"),
        ("--tp 4M", "'4M' is not a whole number"),
        ("--tp", "--tp-size: takes one value"),
        ("--tp=", "takes one value"),
        ("--tp 4 8", "--tp-size 4 8: takes one value"),
        ("--nnodes 0", "--nnodes 0"),
        ("--node-rank -1", "--node-rank -1: must be 0 or more"),
        ("--dp-size 0", "--dp-size 0"),
        ("--chunked-prefill-size -2", "must be -1 or more"),
        ("--max-running-requests 0", "--max-running-requests 0"),
        ("--cuda-graph-max-bs 0", "--cuda-graph-max-bs-decode 0"),
        ("--cuda-graph-bs", "takes at least one value"),
        ("stray", "'stray' in the launch command belongs to no flag"),
        ("--tp=4 8", "'8' in the launch command belongs to no flag"),
    ],
)
def test_parse_launch_with_impossible_flag_names_it(flags: str, complaint: str) -> None:
    with pytest.raises(UsageProblem, match=complaint):
        launch(f"{MODULE} {flags}")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--speculative-eagle-topk 1", "needs --speculative-num-steps"),
        ("--speculative-num-draft-tokens 3", "needs --speculative-num-steps"),
        ("--speculative-num-steps 2", "needs --speculative-eagle-topk"),
        ("--speculative-num-steps 2 --speculative-eagle-topk 4", "needs --speculative-num-draft"),
        ("--speculative-num-steps 0 --speculative-eagle-topk 1", "must be 1 or more"),
    ],
)
def test_parse_launch_with_half_a_speculation_is_refused(flags: str, complaint: str) -> None:
    with pytest.raises(UsageProblem, match=complaint):
        launch(f"{MODULE} --speculative-algorithm EAGLE3 {flags}")


def test_canonical_name_of_ambiguous_beginning_stays() -> None:
    assert canonical_name("speculative-num") == "speculative_num"


def test_read_flags_of_single_dash_option_takes_no_value() -> None:
    assert read_flags(["--tp", "8", "-h"]).values == {"tp_size": ("8",)}


# --- config file


def config(tmp_path: Path, text: str, name: str = "serve.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_parse_launch_reads_config_file(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "model-path: m\ntensor_parallel_size: 8\ncuda-graph-bs: [1, 2]\n"
        "disable-custom-all-reduce: true\nenable-symm-mem: false\n"
        'json-model-override-args: {"a": 1}\nspeculative_algorithm: EAGLE3\n',
    )

    command = launch(f"{MODULE} --config {path}")

    assert (command.model_path, command.tp_size, command.cuda_graph_sizes) == ("m", 8, (1, 2))
    assert command.has("disable_custom_all_reduce")
    assert not command.has("enable_symm_mem")
    assert command.value("json_model_override_args") == '{"a": 1}'
    assert command.is_eagle3_launch


def test_parse_launch_command_line_beats_config_file(tmp_path: Path) -> None:
    path = config(tmp_path, "tp-size: 2\nmodel: a\n")

    command = launch(f"{MODULE} --tp 8 --config {path}")

    assert (command.tp_size, command.model_path) == (8, "a")


def test_parse_launch_of_serve_with_config_takes_the_model_first(tmp_path: Path) -> None:
    path = config(tmp_path, "model-path: a\n", "serve.yml")

    assert launch(f"sglang serve b --config {path}").model_path == "b"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_parse_launch_with_empty_config_file_changes_nothing(tmp_path: Path, text: str) -> None:
    assert launch(f"{MODULE} --tp 8 --config {config(tmp_path, text)}").tp_size == 8


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("tp-size: 8\nmodel-path: [a\n", 3, "not YAML"),
        ("tp-size: 8\n\tmodel: a\n", 2, "not YAML.*model: a"),
        ("- tp-size\n- 8\n", 1, "not a mapping.*tp-size"),
        ("model-path: a\ntp-size: eight\n", 2, "'eight' is not a whole number.*tp-size: eight"),
        ("# two\n# lines\ntp: 0\n", 3, "must be 1 or more.*tp: 0"),
        ("tp-size:\n", 1, "tp-size has no value"),
        ("8: tp-size\n", 1, "'8' is not the name of a flag"),
    ],
    ids=["cut", "tab", "list", "word", "zero", "none", "number"],
)
def test_parse_launch_with_bad_config_file_names_line_and_text(
    tmp_path: Path, text: str, line: int, complaint: str
) -> None:
    path = config(tmp_path, text)

    with pytest.raises(FileError, match=complaint) as caught:
        launch(f"{MODULE} --config {path}")

    assert caught.value.line == line
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\ntp: 2\n", "anchors and aliases"),
        ("<<: &a {tp: 2}\n", "anchors and aliases"),
        ("tp: *a\n", "anchors and aliases"),
        (f"model-path: {'[' * 5000}\n", "not YAML"),
        (f"tp: {'9' * 5000}\n", "not YAML|no value of a flag"),
        ("tp: " + ":".join(["59"] * 3000) + "\n", "not YAML|no value of a flag"),
        ("tp: {a: 2026-11-29}\n", "no value of a flag"),
        ("tp: !!set {a, b}\n", "not a whole number"),
        ("? [a, b]\n: c\n", "not YAML"),
        ("a: b\n" * 20_000, "larger than 64 KiB"),
    ],
    ids=[
        *("bomb", "merged", "alias", "deep", "digits", "sexagesimal"),
        *("date", "set", "key", "large"),
    ],
)
def test_parse_launch_refuses_config_files_that_cost_more_than_they_say(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(FileError, match=complaint):
        launch(f"{MODULE} --config {config(tmp_path, text)}")


def test_parse_launch_with_missing_config_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.yaml: --config cannot be read: No such file"):
        launch(f"{MODULE} --config {tmp_path}/gone.yaml")


def test_parse_launch_with_config_of_other_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"only \.yaml and \.yml"):
        launch(f"{MODULE} --config {config(tmp_path, '{}', 'serve.json')}")


def test_parse_launch_with_two_config_files_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path, "tp: 8\n")

    with pytest.raises(UsageProblem, match="one config file"):
        launch(f"{MODULE} --config {path} --config {path}")


def test_parse_launch_with_joined_config_says_sglang_ignores_it(tmp_path: Path) -> None:
    path = config(tmp_path, "tp: 8\n")

    with pytest.raises(UsageProblem, match=f"write --config {path}"):
        launch(f"{MODULE} --config={path}")


# --- how it decodes


def test_speculation_shape_of_reference_is_2_1_3() -> None:
    shape = speculation_shape(launch(REFERENCE), KIMI_K25)

    assert (shape.tp, shape.num_steps, shape.topk, shape.num_draft_tokens) == (8, 2, 1, 3)
    assert shape.is_speculative
    assert (shape.captured[-1], len(shape.captured)) == (48, 23)
    assert shape.chunked_prefill_size == 8192


def test_speculation_shape_with_topk_1_corrects_draft_tokens() -> None:
    text = "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 9"

    shape = speculation_shape(launch(f"{MODULE} --speculative-algorithm EAGLE3 {text}"), KIMI_K25)

    assert shape.num_draft_tokens == 3


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (5, 4, 8)),
        ("Grok1ForCausalLM", (5, 4, 8)),
        ("KimiK25ForConditionalGeneration", (3, 1, 4)),
        ("DeepseekV3ForCausalLM", (3, 1, 4)),
        ("Qwen3ForCausalLM", (3, 1, 4)),
    ],
)
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN"])
def test_speculation_shape_left_open_is_sglangs_choice(
    architecture: str, expected: tuple[int, int, int], algorithm: str
) -> None:
    model = ModelShape(architecture, "", 4096, 32)

    shape = speculation_shape(launch(f"{MODULE} --tp 2 --speculative-algorithm {algorithm}"), model)

    assert (shape.num_steps, shape.topk, shape.num_draft_tokens) == expected


def test_speculation_shape_left_open_without_model_is_refused() -> None:
    with pytest.raises(UsageProblem, match="by the model, which is not known"):
        speculation_shape(launch(f"{MODULE} --speculative-algorithm EAGLE3"), None)


def test_speculation_shape_with_all_numbers_needs_no_model() -> None:
    assert speculation_shape(launch(REFERENCE), None).num_steps == 2


def test_speculation_shape_without_speculation_is_plain() -> None:
    shape = speculation_shape(launch(f"{MODULE} --tp 4"), LLAMA)

    assert not shape.is_speculative
    assert shape.rows_per_request == 1
    assert shape.captured[-1] == 512


@pytest.mark.parametrize("algorithm", ["NGRAM", "DFLASH", "STANDALONE", "MY_OWN"])
def test_speculation_shape_of_other_algorithm_advises_payload(algorithm: str) -> None:
    with pytest.raises(UsageProblem, match=f"{algorithm}.*give --payload"):
        speculation_shape(launch(f"{MODULE} --speculative-algorithm {algorithm}"), LLAMA)


def test_speculation_shape_of_open_adaptive_speculation_is_refused() -> None:
    text = f"{MODULE} --speculative-algorithm EAGLE3 --speculative-adaptive"

    with pytest.raises(UsageProblem, match="--speculative-adaptive without"):
        speculation_shape(launch(text), LLAMA)


@pytest.mark.parametrize(
    ("flags", "chunk"),
    [
        ("", 8192),
        ("--chunked-prefill-size 4096", 4096),
        ("--chunked-prefill-size -1", 16384),
        ("--chunked-prefill-size -1 --max-prefill-tokens 2000", 2000),
    ],
)
def test_speculation_shape_knows_the_prefill_chunk(flags: str, chunk: int) -> None:
    assert speculation_shape(launch(f"{MODULE} {flags}"), LLAMA).chunked_prefill_size == chunk


@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ("--cuda-graph-max-bs 4", (1, 2, 3, 4)),
        ("--cuda-graph-bs 8 2", (2, 8)),
        ("--max-running-requests 2", (1, 2)),
        ("--max-running-requests 9", (*range(1, 9), 9)),
        ("--disable-cuda-graph", ()),
        ("--cuda-graph-backend-decode disabled", ()),
        ("--disable-cuda-graph-padding --max-running-requests 11", tuple(range(1, 12))),
    ],
)
def test_speculation_shape_knows_the_captured_sizes(flags: str, captured: tuple[int, ...]) -> None:
    assert speculation_shape(launch(f"{REFERENCE} {flags}"), KIMI_K25).captured == captured


# --- doubts


def test_payload_doubts_of_reference_are_none() -> None:
    assert payload_doubts(launch(REFERENCE)) == ()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{MODULE} --pp 2", "stage"),
        (f"{MODULE} --tp 8 --attn-dp-size 8", "gathers"),
        (f"{MODULE} --dcp-size 2", "--dcp-size 2"),
        (f"{MODULE} --moe-a2a-backend deepep", "deepep"),
        (f"{MODULE} --speculative-adaptive", "changes"),
        (f"{MODULE} --cuda-graph-config {{}}", "not read"),
        (f"env SGLANG_ENABLE_EMBED_REPLICATION=true {MODULE}", "one all-reduce fewer"),
    ],
)
def test_payload_doubts_name_what_changes_the_counts(text: str, word: str) -> None:
    (doubt,) = payload_doubts(launch(text))

    assert word in doubt


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ("--speculativ-num-steps", "--speculative-num-steps"),
        ("--modle-path", "--model-path"),
        ("--speculative-num-draft-token-s", "--speculative-num-draft-tokens"),
    ],
)
def test_flag_that_is_nearly_one_that_counts_is_doubted(spelled: str, meant: str) -> None:
    command = parse_launch(["sglang", "serve", "--model-path", "m", spelled, "4"])

    assert f"{spelled}: not read here; did you mean {meant}?" in payload_doubts(command)


def test_flags_that_only_sglang_reads_are_not_doubted() -> None:
    others = ["--port", "30000", "--mem-fraction-static", "0.9", "--max-queued-requests", "9"]
    others += ["--speculative-draft-model-revision", "x", "--cuda-graph-max-bs-prefill", "8"]

    assert payload_doubts(parse_launch(["sglang", "serve", "--model-path", "m", *others])) == ()
