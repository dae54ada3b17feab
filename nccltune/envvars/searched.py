"""Variables that the search varies.

Values to propose come from what NCCL accepts and from its own model, never from a recording.
"""

from __future__ import annotations

from nccltune.envvars import domains, lists
from nccltune.envvars.model import Kind, ReadAt, Variable

_CHANNELS = ("1", "2", "4", "8", "16", "32", "64")
_THRESHOLDS = ("1", "2", "4", "8", "16", "32")
_KEPT = "-2"

_CHANNEL_CHECKS = {
    "NCCL_MIN_CTAS": domains.integers(
        1, 64, below="NCCL ignores it", above="NCCL takes 64 instead"
    ),
    "NCCL_MAX_CTAS": domains.integers(
        1, 64, below="NCCL ignores it or takes 1", above="NCCL takes 64 instead"
    ),
}


def _threshold_choices() -> tuple[str, ...]:
    """Give ring-LL (place 4 of 6) and tree-LL (place 1) thresholds, one changed at a time."""
    kept = [_KEPT] * 6
    ring = [" ".join([*kept[:3], threshold, *kept[4:]]) for threshold in _THRESHOLDS]
    tree = [" ".join([threshold, *kept[1:]]) for threshold in _THRESHOLDS]
    return (*ring, *tree)


SEARCHED = (
    Variable(
        "NCCL_PROTO",
        Kind.SEARCHED,
        "Chooses the protocol: LL for low latency, Simple for bandwidth; a forced one is used at "
        "every size.",
        "NCCL's own model already takes LL for small payloads; worth trying together with others",
        domain="allreduce: (since 2.24) and LL, LL128 or Simple; LL128 only where NCCL offers it",
        default="NCCL's model decides by size",
        read_at=ReadAt.COMM_INIT,
        since="2.5",
        choices=("allreduce:LL", "allreduce:LL128", "allreduce:Simple"),
        check=lists.protocols,
    ),
    Variable(
        "NCCL_ALGO",
        Kind.SEARCHED,
        "Chooses the algorithm: on one host a ring or a chain-shaped tree.",
        "the tree has another latency and other channel counts at the same size",
        domain="allreduce: (since 2.24) and Ring or Tree",
        default="NCCL's model decides by size",
        read_at=ReadAt.COMM_INIT,
        since="2.5",
        sglang="allreduce:tree with --enable-deterministic-inference, over any other value",
        choices=("allreduce:Ring", "allreduce:Tree"),
        check=lists.algorithms,
    ),
    Variable(
        "NCCL_THREAD_THRESHOLDS",
        Kind.SEARCHED,
        "Sets the bytes a thread must have before another channel is used, and so the channels by "
        "size.",
        "a small ring all-reduce uses very few channels by default; undocumented",
        domain="6 whole numbers below 100000 between blanks: tree LL, LL128, Simple, ring LL, "
        "LL128, Simple; a negative one keeps the default",
        default="8 8 64 and, for the ring, 8 x ranks 8 64",
        unit="bytes a thread",
        read_at=ReadAt.COMM_INIT,
        since="2.5",
        choices=_threshold_choices(),
        check=domains.thread_thresholds,
    ),
    Variable(
        "NCCL_NTHREADS",
        Kind.SEARCHED,
        "Sets the threads of a channel; fewer threads mean more channels for a small LL payload.",
        "one of the few ways to more channels at small sizes",
        domain="64, 128, 256 or 512",
        default="512; 256 for ring Simple on slow links",
        unit="threads",
        read_at=ReadAt.CACHED,
        choices=("64", "128", "256", "512"),
        check=domains.thread_count,
    ),
    Variable(
        "NCCL_MIN_CTAS",
        Kind.SEARCHED,
        "Raises the number of channels that a communicator has, not what a small payload uses.",
        "useful where NCCL has only 2 to 4 channels, and together with the thresholds",
        domain="1 to 64",
        default="from the topology",
        unit="channels",
        read_at=ReadAt.CACHED,
        since="2.17",
        choices=_CHANNELS,
        check=_CHANNEL_CHECKS["NCCL_MIN_CTAS"],
    ),
    Variable(
        "NCCL_MAX_CTAS",
        Kind.SEARCHED,
        "Caps the channels, and with them the GPU memory and processors that NCCL takes.",
        "fewer channels can be faster for small payloads, and slower for large ones",
        domain="1 to 64",
        default="64",
        unit="channels",
        read_at=ReadAt.CACHED,
        since="2.17",
        choices=_CHANNELS,
        check=_CHANNEL_CHECKS["NCCL_MAX_CTAS"],
    ),
    Variable(
        "NCCL_BUFFSIZE",
        Kind.SEARCHED,
        "Sets the buffer of the Simple protocol; nothing changes for LL and LL128, but GPU memory "
        "does.",
        "a smaller buffer can give GPU memory back; large payloads may gain from a larger one",
        domain="a power of two from 65536 on",
        default="4194304",
        unit="bytes",
        read_at=ReadAt.CACHED,
        choices=("1048576", "2097152", "8388608", "16777216"),
        check=domains.buffer_size,
    ),
    Variable(
        "NCCL_CGA_CLUSTER_SIZE",
        Kind.SEARCHED,
        "Groups thread blocks into clusters at launch, where the channels divide by it (Hopper and "
        "later).",
        "changes the launch cost of a small kernel",
        domain="0 to 8",
        default="4 on Hopper and later",
        unit="thread blocks",
        read_at=ReadAt.CACHED,
        since="2.16",
        choices=("0", "1", "2", "4", "8"),
        check=domains.integers(0, 8, below="NCCL ignores it", above="NCCL takes 8 instead"),
    ),
    Variable(
        "NCCL_P2P_LEVEL",
        Kind.SEARCHED,
        "Sets how far apart two GPUs may be and still write to each other's memory directly.",
        "decides the transport on hosts without NVLink; can hang there, so only in trials that can "
        "be killed",
        domain="LOC, NVL, PIX, PXB, PHB or SYS (also NVB, C2C, P2C, PXN), in capitals",
        default="PXB; SYS with up to 2 GPUs on AMD",
        read_at=ReadAt.STATIC,
        since="2.3.4",
        choices=("PIX", "PXB", "PHB", "SYS"),
        check=domains.p2p_level,
    ),
    Variable(
        "NCCL_P2P_DISABLE",
        Kind.SEARCHED,
        "Sends everything through host shared memory; beats NCCL_P2P_LEVEL.",
        "direct access between sockets can be slower than the way through the host",
        domain="0 or 1",
        default="0",
        read_at=ReadAt.STATIC,
        since="2.3",
        choices=("1",),
        check=domains.switch(),
    ),
    Variable(
        "NCCL_SHM_LOCALITY",
        Kind.SEARCHED,
        "Puts host shared memory on the sender's (1) or the receiver's (2) NUMA node.",
        "the one NUMA choice there is without direct access between GPUs; undocumented",
        domain="1 or 2",
        default="2",
        read_at=ReadAt.STATIC,
        since="2.13",
        choices=("1",),
        check=domains.one_of(("1", "2"), "NCCL ignores it and takes 2"),
    ),
)
