"""Boots of a verify that nobody ran: as slow, as noisy and as accepting as a test wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nccltune.profile import Profile
from nccltune.verify.model import Arm, Boot, Chunk, RankState, Run, Seen, Stream
from nccltune.verify.plan import boot_order

LAUNCH = ("python", "-m", "sglang.launch_server", "--model-path", "/models/kimi", "--tp", "8")
TTFT_MS = 50.0
IN_EFFECT = {"TP0": {"NCCL_PROTO": RankState.IN_EFFECT}}


def an_arm(name: str, *, steps: int | None = 2, settings: Mapping[str, str] | None = None) -> Arm:
    """``steps`` 0 is plain decoding."""
    profile = None if settings is None else Profile(name, settings)
    is_speculative = steps != 0
    return Arm(name, LAUNCH, profile, steps if is_speculative else None, is_speculative)


DEFAULT = an_arm("default")
FOLK = an_arm("folk", settings={"NCCL_PROTO": "LL"})
PLAIN = an_arm("plain", steps=0)


def a_stream(
    ms_per_step: float,
    *,
    accept_length: float | None = 2.0,
    by_position: tuple[int, ...] = (),
    tokens: int = 500,
    num_steps: int = 2,
) -> Stream:
    """One answer at an even pace; ``accept_length`` None is plain decoding."""
    length = accept_length or 1.0
    verify_count = round(tokens / length)
    step_count = verify_count if accept_length else tokens - 1
    last_s = (TTFT_MS + step_count * ms_per_step) / 1e3
    return Stream(
        prompt_tokens=30,
        tokens=tokens,
        duration_s=last_s,
        chunks=(Chunk(TTFT_MS / 1e3, 1), Chunk(last_s, tokens)),
        verify_count=None if accept_length is None else verify_count,
        accept_length=accept_length,
        accept_rate=None if accept_length is None else (accept_length - 1.0) / num_steps,
        accept_by_position=by_position,
    )


def a_boot(
    arm: Arm,
    position: int,
    ms_per_step: float = 20.0,
    *,
    accept_length: float | None = 2.0,
    by_position: tuple[int, ...] = (),
    ttft_ms: tuple[float, float] | None = (TTFT_MS, 900.0),
    seen: Seen | None = None,
) -> Boot:
    length = accept_length if arm.is_speculative else None
    stream = a_stream(ms_per_step, accept_length=length, by_position=by_position)
    ranks = IN_EFFECT if arm.profile else {}
    return Boot(
        arm=arm.name,
        position=position,
        started_at="2026-11-29T12:00:00+00:00",
        start_s=60.0,
        runs=(Run((stream,), stream.duration_s),),
        ttft_short_ms=() if ttft_ms is None else (ttft_ms[0],),
        ttft_long_ms=() if ttft_ms is None else (ttft_ms[1],),
        seen=seen or Seen(ranks=ranks, is_nccl_on_path=True),
    )


def in_order(arms: Sequence[Arm], boots_an_arm: int) -> list[Arm]:
    """Which arm each boot starts."""
    return [arms[idx] for idx in boot_order(len(arms), boots_an_arm)]


WOBBLE = (0.0, 0.001, -0.001, 0.0005, -0.0005, 0.001, 0.0, -0.001)


def steady_boots(
    arms: Sequence[Arm],
    ms_per_step: Mapping[str, float],
    boots_an_arm: int = 4,
    *,
    accept_length: Mapping[str, float] | None = None,
    ttft_ms: Mapping[str, tuple[float, float] | None] | None = None,
    seen: Mapping[str, Seen] | None = None,
) -> list[Boot]:
    """Boots of a quiet host: a tenth of a percent apart."""
    return [
        a_boot(
            arm,
            position,
            ms_per_step[arm.name] * (1.0 + WOBBLE[position % len(WOBBLE)]),
            accept_length=(accept_length or {}).get(arm.name, 2.0),
            ttft_ms=(ttft_ms or {}).get(arm.name, (TTFT_MS, 900.0)),
            seen=(seen or {}).get(arm.name),
        )
        for position, arm in enumerate(in_order(arms, boots_an_arm))
    ]
