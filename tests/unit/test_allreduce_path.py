from __future__ import annotations

from collections.abc import Mapping

import pytest

from nccltune.payloads.shapes import KIMI_K25, ModelShape
from nccltune.sglang.allreduce_path import AllReducePath, PathVerdict, all_reduce_path
from nccltune.sglang.command import parse_launch

LLAMA = ModelShape("LlamaForCausalLM", "llama", 8192, 80)
PCIE_IPC = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
FUSION_OFF = "--enforce-disable-flashinfer-allreduce-fusion"
CUSTOM_OFF = "--disable-custom-all-reduce"


def path(
    flags: str,
    shape: ModelShape | None = LLAMA,
    *,
    gpu: str | None = "sm90",
    nvlink: bool | None = True,
    environ: Mapping[str, str] | None = None,
    version: str | None = "0.5.23",
) -> PathVerdict:
    command = parse_launch(f"python -m sglang.launch_server {flags}".split())
    return all_reduce_path(
        command,
        shape,
        gpu_architecture=gpu,
        has_full_nvlink=nvlink,
        environ=environ or {},
        version=version,
    )


def is_path(verdict: PathVerdict, name: AllReducePath, is_nccl: bool | None) -> bool:
    assert verdict.reason
    assert bool(verdict.fix) == (verdict.is_nccl is not True and name is not AllReducePath.NONE)
    return (verdict.path, verdict.is_nccl) == (name, is_nccl)


def test_path_at_tp_1_is_none() -> None:
    assert is_path(path("--tp 1"), AllReducePath.NONE, is_nccl=False)


@pytest.mark.parametrize("flags", ["--attn-dp-size 8", "--enable-dp-attention --dp-size 8"])
def test_path_under_dp_attention_claims_nothing(flags: str) -> None:
    verdict = path(f"--tp 8 {flags}", KIMI_K25)

    assert is_path(verdict, AllReducePath.DP_ATTENTION, is_nccl=None)
    assert "wrong target" in verdict.reason


# --- the cases where NCCL drives verify, as the facts list them


@pytest.mark.parametrize("gpu", ["sm80", "sm89", "sm120", "sm120a"])
@pytest.mark.parametrize("flags", ["", CUSTOM_OFF])
@pytest.mark.parametrize("shape", [KIMI_K25, LLAMA], ids=["kimi", "llama"])
def test_path_of_pcie_gpus_is_nccl_with_and_without_the_flag(
    gpu: str, flags: str, shape: ModelShape
) -> None:
    verdict = path(f"--tp 8 {flags}", shape, gpu=gpu, nvlink=False)

    assert is_path(verdict, AllReducePath.NCCL, is_nccl=True)


def test_path_of_nvlink_without_custom_is_nccl_for_dense_llama() -> None:
    assert is_path(path(f"--tp 8 {CUSTOM_OFF}"), AllReducePath.NCCL, is_nccl=True)


def test_path_of_nvlink_without_custom_is_still_fusion_for_kimi() -> None:
    verdict = path(f"--tp 8 {CUSTOM_OFF}", KIMI_K25)

    assert is_path(verdict, AllReducePath.FLASHINFER_FUSION, is_nccl=False)
    assert verdict.fix == FUSION_OFF
    assert "KimiK25" in verdict.reason


def test_path_of_nvlink_kimi_with_both_flags_is_nccl() -> None:
    verdict = path(f"--tp 8 {CUSTOM_OFF} {FUSION_OFF}", KIMI_K25)

    assert is_path(verdict, AllReducePath.NCCL, is_nccl=True)


def test_path_fix_of_fusion_names_custom_too_where_it_comes_next() -> None:
    assert path("--tp 8", KIMI_K25).fix == f"{FUSION_OFF} {CUSTOM_OFF}"


def test_path_following_the_fix_leads_to_nccl() -> None:
    verdict = path("--tp 8", KIMI_K25)

    assert path(f"--tp 8 {verdict.fix}", KIMI_K25).is_nccl is True


# --- fusion


