"""Variables that the server decides: injectable by a person, pinned in a search."""

from __future__ import annotations

from nccltune.envvars import domains
from nccltune.envvars.builders import switch_variable
from nccltune.envvars.model import Kind, ReadAt, Variable

SERVER_OWNED = (
    Variable(
        "NCCL_NVLS_ENABLE",
        Kind.INJECTABLE,
        "Switches NVLink multicast, for which NCCL's model reckons a flat 25 us.",
        "the server decides it and starts its other parts to match",
        domain="0",
        default="2, by what the hardware can do",
        read_at=ReadAt.CACHED,
        since="2.17",
        sglang="0 if unset; 1 with --enable-nccl-nvls or --enable-symm-mem, over any other value",
        pinned="SGLang sets 0 unless it is started with --enable-nccl-nvls; multicast has hung and "
        "failed at start on some hosts",
        check=domains.one_of(
            ("0",), "multicast is the server's choice, made with its flag --enable-nccl-nvls"
        ),
    ),
    switch_variable(
        "NCCL_CUMEM_ENABLE",
        "Chooses how NCCL gets GPU memory; no difference in latency, but 0 rules out symmetric "
        "kernels.",
        "the server decides it",
        values=("-2", "0", "1"),
        default="-2, which is automatic",
        since="2.18",
        sglang="0 if unset; 1 with --enable-symm-mem, over any other value",
        pinned="SGLang sets 0, and a search with another value would tune another system",
    ),
    switch_variable(
        "NCCL_CUMEM_HOST_ENABLE",
        "Chooses what host shared memory is made of.",
        "0 is the known way round crashes on hosts without direct GPU access",
        values=("-1", "0", "1"),
        default="-1, which is automatic",
        since="2.23",
        pinned="1 crashes some hosts without direct GPU access (nccl#1838, nccl#2190)",
    ),
    switch_variable(
        "NCCL_GRAPH_REGISTER",
        "Registers buffers at graph capture; inert for SGLang's in-place all-reduces.",
        "the server decides it",
        default="1",
        since="2.11",
        sglang="0 if unset, from 0.5.20 on",
        pinned="SGLang sets 0, and 1 can hang the replay of graphs",
    ),
    switch_variable(
        "NCCL_WIN_ENABLE",
        "Allows registered windows, without which there are no symmetric kernels.",
        "the server decides whether it registers windows",
        default="1",
        since="2.27",
        pinned="it gates what the server asks for, and does nothing to a plain all-reduce",
    ),
    switch_variable(
        "NCCL_MNNVL_ENABLE",
        "Lets NVLink reach over several hosts; nothing changes on one host.",
        "the server decides it",
        values=("0", "1", "2"),
        default="2, by what the hardware can do",
        sglang="1 if unset, on multi-node fabric GPUs only",
        pinned="it belongs to several hosts",
    ),
)
