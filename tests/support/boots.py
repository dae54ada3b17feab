"""Boots that nobody measured: streams with chosen figures, for tests of what is made of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from nccltune.host.fingerprint import Fingerprint
from nccltune.profile import Profile
from nccltune.verify.load.rounds import LoadPlan
from nccltune.verify.model import Arm, Boot, Chunk, RankState, Run, Seen, Stream
from nccltune.verify.record import VerifyRecord

TOKENS = 20
LENGTH = 2
SETTINGS = {"NCCL_MIN_CTAS": "8", "NCCL_PROTO": "allreduce:LL"}
ON_PATH = Seen(
    ranks={rank: dict.fromkeys(SETTINGS, RankState.IN_EFFECT) for rank in ("TP0", "TP1")},
    is_nccl_on_path=True,
    path_reason="made up for a test",
    version="0.5.15.post1",
)


def stream(
    ms: float,
    *,
    ttft_ms: float = 30.0,
    tokens: int = TOKENS,
    length: int = LENGTH,
    is_speculative: bool = True,
) -> Stream:
    """Return an answer whose every decode step took ``ms`` and brought ``length`` tokens."""
    at = [(1e-3 * (ttft_ms + ms * idx), length * (idx + 1)) for idx in range(tokens // length)]
    chunks = tuple(Chunk(at_s, count) for at_s, count in at)
    return Stream(
        prompt_tokens=8,
        tokens=tokens,
        duration_s=chunks[-1].at_s,
        chunks=chunks,
        verify_count=tokens // length if is_speculative else None,
        accept_length=float(length) if is_speculative else None,
        accept_rate=(length - 1) / 2.0 if is_speculative else None,
        accept_by_position=(0, tokens // length) if is_speculative else (),
    )


def run(ms: float, *, ttft_ms: float = 30.0, is_speculative: bool = True) -> Run:
    """Return a run of one stream; without speculation a step is a token."""
    length = LENGTH if is_speculative else 1
    only = stream(ms, ttft_ms=ttft_ms, length=length, is_speculative=is_speculative)
    return Run((only,), only.duration_s)


def boot(
    arm: str,
    position: int,
    ms: float,
    *,
    run_count: int = 2,
    ttft_long_ms: float = 300.0,
    is_speculative: bool = True,
    seen: Seen = ON_PATH,
) -> Boot:
    """Return a boot whose runs took ``ms`` a verify step."""
    return Boot(
        arm=arm,
        position=position,
        started_at=f"2026-11-29T12:{position:02}:00+00:00",
        start_s=60.0,
        runs=tuple(run(ms, is_speculative=is_speculative) for _ in range(run_count)),
        ttft_short_ms=(30.0, 30.5, 31.0),
        ttft_long_ms=(ttft_long_ms, ttft_long_ms + 1.0),
        seen=seen,
    )


def mirrored(*arms: tuple[str, float], round_count: int = 2, **changes: object) -> tuple[Boot, ...]:
    """Return boots in the order A B ... B A of every round, each a little apart."""
    boots: list[Boot] = []
    for _ in range(round_count):
        for name, ms in (*arms, *reversed(arms)):
            at = len(boots)
            boots.append(boot(name, at, ms * (1.0 + 0.001 * (at % 3)), **changes))  # type: ignore[arg-type]
    return tuple(boots)


LAUNCH = (
    "sglang",
    "serve",
    "--model-path",
    "/models/kimi",
    "--tp",
    "2",
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "3",
)
FAST = Profile("fast", SETTINGS, source="gpus")
DEFAULT_ARM = Arm("default", LAUNCH, num_steps=2)
FAST_ARM = Arm("fast", LAUNCH, FAST, num_steps=2)
HOST = Fingerprint(
    gpu_names=("H200", "H200"),
    gpu_uuids=("GPU-0", "GPU-1"),
    driver_version="580.1",
    nccl_version="2.28.9",
    link_matrix=(("X", "NV18"), ("NV18", "X")),
    numa_nodes=(0, 0),
    world_size=2,
)


def record_of(
    boots: tuple[Boot, ...] = (),
    *,
    arms: tuple[Arm, ...] = (DEFAULT_ARM, FAST_ARM),
    boot_total: int | None = None,
    **changes: Any,
) -> VerifyRecord:
    """Return the record of a verify that made these boots, and was done with them."""
    record = VerifyRecord(
        id="20261129-120000-7",
        created_at="2026-11-29T12:00:00+00:00",
        launch=LAUNCH,
        arms=arms,
        load=asdict(LoadPlan(run_count=2, tokens=TOKENS)),
        boot_total=len(boots) if boot_total is None else boot_total,
        boots=boots,
        fingerprint=HOST,
        is_finished=True,
    )
    return replace(record, **changes)
