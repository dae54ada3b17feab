"""What the child that asks the driver has to say to the one that decides."""

from __future__ import annotations

from collections.abc import Mapping

from nccltune.errors import HostError
from nccltune.host.facts import VISIBLE_VARIABLE, HostFacts, read_visible
from nccltune.host.fingerprint import Fingerprint
from nccltune.inject.apart import ApartError, Errand, receive

DRIVER_TIMEOUT_S = 25.0
"""A driver without its persistence daemon takes seconds for each GPU."""


def driver_answer(
    errand: Errand, asked: Mapping[str, str], environ: Mapping[str, str]
) -> HostFacts:
    """Wait for the GPUs, read in a child or, where the command changes their order, here.

    Args:
        errand: the child.
        asked: the environment that it has read them in.
        environ: of the launch.

    Raises:
        HostError: the driver has an error to tell, or no answer.
        UsageProblem: as for ``read_visible``.
    """
    if asked.get(VISIBLE_VARIABLE) != environ.get(VISIBLE_VARIABLE):
        return read_visible(environ, is_last=True)
    try:
        answer = receive(errand, DRIVER_TIMEOUT_S)
    except ApartError as error:
        raise HostError(f"the NVIDIA driver does not answer: {error}", code="nvml_failed") from None
    if "problem" in answer:
        raise HostError(str(answer["problem"]), code="nvml_failed")
    architecture = answer.get("architecture")
    return HostFacts(
        fingerprint=Fingerprint.from_json(answer["fingerprint"]),
        gpu_architecture=architecture if isinstance(architecture, str) else None,
    )