@pytest.mark.parametrize("gpu", ["sm90", "sm100", "sm103"])
def test_path_of_kimi_on_hopper_and_blackwell_is_fusion(gpu: str) -> None:
    verdict = path("--tp 8", KIMI_K25, gpu=gpu)

    assert is_path(verdict, AllReducePath.FLASHINFER_FUSION, is_nccl=False)


def test_path_of_kimi_on_pcie_hopper_is_not_settled() -> None:
    verdict = path("--tp 8", KIMI_K25, nvlink=False)

    assert is_path(verdict, AllReducePath.FLASHINFER_FUSION, is_nccl=None)
    assert "see the log" in verdict.reason


@pytest.mark.parametrize(
    "flags", ["--flashinfer-allreduce-fusion-backend auto", "--enable-flashinfer-allreduce-fusion"]
)
def test_path_with_fusion_asked_for_is_fusion_for_any_model(flags: str) -> None:
    assert is_path(path(f"--tp 8 {flags}"), AllReducePath.FLASHINFER_FUSION, is_nccl=False)
    assert path(f"--tp 8 {flags}", gpu="sm120", nvlink=False).path is AllReducePath.NCCL


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ("--moe-a2a-backend deepep", {}),
        ("--nnodes 2", {}),
        ("--enable-deterministic-inference", {}),
        ("", {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}),
    ],
)
def test_path_where_fusion_stays_off_is_nccl(flags: str, environ: dict[str, str]) -> None:
    verdict = path(f"--tp 8 {CUSTOM_OFF} {flags}", KIMI_K25, environ=environ)

    assert is_path(verdict, AllReducePath.NCCL, is_nccl=True)


def test_path_of_two_blackwell_nodes_is_fusion() -> None:
    assert path("--tp 8 --nnodes 2", KIMI_K25, gpu="sm100").path is AllReducePath.FLASHINFER_FUSION


def test_path_of_kimi_on_unknown_gpu_is_unknown() -> None:
    verdict = path("--tp 8", KIMI_K25, gpu=None)

    assert is_path(verdict, AllReducePath.UNKNOWN, is_nccl=None)
    assert "GPU" in verdict.reason


def test_path_of_unknown_model_on_hopper_is_unknown() -> None:
    verdict = path(f"--tp 8 {CUSTOM_OFF}", None)

    assert is_path(verdict, AllReducePath.UNKNOWN, is_nccl=None)
    assert "model" in verdict.reason


def test_path_of_unknown_model_on_pcie_blackwell_is_nccl() -> None:
    assert is_path(path("--tp 8", None, gpu="sm120", nvlink=False), AllReducePath.NCCL, True)


# --- custom all-reduce


def test_path_of_nvlink_llama_is_custom() -> None:
    verdict = path("--tp 8")

    assert is_path(verdict, AllReducePath.CUSTOM, is_nccl=False)
    assert verdict.fix == CUSTOM_OFF


def test_path_without_knowing_nvlink_is_unknown() -> None:
    assert is_path(path("--tp 8", nvlink=None), AllReducePath.UNKNOWN, is_nccl=None)


def test_path_of_two_pcie_gpus_may_be_custom() -> None:
    verdict = path("--tp 2", gpu="sm120", nvlink=False)

    assert is_path(verdict, AllReducePath.CUSTOM, is_nccl=None)


@pytest.mark.parametrize(
    ("tp", "gpu", "version", "environ", "expected"),
    [
        (3, "sm90", "0.5.23", {}, AllReducePath.CUSTOM),
        (3, "sm90", "0.5.10.post1", {}, AllReducePath.NCCL),
        (3, "sm90", "0.5.23", {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}, AllReducePath.NCCL),
        (6, "sm90", "0.5.10.post1", {}, AllReducePath.CUSTOM),
        (16, "sm90", "0.5.23", {}, AllReducePath.NCCL),
        (16, "sm100", "0.5.23", {}, AllReducePath.CUSTOM),
        (12, "sm80", "0.5.23", {}, AllReducePath.CUSTOM),
    ],
)
def test_path_custom_takes_the_group_sizes_of_its_release(
    tp: int, gpu: str, version: str, environ: dict[str, str], expected: AllReducePath
) -> None:
    assert path(f"--tp {tp}", gpu=gpu, version=version, environ=environ).path is expected


