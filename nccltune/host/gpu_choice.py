"""Which GPUs the ranks run on: ``CUDA_VISIBLE_DEVICES`` in any of its forms, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nccltune.errors import HostError, UsageProblem

if TYPE_CHECKING:
    from collections.abc import Set

    from nccltune.host.hardware import Gpu, Hardware

VARIABLE = "CUDA_VISIBLE_DEVICES"
DEFAULT_SHARED_RANKS = 2
MAX_SHARED_RANKS = 16
_MAX_DIGITS = 9
_MAX_QUOTED_CHARS = 120


def numbers_named(visible: str | None) -> Set[int] | None:
    """Return the GPUs that the variable names by number; None where it takes all to tell which.

    Args:
        visible: as for ``choose_gpus``.
    """
    tokens = [token.strip() for token in (visible or "").split(",")]
    return {int(token) for token in tokens} if all(map(_is_number, tokens)) else None


def choose_gpus(
    hardware: Hardware,
    visible: str | None,
    rank_count: int | None,
    *,
    is_shared: bool,
    group: range | None = None,
) -> tuple[Gpu, ...]:
    """Return one GPU a rank, in rank order.

    An index counts as NVML counts. CUDA's own default order can differ between GPUs of different
    models; ranks are given UUIDs, so that what is chosen here is what they get.

    Args:
        hardware: what the host has.
        visible: value of ``CUDA_VISIBLE_DEVICES``; None when it is unset.
        rank_count: how many ranks; None for one on every visible GPU (two on a shared one).
        is_shared: put all ranks on the first GPU: of the group where that is visible.
        group: which of the visible GPUs the ranks run on, by their places; None for the first ones.

    Raises:
        HostError: there is no GPU to use, or MIG is on.
        UsageProblem: the variable names a GPU that is not there, twice, or in no known form; fewer
            GPUs than ranks; fewer than two ranks, or too many for one GPU.
    """
    if rank_count is not None and rank_count < 2:
        raise UsageProblem(
            f"tensor parallel size {rank_count} has no all-reduce to tune: ask for 2 or more",
            code="too_few_ranks",
        )
    if is_shared and rank_count is not None and rank_count > MAX_SHARED_RANKS:
        raise UsageProblem(
            f"{rank_count} ranks on one GPU: --share-gpu takes at most {MAX_SHARED_RANKS}",
            code="too_many_ranks",
        )
    gpus = visible_gpus(hardware, visible)
    places = range(rank_count or max(2, len(gpus))) if group is None else group
    if is_shared:
        first = gpus[places[0]] if places[0] < len(gpus) else gpus[0]
        chosen = (first,) * (rank_count or DEFAULT_SHARED_RANKS)
    else:
        _check_count(len(gpus), places, hardware)
        chosen = tuple(gpus[place] for place in places)
    for gpu in chosen:
        if gpu.is_mig_enabled:
            raise _mig_error(f"GPU {gpu.idx} ({gpu.uuid}) is in MIG mode")
    return chosen


def visible_gpus(hardware: Hardware, visible: str | None) -> tuple[Gpu, ...]:
    """Return every GPU that is visible, in the order of the variable.

    Args:
        hardware: what the host has.
        visible: as for ``choose_gpus``.

    Raises:
        HostError: there is no GPU to use, or a MIG instance is named.
        UsageProblem: the variable names a GPU that is not there, twice, or in no known form.
    """
    if not hardware.gpus:
        raise HostError(
            "the NVIDIA driver shows no GPU: see whether nvidia-smi lists one, and start the"
            " container with GPU access (docker: --gpus all)",
            code="no_gpu",
        )
    if visible is None:
        return hardware.gpus
    if not visible.strip():
        raise HostError(
            f"{VARIABLE} is set and empty, so that no GPU is visible: unset it or name GPUs",
            code="no_gpu_visible",
        )
    chosen: list[Gpu] = []
    for token in visible.split(","):
        gpu = _gpu_named(hardware, token.strip(), visible)
        if gpu in chosen:
            raise _visible_problem(visible, f"GPU {gpu.idx} ({gpu.uuid}) is named twice")
        chosen.append(gpu)
    return tuple(chosen)


def _gpu_named(hardware: Hardware, token: str, visible: str) -> Gpu:
    if _is_number(token):
        return _gpu_by_index(hardware, int(token), visible)
    if token.upper().startswith("MIG-"):
        raise _mig_error(f"{VARIABLE} names the MIG instance {_shortened(token)!r}")
    if token.upper().startswith("GPU-"):
        return _gpu_by_uuid(hardware, token, visible)
    if token.startswith("-") and token[1:].isdecimal():
        reason = f"{_shortened(token)} hides every GPU from there on; leave it out"
    elif not token:
        reason = "an entry is empty, and CUDA would stop there; leave the comma out"
    else:
        reason = f"{_shortened(token)!r} is neither an index nor a GPU's UUID"
    raise _visible_problem(visible, reason)


def _is_number(token: str) -> bool:
    return token.isascii() and token.isdecimal() and len(token) <= _MAX_DIGITS


def _gpu_by_index(hardware: Hardware, idx: int, visible: str) -> Gpu:
    for gpu in hardware.gpus:
        if gpu.idx == idx:
            return gpu
    known = ", ".join(str(gpu.idx) for gpu in hardware.gpus)
    lost = "".join(f"; {problem}" for problem in hardware.problems)
    raise _visible_problem(
        visible, f"there is no GPU {idx}, only {known}, and CUDA would stop there{lost}"
    )


def _gpu_by_uuid(hardware: Hardware, prefix: str, visible: str) -> Gpu:
    found = [gpu for gpu in hardware.gpus if gpu.uuid.lower().startswith(prefix.lower())]
    if not found:
        known = ", ".join(gpu.uuid for gpu in hardware.gpus)
        shown = _shortened(prefix)
        raise _visible_problem(visible, f"no GPU has a UUID that starts {shown!r}, only {known}")
    if len(found) > 1:
        known = ", ".join(gpu.uuid for gpu in found)
        raise _visible_problem(visible, f"{prefix!r} fits several GPUs: {known}")
    return found[0]


def _check_count(visible_count: int, places: range, hardware: Hardware) -> None:
    ranks, needed = len(places), places[-1] + 1
    if visible_count >= needed:
        return
    lost = "".join(f"; {problem}" for problem in hardware.problems)
    layout = f" (--base-gpu-id {places.start}, --gpu-id-step {places.step})"
    raise UsageProblem(
        f"{ranks} ranks need {needed} GPUs{layout if needed > ranks else ''}, but {visible_count}"
        f" {_is_visible(visible_count)}: ask for fewer ranks, make more GPUs visible, or put all"
        f" ranks on one with --share-gpu (diagnosis only){lost}",
        code="too_few_gpus",
    )


def _is_visible(count: int) -> str:
    return "is visible" if count == 1 else "are visible"


def _visible_problem(visible: str, reason: str) -> UsageProblem:
    message = f"{VARIABLE}={_shortened(visible)}: {reason}"
    return UsageProblem(message, code="bad_visible_devices")


def _shortened(text: str) -> str:
    """Cut what nobody would read to its end: the variable can hold as much as an environment does.

    >>> _shortened("0,1"), len(_shortened("0," * 20000))
    ('0,1', 142)
    """
    if len(text) <= _MAX_QUOTED_CHARS:
        return text
    return f"{text[:_MAX_QUOTED_CHARS]}... ({len(text)} characters)"


def _mig_error(what: str) -> HostError:
    return HostError(
        f"{what}: MIG instances cannot reach one another (no P2P), so that NCCL cannot run on them;"
        " choose whole GPUs or turn MIG off (nvidia-smi -mig 0)",
        code="mig_unsupported",
    )
