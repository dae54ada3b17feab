from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccltune.doctor import Check, Status, examine
from nccltune.doctor.draft import capture_points, check_draft
from nccltune.errors import FileError, UsageProblem
from nccltune.profile import Profile
from nccltune.store import activate, save_candidate
from tests.support.doctor_hosts import (
    SERVER,
    DoctorHost,
    assert_status,
    doctor_host,
    launch_words,
    write_models,
)
from tests.support.fake_nvml import pcie_host

IDS = "eagle_aux_hidden_state_layer_ids"
KIMI = "KimiK25ForConditionalGeneration"
MIB = 1 << 20


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    return doctor_host(tmp_path / "root")


def use(settings: dict[str, str], **measured: object) -> None:
    save_candidate(Profile("mine", settings, measured=measured))
    activate("mine", reason="manual")


# The launch itself.


def test_checks_of_a_launch_are_skipped_without_one(host: DoctorHost) -> None:
    checks = host.look()

    names = ("all_reduce_path", "nccl_memory", "draft_layers", "profile_for_launch")
    assert {checks[name].status for name in names} == {Status.SKIP}


def test_launch_of_another_program_is_refused(host: DoctorHost) -> None:
    with pytest.raises(UsageProblem, match="not an SGLang launch"):
        host.look("vllm", "serve", "x")


