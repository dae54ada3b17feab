"""How much a decode step varies from start to start here, over all verifies of the same launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.sglang.command import parse_launch
from nccltune.stats import aa_noise
from nccltune.store.noise import Sample, keep_noise, kept_noise, noise_key
from nccltune.verify.judging.stored import FREE_FLAGS

if TYPE_CHECKING:
    from nccltune.verify.model import Boot
    from nccltune.verify.record import VerifyRecord


def known_boot_noise(record: VerifyRecord) -> float | None:
    """Return the boot-to-boot standard deviation that earlier verifies saw, in log."""
    key = _key(record)
    return None if key is None else kept_noise(key)


def keep_boot_noise(record: VerifyRecord) -> None:
    """Keep what this verify says of it.

    Raises:
        NccltuneError: the state folder cannot be written.
    """
    key, noise = _key(record), boot_noise(record.boots)
    if key is not None and noise is not None:
        keep_noise(key, *noise)


def boot_noise(boots: Sequence[Boot]) -> tuple[float, int] | None:
    """Return standard deviation and degrees of freedom over all arms; None for too few boots.

    Each arm varies around a middle of its own.
    """
    arms: dict[str, list[float]] = {}
    for boot in boots:
        if boot.ms_per_verify is not None and boot.ms_per_verify > 0.0:
            arms.setdefault(boot.arm, []).append(boot.ms_per_verify)
    noise = aa_noise(*arms.values())
    return None if noise is None else (noise, sum(len(times) - 1 for times in arms.values()))


def _key(record: VerifyRecord) -> str | None:
    """Name the launch on this host under this load; None where it is not understood."""
    try:
        flags = parse_launch(record.launch).flags
    except NccltuneError:
        return None
    gpus = None if record.fingerprint is None else record.fingerprint.to_json()
    kept = {name: values for name, values in flags.items() if name not in FREE_FLAGS}
    # A server that runs has its profile in its environment already.
    judged = {name for arm in record.arms if arm.profile for name in arm.profile.settings}
    environ = {name: value for name, value in record.environ.items() if name not in judged}
    facts = {"host": gpus, "flags": kept, "environ": environ, "load": record.load}
    return noise_key(Sample.BOOT, facts)
