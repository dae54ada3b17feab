"""Which kernel carries the verify all-reduces of a launch, and so whether NCCL settings reach them.

SGLang asks its communicators in a fixed order and takes the first that wants the tensor; the rules
below stand in that order. Read in SGLang 0.5.10.post1, 0.5.15.post1 and 0.5.23. This predicts; a
running server's log and ``/server_info`` know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from nccltune.sglang.defaults import Release, is_at_least
from nccltune.sglang.flags import is_false, is_true

if TYPE_CHECKING:
    from nccltune.payloads.shapes import ModelShape
    from nccltune.sglang.command import LaunchCommand

CUSTOM_V2_RELEASE: Release = (0, 5, 12)
PCIE_IPC_RELEASE: Release = (0, 5, 21)
# Read both ways: symmetric memory went first in 0.5.15, custom all-reduce does in 0.5.23.
CUSTOM_BEFORE_SYMM_MEM_RELEASE: Release = (0, 5, 16)

FUSION_ARCHITECTURES = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "InternS2PreviewForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "NemotronH_Omni_Reasoning_V3",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
    }
)
"""Models for which SGLang switches FlashInfer's fused all-reduce on by itself."""

_FUSION_OFF = "--enforce-disable-flashinfer-allreduce-fusion"
_CUSTOM_OFF = "--disable-custom-all-reduce"
_LEGACY_WORLD_SIZES = frozenset({2, 4, 6, 8})
_MSCCLPP_WORLD_SIZES = frozenset({4, 8, 16, 32, 64})
_PCIE_IPC_WORLD_SIZES = frozenset({2, 4, 8})
_TORCH_SYMM_MEM_WORLD_SIZES = frozenset({2, 4, 6, 8})
_HOPPER, _BLACKWELL = 9, 10