@pytest.mark.parametrize("flags", ["--nnodes 2", "--enable-deterministic-inference"])
def test_path_where_custom_stays_off_is_nccl(flags: str) -> None:
    assert is_path(path(f"--tp 8 {flags}"), AllReducePath.NCCL, is_nccl=True)


# --- the others


def test_path_with_mscclpp_is_mscclpp_before_custom() -> None:
    assert is_path(path("--tp 8 --enable-mscclpp"), AllReducePath.MSCCLPP, is_nccl=False)


def test_path_with_mscclpp_of_odd_group_is_not_mscclpp() -> None:
    assert path("--tp 6 --enable-mscclpp").path is AllReducePath.CUSTOM


def test_path_with_symm_mem_claims_nothing_on_nvlink() -> None:
    verdict = path(f"--tp 8 --enable-symm-mem {CUSTOM_OFF}")

    assert is_path(verdict, AllReducePath.NCCL_SYMM_MEM, is_nccl=None)


def test_path_with_symm_mem_without_nvlink_is_ordinary_nccl() -> None:
    verdict = path("--tp 8 --enable-symm-mem", gpu="sm120", nvlink=False)

    assert is_path(verdict, AllReducePath.NCCL_SYMM_MEM, is_nccl=True)


def test_path_with_symm_mem_and_custom_depends_on_the_release() -> None:
    flags = "--tp 8 --enable-symm-mem"

    assert path(flags, version="0.5.23").path is AllReducePath.CUSTOM
    assert path(flags, version="0.5.15.post1").path is AllReducePath.NCCL_SYMM_MEM


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_path_with_pcie_ipc_is_pcie_ipc_whatever_custom_is(tp: int) -> None:
    verdict = path(f"--tp {tp} {CUSTOM_OFF}", gpu="sm120", nvlink=False, environ=PCIE_IPC)

    assert is_path(verdict, AllReducePath.FLASHINFER_PCIE_IPC, is_nccl=False)
    assert verdict.fix == "unset SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"


@pytest.mark.parametrize(
    ("flags", "version", "value"),
    [
        ("--tp 8", "0.5.20", "1"),
        ("--tp 8", "0.5.23", "0"),
        ("--tp 6", "0.5.23", "1"),
        ("--tp 8 --nnodes 2", "0.5.23", "1"),
        ("--tp 8 --enable-deterministic-inference", "0.5.23", "1"),
    ],
)
def test_path_where_pcie_ipc_stays_off_is_nccl(flags: str, version: str, value: str) -> None:
    environ = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": value}

    verdict = path(flags, gpu="sm120", nvlink=False, environ=environ, version=version)

    assert is_path(verdict, AllReducePath.NCCL, is_nccl=True)


def test_path_with_pcie_ipc_of_unknown_release_claims_nothing() -> None:
    verdict = path("--tp 8", gpu="sm120", nvlink=False, environ=PCIE_IPC, version=None)

    assert is_path(verdict, AllReducePath.FLASHINFER_PCIE_IPC, is_nccl=None)


def test_path_with_pcie_ipc_on_nvlink_is_custom_first() -> None:
    assert path("--tp 8", environ=PCIE_IPC).path is AllReducePath.CUSTOM


@pytest.mark.parametrize(
    ("gpu", "nvlink", "expected", "is_nccl"),
    [
        ("sm90", True, AllReducePath.TORCH_SYMM_MEM, False),
        ("sm90", None, AllReducePath.TORCH_SYMM_MEM, None),
        (None, True, AllReducePath.TORCH_SYMM_MEM, None),
        ("sm90", False, AllReducePath.NCCL, True),
        ("sm120", True, AllReducePath.NCCL, True),
    ],
)
def test_path_with_torch_symm_mem_needs_multicast(
    gpu: str | None, nvlink: bool | None, expected: AllReducePath, is_nccl: bool | None
) -> None:
    verdict = path(f"--tp 8 {CUSTOM_OFF} --enable-torch-symm-mem", gpu=gpu, nvlink=nvlink)

    assert is_path(verdict, expected, is_nccl)
