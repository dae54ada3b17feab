"""What SGLang writes into its own environment before it starts its ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sglang.srt import wishes
from sglang.version import is_at_least

if TYPE_CHECKING:
    from sglang.srt.arguments import ServerArgs


def set_environment(server_args: ServerArgs) -> None:
    """Write the variables, over the operator's only where SGLang does."""
    _before_launch(server_args)
    symm_mem = server_args.has("enable_symm_mem")
    nvls = symm_mem or server_args.has("enable_nccl_nvls")
    _write("NCCL_CUMEM_ENABLE", str(int(symm_mem)), is_forced=symm_mem)
    _write("NCCL_NVLS_ENABLE", str(int(nvls)), is_forced=nvls)
    if server_args.integer("dcp_size", 1) > 1 and is_at_least(0, 5, 15):
        _write("NCCL_GRAPH_MIXING_SUPPORT", "0", is_forced=symm_mem)
    _write("CUDA_DEVICE_MAX_CONNECTIONS", "8", is_forced=True)
    if not is_at_least(0, 5, 23):
        _write("CUDA_MODULE_LOADING", "AUTO", is_forced=True)
    if os.environ.get("TRTLLM_ENABLE_PDL", "1") != "0":
        _write("TRTLLM_ENABLE_PDL", "1", is_forced=True)
    for setting in filter(None, wishes.text("SET").split(",")):
        name, _, value = setting.partition("=")
        _write(name, value, is_forced=True)


def _before_launch(server_args: ServerArgs) -> None:
    """Do what resolving the flags does."""
    widths = [server_args.integer(name, 1) for name in ("tp_size", "ep_size", "dp_size")]
    has_graphs = not server_args.has("disable_cuda_graph")
    if server_args.text("cuda_graph_backend_decode") == "disabled":
        has_graphs = False
    if max(widths) > 1 and has_graphs and is_at_least(0, 5, 20):
        _write("NCCL_GRAPH_REGISTER", "0")
    if server_args.text("moe_a2a_backend") == "deepep_v2":
        _write("NCCL_CUMEM_ENABLE", "1")
        _write("EP_REUSE_NCCL_COMM", "0")
    is_deterministic = server_args.has("enable_deterministic_inference")
    if is_deterministic and server_args.tp_size > 1:
        _write("NCCL_ALGO", "allreduce:tree", is_forced=True)
        if is_at_least(0, 5, 18):
            count = os.environ.get("SGLANG_DETERMINISTIC_NCCL_NCHANNELS") or "8"
            _write("NCCL_MIN_NCHANNELS", count, is_forced=True)
            _write("NCCL_MAX_NCHANNELS", count, is_forced=True)


def _write(name: str, value: str, *, is_forced: bool = False) -> None:
    if is_forced or name not in os.environ:
        os.environ[name] = value