class AllReducePath(StrEnum):
    """What carries the sums of a layer."""

    NONE = "none"
    NCCL = "nccl"
    CUSTOM = "custom"
    FLASHINFER_FUSION = "flashinfer_fusion"
    FLASHINFER_PCIE_IPC = "flashinfer_pcie_ipc"
    MSCCLPP = "mscclpp"
    TORCH_SYMM_MEM = "torch_symm_mem"
    NCCL_SYMM_MEM = "nccl_symm_mem"
    DP_ATTENTION = "dp_attention"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PathVerdict:
    """The path of a launch.

    Attributes:
        is_nccl: whether NCCL settings decide the speed of the verify all-reduces; None where that
            cannot be told before the server runs.
        reason: one line for people.
        fix: what to change so that NCCL carries them; empty where it does, or nothing would.
    """

    path: AllReducePath
    is_nccl: bool | None
    reason: str
    fix: str = ""

    def to_json(self) -> dict[str, object]:
        """Lay it out for scripts."""
        return {
            "path": str(self.path),
            "is_nccl": self.is_nccl,
            "reason": self.reason,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class _Facts:
    """Everything that the rules look at."""

    command: LaunchCommand
    architecture: str | None
    gpu_major: int | None
    has_full_nvlink: bool | None
    environ: Mapping[str, str]
    version: str | None

    @property
    def tp(self) -> int:
        return self.command.tp_size


def all_reduce_path(
    command: LaunchCommand,
    shape: ModelShape | None,
    *,
    gpu_architecture: str | None,
    has_full_nvlink: bool | None,
    environ: Mapping[str, str],
    version: str | None = None,
) -> PathVerdict:
    """Follow SGLang's own order of choice for the verify pass of a launch.

    Args:
        command: the launch.
        shape: its model, None where the config cannot be read.
        gpu_architecture: compute capability as ``sm90``; None where not known.
        has_full_nvlink: whether every pair of GPUs has NVLink; None where not known.
        environ: what SGLang finds, as ``environ_at_server`` gives it.
        version: of the SGLang that runs it; None counts as the newest.
    """
    facts = _Facts(
        command=command,
        architecture=shape.architecture if shape else None,
        gpu_major=_gpu_major(gpu_architecture),
        has_full_nvlink=has_full_nvlink,
        environ=environ,
        version=version,
    )
    rules: list[Callable[[_Facts], PathVerdict | None]]
    rules = [_single_gpu, _dp_attention, _fusion, _mscclpp, _custom, _symm_mem]
    if not is_at_least(version, CUSTOM_BEFORE_SYMM_MEM_RELEASE):
        rules[-2:] = [_symm_mem, _custom]
    for rule in (*rules, _pcie_ipc, _torch_symm_mem):
        if (verdict := rule(facts)) is not None:
            return verdict
    reason = "no other all-reduce applies to this launch: NCCL carries the verify pass"
    return PathVerdict(AllReducePath.NCCL, True, reason)


def _gpu_major(gpu_architecture: str | None) -> int | None:
    """Return 9 for ``sm90``, 12 for ``sm120``, whatever letter follows; None for anything else."""
    match = re.fullmatch(r"sm_?(\d+)\d[a-z]?", gpu_architecture or "")
    return int(match[1]) if match else None


def _single_gpu(facts: _Facts) -> PathVerdict | None:
    if facts.tp > 1:
        return None
    return PathVerdict(AllReducePath.NONE, False, "tensor parallel size 1 makes no all-reduce")


def _dp_attention(facts: _Facts) -> PathVerdict | None:
    if not facts.command.has_dp_attention:
        return None
    reason = (
        f"attention data parallel {facts.command.attn_dp_size}: gathers and scatters carry most of "
        "the traffic, so all-reduce alone is the wrong target"
    )
    return PathVerdict(AllReducePath.DP_ATTENTION, None, reason, "serve without --attn-dp-size")


def _fusion(facts: _Facts) -> PathVerdict | None:
    command = facts.command
    is_off = command.is_deterministic or command.has("enforce_disable_flashinfer_allreduce_fusion")
    if is_off or is_false(facts.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE")):
        return None
    if facts.gpu_major not in (None, _HOPPER, _BLACKWELL):
        return None
    is_asked = any(
        command.has(flag)
        for flag in ("flashinfer_allreduce_fusion_backend", "enable_flashinfer_allreduce_fusion")
    )
    if not is_asked and not _is_fusion_automatic(facts):
        return None
    fix = _FUSION_OFF
    if _custom(facts) is not None:
        fix += f" {_CUSTOM_OFF}"
    if facts.gpu_major is None or (not is_asked and facts.architecture is None):
        what = "GPU" if facts.gpu_major is None else "model"
        reason = f"FlashInfer's fused all-reduce may be on; the {what} that decides is not known"
        return PathVerdict(AllReducePath.UNKNOWN, None, reason, fix)
    why = "asked for" if is_asked else f"SGLang switches it on for {facts.architecture}"
    reason = f"FlashInfer's fused all-reduce ({why}) carries the verify pass"
    if facts.has_full_nvlink:
        return PathVerdict(AllReducePath.FLASHINFER_FUSION, False, reason, fix)
    reason += "; without NVLink between all GPUs it may fail to start and fall back: see the log"
    return PathVerdict(AllReducePath.FLASHINFER_FUSION, None, reason, fix)


def _is_fusion_automatic(facts: _Facts) -> bool:
    """Whether SGLang switches fusion on unasked; an unknown model counts as yes."""
    if facts.architecture is not None and facts.architecture not in FUSION_ARCHITECTURES:
        return False
    if facts.command.nnodes > 1 and facts.gpu_major == _HOPPER:
        return False
    return (facts.command.value("moe_a2a_backend") or "none") == "none"


def _mscclpp(facts: _Facts) -> PathVerdict | None:
    if not facts.command.has("enable_mscclpp") or facts.tp not in _MSCCLPP_WORLD_SIZES:
        return None
    reason = "--enable-mscclpp: MSCCL++ carries sums from 512 B to 8 MiB"
    return PathVerdict(AllReducePath.MSCCLPP, False, reason, "leave out --enable-mscclpp")


def _custom(facts: _Facts) -> PathVerdict | None:
    command = facts.command
    is_off = command.has("disable_custom_all_reduce") or command.is_deterministic
    if is_off or command.nnodes > 1 or facts.tp not in _custom_world_sizes(facts):
        return None
    if facts.has_full_nvlink is None:
        reason = "custom all-reduce carries the verify pass if NVLink joins all GPUs: not known"
        return PathVerdict(AllReducePath.UNKNOWN, None, reason, _CUSTOM_OFF)
    if facts.has_full_nvlink:
        reason = "custom all-reduce carries sums up to some MiB on NVLink; NCCL only larger ones"
        return PathVerdict(AllReducePath.CUSTOM, False, reason, _CUSTOM_OFF)
    if facts.tp > 2:
        return None
    reason = "two GPUs without NVLink: custom all-reduce where peer access works, else NCCL"
    return PathVerdict(AllReducePath.CUSTOM, None, reason, _CUSTOM_OFF)


def _custom_world_sizes(facts: _Facts) -> frozenset[int]:
    """Return the group sizes that either implementation takes; the second needs NVLink."""
    is_switched_off = is_false(facts.environ.get("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"))
    if is_switched_off or not is_at_least(facts.version, CUSTOM_V2_RELEASE):
        return _LEGACY_WORLD_SIZES
    if facts.gpu_major == _HOPPER:
        return frozenset(range(2, 9))
    if facts.gpu_major == _BLACKWELL:
        return frozenset({*range(2, 9), 16})
    return frozenset(range(2, 17))


def _symm_mem(facts: _Facts) -> PathVerdict | None:
    if not facts.command.has("enable_symm_mem"):
        return None
    path, fix = AllReducePath.NCCL_SYMM_MEM, "leave out --enable-symm-mem"
    if facts.has_full_nvlink is False:
        reason = "--enable-symm-mem without NVLink: NCCL with its ordinary kernels"
        return PathVerdict(path, True, reason)
    reason = "--enable-symm-mem: NCCL's symmetric kernels ignore its algorithm and protocol"
    return PathVerdict(path, None, reason, fix)


def _pcie_ipc(facts: _Facts) -> PathVerdict | None:
    variable = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
    is_on = is_true(facts.environ.get(variable)) and not facts.command.is_deterministic
    is_fit = facts.tp in _PCIE_IPC_WORLD_SIZES and facts.command.nnodes == 1
    if not is_on or not is_fit or not is_at_least(facts.version, PCIE_IPC_RELEASE):
        return None
    path, fix = AllReducePath.FLASHINFER_PCIE_IPC, f"unset {variable}"
    if facts.version is None:
        reason = f"{variable} is on: FlashInfer PCIe-IPC from SGLang 0.5.21 on, NCCL before"
        return PathVerdict(path, None, reason, fix)
    reason = f"{variable} is on: FlashInfer PCIe-IPC carries the verify pass"
    return PathVerdict(path, False, reason, fix)


def _torch_symm_mem(facts: _Facts) -> PathVerdict | None:
    command = facts.command
    if not command.has("enable_torch_symm_mem") or command.is_deterministic:
        return None
    is_fit = facts.gpu_major in (None, _HOPPER, _BLACKWELL)
    if not is_fit or facts.tp not in _TORCH_SYMM_MEM_WORLD_SIZES or facts.has_full_nvlink is False:
        return None
    reason = "--enable-torch-symm-mem carries sums below 64 MiB where NVLink multicast works"
    fix = "leave out --enable-torch-symm-mem"
    is_sure = facts.has_full_nvlink is True and facts.gpu_major is not None
    return PathVerdict(AllReducePath.TORCH_SYMM_MEM, False if is_sure else None, reason, fix)
