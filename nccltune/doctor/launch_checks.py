"""One launch command: what carries its all-reduces, and whether the profile's buffers fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nccltune.doctor.check import Check, Status
from nccltune.errors import NccltuneError
from nccltune.host.match import has_full_nvlink
from nccltune.sglang.allreduce_path import all_reduce_path
from nccltune.sglang.command import speculation_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nccltune.doctor.case import Case
    from nccltune.profile import Profile
    from nccltune.sglang.command import LaunchCommand

_MIB = 1 << 20
_COMMUNICATORS = 2
"""The captured all-reduces have one, torch's eager collectives a second, made after the KV cache
has taken its share."""

_LL_BYTES = 512 << 10
_LL128_BYTES = 4_915_200
_SIMPLE_BYTES = 4 << 20
_CONNECTIONS_PER_CHANNEL = 3
"""A ring's one, and up to two of a tree inside one host."""

_CHANNEL_NAMES = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")
_FRACTION_FLAG = "mem_fraction_static"


def check_launch(case: Case) -> Iterator[Check]:
    """Look at what the launch does with its sums and its memory."""
    if case.launch is None:
        for name in ("all_reduce_path", "nccl_memory"):
            yield Check(name, Status.SKIP, "no launch command was given")
        return
    yield _path(case, case.launch)
    yield _memory(case, case.launch)


def _path(case: Case, launch: LaunchCommand) -> Check:
    name = "all_reduce_path"
    verdict = all_reduce_path(
        launch,
        case.shape,
        gpu_architecture=case.gpus[0].compute_capability if case.gpus else None,
        has_full_nvlink=has_full_nvlink(case.seen_by_launch, launch),
        environ=case.environ,
        version=case.server.sglang_version if case.server else None,
    )
    model = f" (model: {case.shape_problem})" if case.shape is None else ""
    if verdict.is_nccl:
        return Check(name, Status.OK, verdict.reason + model)
    if verdict.is_nccl is None:
        message = f"NCCL may not carry the verify pass: {verdict.reason}{model}"
    else:
        message = f"NCCL settings do not reach the verify pass: {verdict.reason}{model}"
    fix = f"to let NCCL carry it: {verdict.fix}" if verdict.fix else ""
    return Check(name, Status.WARN, message, fix)


def _memory(case: Case, launch: LaunchCommand) -> Check:
    """Set what NCCL takes beside what the launch leaves to everything but weights and KV cache."""
    name = "nccl_memory"
    profile = case.active.profile
    if profile is None:
        return Check(name, Status.SKIP, "no usable profile is active")
    taken = _taken_bytes(profile)
    if taken is None:
        message = f"what NCCL takes under profile {profile.name} was not measured"
        return Check(name, Status.SKIP, message)
    taken_bytes, how = taken
    more_bytes = _more_than_defaults_bytes(profile)
    takes = f"NCCL takes {how} {taken_bytes // _MIB} MiB a GPU under profile {profile.name}"
    takes += _beside_defaults(more_bytes)
    totals = [gpu.memory_total_bytes for gpu in case.gpus if gpu.memory_total_bytes]
    fraction = _fraction(launch)
    if fraction is None:
        message = f"{takes}; SGLang chooses --mem-fraction-static by itself, and knows no profile"
        return Check(name, Status.OK, message)
    if not totals:
        return Check(name, Status.SKIP, f"{takes}; the GPUs' memory is not known")
    left_bytes = int((1.0 - fraction) * min(totals))
    leaves = f"--mem-fraction-static {fraction:g} leaves {left_bytes // _MIB} MiB"
    other_bytes = _other_needs_bytes(launch)
    fix = "lower --mem-fraction-static"
    if more_bytes is None or more_bytes > 0:
        fix += ", or choose a profile with smaller buffers or fewer channels"
    if taken_bytes > left_bytes:
        return Check(name, Status.FAIL, f"{takes}, and {leaves}: it runs out of memory", fix)
    if taken_bytes + other_bytes > left_bytes:
        message = (
            f"{takes}, and {leaves}, of which SGLang itself reckons with "
            f"{other_bytes // _MIB} MiB for activations and graphs: it may run out of memory"
        )
        return Check(name, Status.WARN, message, fix)
    return Check(name, Status.OK, f"{takes}, and {leaves}")


def _taken_bytes(profile: Profile) -> tuple[int, str] | None:
    """Return what two communicators take, and how that is known."""
    measured = _measured_bytes(profile, "memory_bytes_per_gpu")
    if measured is not None:
        return measured, "(as measured)"
    channels = _number(profile.settings, *_CHANNEL_NAMES)
    if channels is None:
        return None
    simple_bytes = _number(profile.settings, "NCCL_BUFFSIZE") or _SIMPLE_BYTES
    each_bytes = simple_bytes + _LL_BYTES + _LL128_BYTES
    estimate_bytes = _COMMUNICATORS * channels * _CONNECTIONS_PER_CHANNEL * each_bytes
    return estimate_bytes, "(reckoned, not measured) up to"


def _more_than_defaults_bytes(profile: Profile) -> int | None:
    """Return how much more that is than under the defaults, where both were measured."""
    taken = _measured_bytes(profile, "memory_bytes_per_gpu")
    baseline = _measured_bytes(profile, "memory_baseline_bytes_per_gpu")
    return None if taken is None or baseline is None else taken - baseline


def _beside_defaults(more_bytes: int | None) -> str:
    if more_bytes is None:
        return ""
    if more_bytes <= 0:
        return ", no more than under the defaults"
    return f", {more_bytes / _MIB:.0f} MiB more than under the defaults"


def _measured_bytes(profile: Profile, name: str) -> int | None:
    """Read a figure of the search; a profile file may hold anything there."""
    value = profile.measured.get(name)
    return value if type(value) is int and value > 0 else None


def _number(settings: Mapping[str, str], *names: str) -> int | None:
    found = next((settings[name] for name in names if name in settings), "")
    return int(found) if found.isdecimal() else None


def _fraction(launch: LaunchCommand) -> float | None:
    try:
        fraction = float(launch.value(_FRACTION_FLAG) or "")
    except ValueError:
        return None
    return fraction if 0.0 < fraction <= 1.0 else None


def _other_needs_bytes(launch: LaunchCommand) -> int:
    """Return what SGLang reckons with beside weights and KV cache when it chooses the fraction.

    Its own rule of thumb, in MiB (server_args.py in 0.5.15, memory_hook.py in 0.5.23): 512, 1.5 a
    token of a prefill chunk, 2 a captured batch size up to the largest, an eighth of a GiB a rank.
    """
    chunk, max_bs = 8192, 0
    try:
        shape = speculation_shape(launch, None)
        chunk, max_bs = shape.chunked_prefill_size, max(shape.captured, default=0)
    except NccltuneError:
        max_bs = launch.cuda_graph_max_bs or 0
    ranks = launch.tp_size * launch.pp_size
    return int((512 + 1.5 * max(chunk, 2048) + 2 * max_bs + ranks * 128) * _MIB)
