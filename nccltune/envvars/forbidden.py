"""Variables that are never set by this tool, each with the reason that a person is told."""

from __future__ import annotations

from nccltune.envvars.model import Kind, ReadAt, Variable

_INERT = "it cannot change this all-reduce; set it in the server's own environment if it needs it"
_NETWORK = "it belongs to the network of the host; set it in the server's own environment"
_LOADS_CODE = "it makes NCCL load other code or settings, which would act unseen and unmeasured"
_DEBUGGING = "logging belongs to a single run, not to a profile; set it for that launch by hand"
_DESCRIBES_HOST = "it names a file about this host, which would be stale on another one"
_EAGER_BESIDE_GRAPH = "0 forbids an eager collective beside a graph in flight, which a server needs"
_TOOLS_OWN = "this tool sets it by itself in its own rank processes"


def _never(
    name: str,
    summary: str,
    reason: str,
    *,
    default: str = "",
    read_at: ReadAt = ReadAt.UNKNOWN,
    since: str = "",
    until: str = "",
    sglang: str = "",
    pinned: str = "",
) -> Variable:
    return Variable(
        name,
        Kind.FORBIDDEN,
        summary,
        reason,
        default=default,
        read_at=read_at,
        since=since,
        until=until,
        sglang=sglang,
        pinned=pinned,
    )


_HARMFUL = (
    _never(
        "NCCL_GRAPH_MIXING_SUPPORT",
        "0 drops some events from captured graphs.",
        _EAGER_BESIDE_GRAPH,
        default="1",
        read_at=ReadAt.CACHED,
        since="2.13",
        sglang="0 if unset, only with decode context parallelism",
        pinned=_EAGER_BESIDE_GRAPH,
    ),
    _never(
        "NCCL_GRAPH_STREAM_ORDERING",
        "0 drops the ordering between captured graphs.",
        "0 leaves the ordering to the server, which does not see to it",
        default="1",
        since="2.30.7",
    ),
    _never(
        "NCCL_CHUNK_SIZE",
        "Sets the chunk of send and receive.",
        "it does nothing for all-reduce, and 1 MiB and more gave wrong results (nccl#2408)",
        default="0",
        read_at=ReadAt.CACHED,
        since="2.12",
    ),
    _never(
        "NCCL_LL_BUFFSIZE",
        "Sets the buffer of the LL protocol.",
        "other sizes hang or fail NCCL's checks (nccl#1739), and small payloads gain nothing",
        default="524288",
        read_at=ReadAt.CACHED,
        since="2.7",
    ),
    _never(
        "NCCL_LL128_BUFFSIZE",
        "Sets the buffer of the LL128 protocol.",
        "other sizes hang or fail NCCL's checks (nccl#1739), and small payloads gain nothing",
        default="4915200",
        read_at=ReadAt.CACHED,
        since="2.7",
    ),
    _never(
        "NCCL_IGNORE_DISABLED_P2P",
        "Uses direct GPU access where the driver says that it is off.",
        "it goes past a hardware check",
        default="0",
        read_at=ReadAt.CACHED,
        since="2.12",
    ),
)

_OTHER_NAMES = (
    _never(
        "NCCL_MIN_NRINGS",
        "An older name of NCCL_MIN_CTAS.",
        "write NCCL_MIN_CTAS",
        read_at=ReadAt.CACHED,
    ),
    _never(
        "NCCL_MAX_NRINGS",
        "An older name of NCCL_MAX_CTAS.",
        "write NCCL_MAX_CTAS",
        read_at=ReadAt.CACHED,
    ),
    _never(
        "NCCL_WORK_FIFO_DEPTH",
        "The queue between host and kernels, counted in entries.",
        "NCCL reads NCCL_WORK_FIFO_BYTES instead since 2.22",
        until="2.22",
    ),
    _never(
        "NCCL_NCHANNELS_PER_PEER",
        "None.",
        "no version of NCCL reads it; for channels write NCCL_MAX_CTAS",
        read_at=ReadAt.NEVER,
    ),
    *(
        _never(name, "None since 2.5.", "NCCL no longer reads it since 2.5", until="2.5")
        for name in ("NCCL_LL_THRESHOLD", "NCCL_TREE_THRESHOLD", "NCCL_RINGS")
    ),
)

_ELSEWHERE = (
    _never(
        "NCCL_NVLS_CHUNKSIZE",
        "Sets the chunk of NVLink multicast.",
        "multicast only, which stays off",
        default="131072",
        read_at=ReadAt.CACHED,
        since="2.21",
    ),
    *(
        _never(name, "Sets the chunk of send and receive.", _INERT, read_at=ReadAt.CACHED)
        for name in ("NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE")
    ),
    *(
        _never(name, "Concerns the network between hosts.", _NETWORK)
        for name in (
            "NCCL_NET",
            "NCCL_NET_GDR_LEVEL",
            "NCCL_NET_GDR_READ",
            "NCCL_NET_DISABLE_INTRA",
            "NCCL_SOCKET_IFNAME",
            "NCCL_SOCKET_FAMILY",
            "NCCL_IB_DISABLE",
            "NCCL_IB_HCA",
            "NCCL_CROSS_NIC",
            "NCCL_COLLNET_ENABLE",
            "NCCL_COMM_ID",
        )
    ),
)

_HIDDEN_HANDS = (
    *(
        _never(name, "Names code that NCCL loads.", _LOADS_CODE, read_at=ReadAt.LOAD)
        for name in (
            "NCCL_TUNER_PLUGIN",
            "NCCL_NET_PLUGIN",
            "NCCL_PROFILER_PLUGIN",
            "NCCL_ENV_PLUGIN",
        )
    ),
    _never(
        "NCCL_TUNER_CONFIG_FILE",
        "Names the file that the example tuner plugin reads.",
        _LOADS_CODE,
        read_at=ReadAt.COMM_INIT,
    ),
    _never(
        "NCCL_CONF_FILE",
        "Names a file of further settings, in place of ~/.nccl.conf.",
        _LOADS_CODE,
        read_at=ReadAt.LOAD,
        since="2.23.4",
    ),
    *(
        _never(name, "Reads or writes a description of the host.", _DESCRIBES_HOST)
        for name in (
            "NCCL_GRAPH_FILE",
            "NCCL_TOPO_FILE",
            "NCCL_GRAPH_DUMP_FILE",
            "NCCL_TOPO_DUMP_FILE",
        )
    ),
    *(
        _never(name, "Controls NCCL's log.", _DEBUGGING, read_at=ReadAt.LOAD)
        for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
    ),
    _never(
        "NCCL_HOSTID",
        "Makes NCCL take processes for others hosts', or for one host's.",
        _TOOLS_OWN,
    ),
    _never(
        "NCCL_NO_CACHE",
        "Makes NCCL read its variables again at every use.",
        _TOOLS_OWN,
        since="2.29.7",
    ),
)

FORBIDDEN = (*_HARMFUL, *_OTHER_NAMES, *_ELSEWHERE, *_HIDDEN_HANDS)
