"""How much a decode step varies from start to start here, over all verifies of the same launch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nccltune.errors import NccltuneError
from nccltune.sglang.command import parse_launch
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
    """Return standard deviation and degrees of freedom, pooled over arms; None below two boots.

    Each arm varies around its own mean.
    """
    squares, df = 0.0, 0
    for arm in dict.fromkeys(boot.arm for boot in boots):
        times = [boot.ms_per_verify for boot in boots if boot.arm == arm]
        logs = [math.log(each) for each in times if each is not None and each > 0.0]
        if len(logs) > 1:
            squares += statistics.variance(logs) * (len(logs) - 1)
            df += len(logs) - 1
    return (math.sqrt(squares / df), df) if df else None


def _key(record: VerifyRecord) -> str | None:
    """Name the launch on this host under this load; None where it is not understood."""
    try:
        flags = parse_launch(record.launch).flags
    except NccltuneError:
        return None
    gpus = None if record.fingerprint is None else record.fingerprint.to_json()
    kept = {name: values for name, values in flags.items() if name not in FREE_FLAGS}
    facts = {"host": gpus, "flags": kept, "environ": record.environ, "load": record.load}
    return noise_key(Sample.BOOT, facts)
