"""Variables that a person may put into a profile, and that the search leaves alone."""

from __future__ import annotations

from nccltune.envvars import domains
from nccltune.envvars.builders import switch_variable
from nccltune.envvars.model import Kind, ReadAt, Variable
from nccltune.envvars.server_owned import SERVER_OWNED

_CHANNELS = "the older name of {}, which NCCL calls deprecated since 2.17; canonical form uses it"

_SYMMETRIC_KERNELS = (
    "AllReduce_AGxLL_R",
    "AllReduce_AGxLLMC_R",
    "AllReduce_RSxLD_AGxST",
    "AllReduce_RSxLDMC_AGxSTMC",
)


def _older_channels(name: str, current: str, below: str) -> Variable:
    return Variable(
        name,
        Kind.INJECTABLE,
        f"Does what {current} does; where both are set, the more restrictive wins.",
        _CHANNELS.format(current),
        domain="1 to 64",
        default="as the newer name",
        unit="channels",
        read_at=ReadAt.CACHED,
        since="2.5",
        sglang="8 with --enable-deterministic-inference, over any other value",
        check=domains.integers(1, 64, below=below, above="NCCL takes 64 instead"),
    )


def _count(name: str, summary: str, reason: str, high: int, default: str, since: str) -> Variable:
    return Variable(
        name,
        Kind.INJECTABLE,
        summary,
        reason,
        domain=f"1 to {high}",
        default=default,
        unit="channels",
        read_at=ReadAt.CACHED,
        since=since,
        check=domains.integers(
            1, high, below="a channel count is 1 or more", above="there are only 64 channels"
        ),
    )


_CHANNEL_NAMES = (
    _older_channels("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL ignores it"),
    _older_channels("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL takes 1 instead"),
)

_TRANSPORT = (
    switch_variable(
        "NCCL_P2P_READ_ENABLE",
        "Reads from the peer's memory where NCCL would write to it; Simple protocol only.",
        "no effect on LL payloads",
        default="1 on Ampere with NVLink, else 0",
        since="2.7",
    ),
    switch_variable(
        "NCCL_P2P_DIRECT_DISABLE",
        "Turns off direct pointers between GPUs of one process.",
        "SGLang has one process a GPU, where nothing changes",
        default="0",
        since="2.12.12",
    ),
    switch_variable(
        "NCCL_P2P_USE_CUDA_MEMCPY",
        "Moves data with copy engines and a proxy thread, which adds latency.",
        "slower for small payloads by design",
        default="0",
        since="2.13",
    ),
    switch_variable(
        "NCCL_NVB_DISABLE",
        "Stops NCCL from going through a third GPU over NVLink.",
        "a matter of odd NVLink topologies",
        default="0",
    ),
    switch_variable(
        "NCCL_SHM_DISABLE",
        "Sends what cannot go directly between GPUs over network sockets.",
        "much slower; only a way round a too small /dev/shm",
        default="0",
        since="2.3",
    ),
    switch_variable(
        "NCCL_SHM_USE_CUDA_MEMCPY",
        "Copies through shared memory with copy engines and a proxy thread, which adds latency.",
        "slower for small payloads by design",
        default="0",
        since="2.13",
        until="2.30.7",
    ),
    switch_variable(
        "NCCL_SHM_MEMCPY_MODE",
        "Says which side uses a copy engine, with NCCL_SHM_USE_CUDA_MEMCPY only.",
        "slower for small payloads by design",
        values=("1", "2", "3"),
        default="1",
        since="2.13",
        until="2.30.7",
    ),
)

