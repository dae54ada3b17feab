"""Ways between GPUs: the same names as by asking everything of every two GPUs, for fewer calls."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from nccltune.host.nvml_links import Endpoint, NvLink, read_link_names, read_nvlinks
from nccltune.host.nvml_readings import read_optional
from tests.support.fake_nvml import (
    NODE,
    NOT_SUPPORTED,
    OTHER_GPU,
    PHB,
    PIX,
    PXB,
    SWITCH,
    SYS,
    FakeNvml,
    FakeNvmlError,
    fake_gpu,
    nvswitch_host,
    pcie_host,
)

if TYPE_CHECKING:
    from tests.support.fake_nvml import FakeGpu

P2P = "nvmlDeviceGetP2PStatus"
ANCESTOR = "nvmlDeviceGetTopologyCommonAncestor"
KINDS_BY_STATUS: dict[int | None, set[bool | None]] = {None: {False}, 0: {False, None}}
LEVELS = {PIX: "PIX", PXB: "PXB", PHB: "PHB", NODE: "NODE", SYS: "SYS"}


def endpoints_of(nvml: FakeNvml) -> list[Endpoint]:
    nvml.nvmlInit()
    return [Endpoint(gpu, gpu.bus_id.lower(), read_nvlinks(nvml, gpu)) for gpu in nvml.gpus]


def name_plainly(nvml: FakeNvml, one: Endpoint, other: Endpoint) -> str | None:
    """Name one way by everything that the driver says of it, in this direction."""
    if direct_count := sum(link.remote_bus_id == other.pci_bus_id for link in one.nvlinks):
        return f"NV{direct_count}"
    status = read_optional(nvml, nvml.nvmlDeviceGetP2PStatus, one.handle, other.handle, 2)
    kinds = KINDS_BY_STATUS.get(status, set())
    nvlink_count = min(sum(link.is_to_gpu in kinds for link in end.nvlinks) for end in (one, other))
    if nvlink_count:
        return f"NV{nvlink_count}"
    level = read_optional(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one.handle, other.handle)
    return None if level is None else LEVELS[level]


def made_up_host(seed: int) -> FakeNvml:
    """Make a host of GPUs behind switches, linked straight, with hidden ends, or without NVLink."""
    dice = random.Random(seed)
    gpus = [fake_gpu(idx) for idx in range(dice.randint(2, 6))]
    indices = range(len(gpus))
    fabrics = [dice.choice((0, 0, 1, None)) for _ in indices]
    is_silent = dice.random() < 0.2
    straight = {frozenset((i, j)): dice.choice((0, 0, 4)) for i in indices for j in range(i)}
    shared = {pair: dice.choice((True, False)) for pair in straight}
    levels = {pair: dice.choice((*LEVELS, None)) for pair in straight}
    is_switched = [dice.random() < 0.7 for _ in indices]
    for i in indices:
        if is_switched[i]:
            gpus[i].nvlinks = [("00000000:80:00.0", SWITCH)] * dice.randint(0, 18)
            continue
        kind = dice.choice((OTHER_GPU, None))
        for j in indices:
            if i != j and not is_switched[j]:
                gpus[i].nvlinks += [(gpus[j].bus_id, kind)] * straight[frozenset((i, j))]
        gpus[i].nvlinks += [("00000000:EE:00.0", None)] * dice.choice((0, 2))

    def is_granted(one: int, other: int) -> bool | None:
        if is_silent:
            return None
        if is_switched[one] and is_switched[other]:
            return fabrics[one] is not None and fabrics[one] == fabrics[other]
        return shared[frozenset((one, other))]

    def ancestor(one: int, other: int) -> int:
        if (level := levels[frozenset((one, other))]) is None:
            raise FakeNvmlError(NOT_SUPPORTED)
        return level

    return FakeNvml(gpus, ancestor=ancestor, has_nvlink_p2p=is_granted)


@pytest.mark.parametrize("seed", range(200))
def test_names_are_those_of_asking_everything_of_every_two_gpus(seed: int) -> None:
    nvml = made_up_host(seed)
    endpoints = endpoints_of(nvml)

    names = read_link_names(nvml, endpoints)

    assert names == {
        (i, j): name_plainly(nvml, one, other)
        for i, one in enumerate(endpoints)
        for j, other in enumerate(endpoints)
        if i != j
    }


def test_made_up_hosts_have_links_of_every_kind() -> None:
    found: Counter[str] = Counter()
    for seed in range(200):
        nvml = made_up_host(seed)
        names = read_link_names(nvml, endpoints_of(nvml))
        found.update(str(name)[:2] for name in names.values())

    assert min(found[kind] for kind in ("NV", "PI", "PX", "PH", "NO", "SY")) > 20


def test_a_straight_link_that_one_end_hides_is_named_as_each_end_has_it() -> None:
    nvml = FakeNvml([fake_gpu(0), fake_gpu(1)], ancestor=lambda _a, _b: NODE)
    one, other = endpoints_of(nvml)
    one = Endpoint(one.handle, one.pci_bus_id, (NvLink(other.pci_bus_id, is_to_gpu=True),))

    assert read_link_names(nvml, [one, other]) == {(0, 1): "NV1", (1, 0): "NODE"}


def two_fabrics() -> FakeNvml:
    nvml = nvswitch_host(8)
    nvml.has_nvlink_p2p = lambda a, b: a // 4 == b // 4
    return nvml


def hidden_ends() -> FakeNvml:
    """Which GPUs the links lead to is hidden, so that nothing follows from one pair for another."""
    nvml = nvswitch_host(8)
    for gpu in nvml.gpus:
        gpu.nvlinks = [("00000000:EE:00.0", None)] * 6
    return nvml


@pytest.mark.parametrize(
    ("nvml", "p2p_count", "ancestor_count"),
    [
        pytest.param(nvswitch_host(2), 1, 0, id="two behind NVSwitch"),
        pytest.param(nvswitch_host(4), 6, 0, id="four behind NVSwitch"),
        pytest.param(nvswitch_host(8), 28, 0, id="eight behind NVSwitch"),
        pytest.param(hidden_ends(), 28, 0, id="eight with hidden ends"),
        pytest.param(two_fabrics(), 28, 16, id="two fabrics of four"),
        pytest.param(pcie_host(8), 0, 28, id="eight without NVLink"),
    ],
)
def test_the_driver_is_asked_no_more_than_needed(
    nvml: FakeNvml, p2p_count: int, ancestor_count: int
) -> None:
    endpoints = endpoints_of(nvml)
    nvml.calls.clear()

    read_link_names(nvml, endpoints)

    assert (nvml.calls[P2P], nvml.calls[ANCESTOR]) == (p2p_count, ancestor_count)


def test_gpus_of_one_fabric_have_as_many_links_as_the_weaker_end() -> None:
    nvml = nvswitch_host(4)
    weak: FakeGpu = nvml.gpus[2]
    del weak.nvlinks[10:]

    names = read_link_names(nvml, endpoints_of(nvml))

    assert {names[2, 0], names[1, 2], names[3, 2]} == {"NV10"}
    assert {names[0, 1], names[1, 3], names[3, 0]} == {"NV18"}