def test_launch_with_a_broken_config_file_is_refused_with_its_line(
    host: DoctorHost, tmp_path: Path
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("tp-size: 8\nmodel-path: [\n")

    with pytest.raises(FileError, match=r"server\.yaml:"):
        host.look(*launch_words(tmp_path)[:3], "--config", str(path))


# What carries the sums.


def test_path_through_nccl_is_fine(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)

    assert_status(host.look(*launch_words(tmp_path))["all_reduce_path"], Status.OK, "NCCL carries")


def test_path_past_nccl_is_told_with_the_flag_that_changes_it(
    host: DoctorHost, tmp_path: Path
) -> None:
    write_models(tmp_path)
    words = [w for w in launch_words(tmp_path) if w != "--disable-custom-all-reduce"]

    check = host.look(*words)["all_reduce_path"]

    assert_status(check, Status.WARN, "do not reach", "custom", "--disable-custom-all-reduce")


def test_path_of_pcie_ipc_is_found_in_the_environment(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    host.nvml = pcie_host()
    host.environ["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] = "1"

    check = host.look(*launch_words(tmp_path))["all_reduce_path"]

    assert_status(check, Status.WARN, "PCIe-IPC", "unset SGLANG_ENABLE_PCIE_IPC_ALLREDUCE")


def test_path_of_an_older_sglang_is_its_own(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    host.nvml = pcie_host()
    host.environ["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] = "1"
    host.server = replace(SERVER, sglang_version="0.5.15.post1")

    assert host.look(*launch_words(tmp_path))["all_reduce_path"].status is Status.OK


def test_path_that_the_model_decides_says_that_it_cannot_be_read(
    host: DoctorHost, tmp_path: Path
) -> None:
    words = [w for w in launch_words(tmp_path) if not w.startswith("--enforce-disable")]

    check = host.look(*words)["all_reduce_path"]

    assert_status(check, Status.WARN, "may not carry", str(tmp_path / "target"))


# Memory.


def memory(host: DoctorHost, tmp_path: Path, *more: str) -> Check:
    write_models(tmp_path)
    return host.look(*launch_words(tmp_path, *more))["nccl_memory"]


def test_memory_that_was_measured_fits(host: DoctorHost, tmp_path: Path) -> None:
    use({"NCCL_MAX_CTAS": "8"}, memory_bytes_per_gpu=700 * MIB)

    check = memory(host, tmp_path, "--mem-fraction-static", "0.8")

    assert_status(check, Status.OK, "(as measured) 700 MiB", "0.8 leaves 28876 MiB")


def test_memory_that_leaves_sglang_too_little_is_told(host: DoctorHost, tmp_path: Path) -> None:
    use({"NCCL_MAX_CTAS": "8"}, memory_bytes_per_gpu=700 * MIB)

    check = memory(host, tmp_path, "--mem-fraction-static", "0.9", "--chunked-prefill-size", "8192")

    # 14438 MiB against 700 and 512 + 1.5 x 8192 + 2 x 48 + 8 x 128
    assert_status(check, Status.WARN, "13920 MiB for activations", "lower --mem-fraction-static")


def test_memory_that_is_not_there_is_a_failure(host: DoctorHost, tmp_path: Path) -> None:
    use({"NCCL_MAX_CTAS": "8"}, memory_bytes_per_gpu=2000 * MIB)

    check = memory(host, tmp_path, "--mem-fraction-static", "0.99")

    assert_status(check, Status.FAIL, "2000 MiB", "leaves 1443 MiB", "runs out of memory")


@pytest.mark.parametrize(
    ("baseline_mib", "said", "has_other_profile_as_fix"),
    [
        (200, "500 MiB more than under the defaults", True),
        (700, "no more than under the defaults", False),
        (900, "no more than under the defaults", False),
        (None, "under profile mine, and", True),
        ("much", "under profile mine, and", True),
    ],
)
def test_memory_is_set_beside_what_the_defaults_take_where_that_was_measured(
    host: DoctorHost,
    tmp_path: Path,
    baseline_mib: Any,
    said: str,
    has_other_profile_as_fix: bool,
) -> None:
    baseline = baseline_mib * MIB if isinstance(baseline_mib, int) else baseline_mib
    facts = {"memory_bytes_per_gpu": 700 * MIB, "memory_baseline_bytes_per_gpu": baseline}
    use({"NCCL_MAX_CTAS": "8"}, **facts)

    check = memory(host, tmp_path, "--mem-fraction-static", "0.99")

    assert_status(check, Status.WARN, "700 MiB", said)
    assert ("choose a profile" in check.fix) is has_other_profile_as_fix


def test_memory_of_large_buffers_is_reckoned_where_it_was_not_measured(
    host: DoctorHost, tmp_path: Path
) -> None:
    use({"NCCL_MAX_CTAS": "16", "NCCL_BUFFSIZE": "16777216"})

    check = memory(host, tmp_path, "--mem-fraction-static", "0.8")

    assert_status(check, Status.OK, "reckoned, not measured", "2034 MiB")


def test_memory_of_a_profile_without_channels_is_not_guessed(
    host: DoctorHost, tmp_path: Path
) -> None:
    use({"NCCL_PROTO": "allreduce:LL"})

    check = memory(host, tmp_path, "--mem-fraction-static", "0.8")

    assert_status(check, Status.SKIP, "was not measured")


def test_memory_where_sglang_chooses_the_fraction_is_said(host: DoctorHost, tmp_path: Path) -> None:
    use({"NCCL_MAX_CTAS": "8"}, memory_bytes_per_gpu=700 * MIB)

    assert_status(memory(host, tmp_path), Status.OK, "chooses --mem-fraction-static by itself")


def test_memory_without_a_profile_is_skipped(host: DoctorHost, tmp_path: Path) -> None:
    assert memory(host, tmp_path, "--mem-fraction-static", "0.9").status is Status.SKIP


# The draft.


def draft(host: DoctorHost, tmp_path: Path, **changes: object) -> Check:
    write_models(tmp_path, **changes)  # type: ignore[arg-type]
    (check,) = check_draft(host.case(*launch_words(tmp_path)))
    return check


def test_draft_that_names_no_layers_gets_sglangs_default(host: DoctorHost, tmp_path: Path) -> None:
    check = draft(host, tmp_path)

    assert_status(check, Status.OK, "before layers 2, 30, 58 of 61", "SGLang's default")


def test_draft_whose_layers_fit_is_fine(host: DoctorHost, tmp_path: Path) -> None:
    check = draft(host, tmp_path, eagle_config={IDS: [1, 29, 57]})

    assert_status(check, Status.OK, "before layers 2, 30, 58 of 61")


def test_draft_of_another_width_is_a_failure(host: DoctorHost, tmp_path: Path) -> None:
    check = draft(host, tmp_path, target_hidden_size=4096)

    assert_status(check, Status.FAIL, "4096", "7168", "draft/config.json")


def test_draft_of_its_own_width_counts_by_the_targets(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path, target_hidden_size=7168)
    config = tmp_path / "draft" / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 7168', '"hidden_size": 4096', 1))

    (check,) = check_draft(host.case(*launch_words(tmp_path)))

    assert check.status is Status.OK


def test_draft_for_a_deeper_target_is_a_failure(host: DoctorHost, tmp_path: Path) -> None:
    check = draft(host, tmp_path, layers=32, eagle_config={IDS: [1, 29, 57]})

    assert_status(check, Status.FAIL, "layers 57", "has 32")


@pytest.mark.parametrize(
    ("architecture", "status"),
    [
        ("LlamaForCausalLM", Status.FAIL),
        ("UnheardOfForCausalLM", Status.WARN),
        ("GptOssForCausalLM", Status.OK),
    ],
)
def test_draft_that_wants_the_last_layer_never_gets_it(
    host: DoctorHost, tmp_path: Path, architecture: str, status: Status
) -> None:
    check = draft(host, tmp_path, architecture=architecture, eagle_config={IDS: [1, 29, 60]})

    assert check.status is status


def test_draft_with_its_layers_in_the_wrong_place_is_a_failure(
    host: DoctorHost, tmp_path: Path
) -> None:
    check = draft(host, tmp_path, architecture=KIMI, **{IDS: [2, 20, 40]})

    words = ("stands outside eagle_config", "default, before layers 2, 30, 58", "move")
    assert_status(check, Status.FAIL, *words)


def test_draft_with_its_layers_in_the_wrong_place_may_be_lucky(
    host: DoctorHost, tmp_path: Path
) -> None:
    check = draft(host, tmp_path, architecture=KIMI, **{IDS: [2, 30, 58]})

    assert check.status is Status.OK


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_config": {IDS: [1, 29, 29]}},
        {"eagle_config": {IDS: [1, 29]}, "num_aux_hidden_states": 3},
        {"num_aux_hidden_states": 4},
    ],
)
def test_draft_whose_matrix_does_not_fit_is_a_failure(
    host: DoctorHost, tmp_path: Path, changes: dict[str, object]
) -> None:
    assert_status(draft(host, tmp_path, **changes), Status.FAIL, "first matrix")


def test_draft_with_layers_out_of_order_is_told(host: DoctorHost, tmp_path: Path) -> None:
    check = draft(host, tmp_path, eagle_config={IDS: [57, 1, 29]})

    assert_status(check, Status.WARN, "out of order", "before layers 2, 30, 58")


@pytest.mark.parametrize("value", ["2,30,58", [2, "30"], [True, 2, 3], {"a": 1}])
def test_draft_whose_layers_make_no_sense_is_refused_by_name(
    host: DoctorHost, tmp_path: Path, value: object
) -> None:
    check = draft(host, tmp_path, eagle_config={IDS: value})

    assert_status(check, Status.FAIL, "draft/config.json", IDS)


def test_draft_without_hidden_states_is_fine(host: DoctorHost, tmp_path: Path) -> None:
    check = draft(host, tmp_path, eagle_config={"use_aux_hidden_state": False})

    assert_status(check, Status.OK, "last hidden state alone")


def test_draft_of_a_target_with_few_layers_names_what_is_wrong(
    host: DoctorHost, tmp_path: Path
) -> None:
    assert draft(host, tmp_path, layers=4).status is Status.FAIL


def test_draft_that_is_not_here_is_skipped(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    words = [w.replace(str(tmp_path / "draft"), "org/draft") for w in launch_words(tmp_path)]

    (check,) = check_draft(host.case(*words))

    assert_status(check, Status.SKIP, "org/draft")


def test_draft_that_was_cut_short_is_a_failure_with_its_line(
    host: DoctorHost, tmp_path: Path
) -> None:
    write_models(tmp_path)
    path = tmp_path / "draft" / "config.json"
    path.write_text(path.read_text()[:40])

    (check,) = check_draft(host.case(*launch_words(tmp_path)))

    assert_status(check, Status.FAIL, "config.json:1", "cut short")


@pytest.mark.parametrize(
    ("architecture", "ids", "expected"),
    [
        (KIMI, [2, 30, 58], (2, 30, 58)),
        (KIMI, [1, 29, 57], (2, 30, 58)),
        ("LlamaForCausalLM", [2, 30, 58], (3, 31, 59)),
        ("GptOssForCausalLM", [2, 30, 61], (2, 30, 61)),
        ("GptOssForCausalLM", [1, 29, 60], (2, 30, 61)),
        ("AnyForCausalLM", None, (2, 30, 58)),
    ],
)
def test_capture_points_follow_each_familys_rule(
    architecture: str, ids: list[int] | None, expected: tuple[int, ...]
) -> None:
    assert capture_points(architecture, ids, 61) == expected


# All together.


def test_examine_survives_a_check_that_fails(host: DoctorHost) -> None:
    def check_broken(_case: object) -> None:
        raise ZeroDivisionError("odd host")

    checks = examine(host.case(), (check_broken, check_draft))  # type: ignore[arg-type]

    assert [check.id for check in checks] == ["broken", "draft_layers"]
    assert_status(checks[0], Status.WARN, "this check itself failed", "odd host")


def test_examine_of_a_healthy_host_and_launch_finds_nothing(
    host: DoctorHost, tmp_path: Path
) -> None:
    write_models(tmp_path)

    checks = examine(host.case(*launch_words(tmp_path)))

    assert {check.status for check in checks} <= {Status.OK, Status.SKIP}
    assert all(check.message for check in checks)
    assert len({check.id for check in checks}) == len(checks)