_SYMMETRIC = (
    switch_variable(
        "NCCL_SYM_NOWIN_ENABLE",
        "Uses the symmetric LL kernels on ordinary buffers where NCCL would take LL.",
        "new in 2.29.2 and undocumented; not measured here yet",
        default="0",
        since="2.29.2",
    ),
    Variable(
        "NCCL_SYM_KERNEL",
        Kind.INJECTABLE,
        "Forces one symmetric kernel, from 2.29 on at every size.",
        "needs registered windows up to 2.28, and slows large payloads after that; undocumented",
        domain=", ".join(_SYMMETRIC_KERNELS),
        default="NCCL decides",
        read_at=ReadAt.STATIC,
        since="2.27",
        check=domains.one_of(
            _SYMMETRIC_KERNELS, "NCCL turns all symmetric kernels off at a name it does not know"
        ),
    ),
    Variable(
        "NCCL_SYM_CTAS",
        Kind.INJECTABLE,
        "Sets the channels of symmetric kernels.",
        "only with NCCL_SYM_KERNEL or NCCL_SYM_NOWIN_ENABLE",
        domain="0 to 64; 0 is automatic",
        default="0",
        unit="channels",
        read_at=ReadAt.CACHED,
        since="2.27",
        check=domains.integers(0, 64, below="NCCL ignores it", above="there are only 64 channels"),
    ),
    switch_variable(
        "NCCL_CTA_POLICY",
        "Chooses how all-gather and reduce-scatter use the GPU.",
        "no effect on all-reduce; names in place of numbers are read from 2.29 on only",
        values=("0", "1", "2"),
        default="0",
        since="2.27",
    ),
)

_OTHER = (
    Variable(
        "NCCL_LL128_NTHREADS",
        Kind.INJECTABLE,
        "Sets the threads of a channel for LL128.",
        "LL128 only; undocumented",
        domain="a multiple of 32 from 160 to 640",
        default="640",
        unit="threads",
        read_at=ReadAt.CACHED,
        since="2.5",
        check=domains.ll128_thread_count,
    ),
    _count(
        "NCCL_NVLS_NCHANNELS",
        "Sets the channels of NVLink multicast.",
        "multicast only, which stays off",
        64,
        "16 on Hopper",
        "2.17",
    ),
    _count(
        "NCCL_NCHANNELS_PER_NET_PEER",
        "Sets the channels towards a peer over the network.",
        "network only, so nothing changes on one host",
        64,
        "NCCL decides",
        "",
    ),
    switch_variable(
        "NCCL_LOCAL_REGISTER",
        "Allows buffers to be registered by ncclCommRegister.",
        "inert until the server registers buffers",
        default="1",
        since="2.19",
    ),
    switch_variable(
        "NCCL_SINGLE_PROC_MEM_REG_ENABLE",
        "Allows registration where one process drives several GPUs.",
        "SGLang has one process a GPU, where nothing changes",
        default="0",
        since="2.28.3",
    ),
    switch_variable(
        "NCCL_RUNTIME_CONNECT",
        "Connects an algorithm at its first use (1) or all at start (0).",
        "changes the start and the memory, not the speed after it",
        default="1",
        since="2.22",
    ),
    switch_variable(
        "NCCL_MEM_SYNC_DOMAIN",
        "Keeps NCCL's memory fences apart from those of computing kernels.",
        "matters only where both run at once",
        default="1",
        since="2.16",
    ),
    Variable(
        "NCCL_LAUNCH_MODE",
        Kind.INJECTABLE,
        "Chooses how one process launches on several GPUs.",
        "deprecated since 2.9, and SGLang has one process a GPU",
        domain="PARALLEL or GROUP",
        default="PARALLEL",
        read_at=ReadAt.COMM_INIT,
        check=domains.one_of(("PARALLEL", "GROUP"), "NCCL does not know this mode"),
    ),
    Variable(
        "NCCL_WORK_FIFO_BYTES",
        Kind.INJECTABLE,
        "Sets the queue between host and kernels.",
        "a graph keeps its work elsewhere, so nothing changes for replays",
        domain="a power of two up to 1073741824",
        default="1048576",
        unit="bytes",
        read_at=ReadAt.CACHED,
        since="2.22",
        check=domains.fifo_size,
    ),
)

INJECTABLE = (*_CHANNEL_NAMES, *SERVER_OWNED, *_TRANSPORT, *_SYMMETRIC, *_OTHER)
